//! `baton bench`: measurements. One module per kind.

pub(crate) mod pipeline;
pub(crate) mod serve;
pub(crate) mod stage;
