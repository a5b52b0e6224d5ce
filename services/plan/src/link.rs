//! Kinds of links that carry the hand-offs of a cut.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// A way for hand-offs to travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LinkKind {
    /// TCP sockets.
    Tcp,
    /// Memory that two processes of one host share.
    Shm,
}

impl LinkKind {
    /// Every kind.
    pub const ALL: [Self; 2] = [Self::Tcp, Self::Shm];

    /// Its name in options, messages and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Shm => "shm",
        }
    }
}

impl fmt::Display for LinkKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for LinkKind {
    type Err = UnknownLink;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let known = Self::ALL.into_iter().find(|kind| kind.name() == name);
        known.ok_or_else(|| UnknownLink(name.to_owned()))
    }
}

/// No link is called so.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("link {0:?}, expected tcp or shm")]
pub struct UnknownLink(String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for kind in LinkKind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
        }
        assert!("rdma".parse::<LinkKind>().unwrap_err().to_string().contains("\"rdma\""));
    }
}
