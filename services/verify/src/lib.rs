//! Shows whether a cut pipeline answers like the whole model.
//!
//! [`local`] runs the uncut model and a pipeline of slices side by side in this process; [`remote`] compares any two
//! OpenAI-compatible servers. Both end in a [`Report`]. The stock engines' fault, index rows that are not carried over a
//! cut, can be reproduced here ([`local::Reproduce`]) and nowhere else: neither the stage nor the links know of it.

mod error;
mod html;
pub mod local;
mod pipeline;
pub mod plot;
pub mod remote;
pub mod report;
pub mod server;
pub mod text;
mod watch;

pub use error::VerifyError;
pub use report::{Report, Verdict};

/// How far a verification has come: what it does, how much of it is done and how much there is.
pub type Progress<'a> = &'a mut dyn FnMut(&str, usize, usize);
