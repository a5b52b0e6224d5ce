//! Who moves a hand-off from one stage to the next.
//!
//! A link is blocking and has deadlines: the compute thread calls it. Threads of the link's own do the reading and writing,
//! so that sending a step overlaps with computing the next, and a bounded queue holds back a sender that is too fast.

mod connection;
mod queue;
mod shm;
mod tcp;

use std::net::TcpListener;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use baton_plan::LinkKind;
use thiserror::Error;

pub use self::connection::{HELLO_BYTES, Hello};
pub use self::queue::{LinkReceiver, LinkSender};
use crate::frame::{FrameError, FrameLimits};
use crate::handoff::HandOff;

/// Sends hand-offs to the next stage, in order.
pub trait HandOffSender: Send {
    /// Queues a hand-off; waits while the queue is full, until `deadline`.
    ///
    /// # Errors
    /// When the link has failed or the deadline passes.
    fn send(&mut self, hand_off: HandOff, deadline: Instant) -> Result<(), LinkError>;
    /// What went through so far.
    fn stats(&self) -> LinkStats;
}

/// Receives hand-offs from the previous stage, in order.
pub trait HandOffReceiver: Send {
    /// The hand-off of `step_id`. Frames of earlier steps or epochs are dropped by their id and counted; a later one is an
    /// error, since steps run in order.
    ///
    /// # Errors
    /// When the peer is gone, sent something wrong, or nothing comes before the deadline.
    fn recv(&mut self, step_id: u64, deadline: Instant) -> Result<HandOff, LinkError>;
    /// What came through so far.
    fn stats(&self) -> LinkStats;
}

/// Connects to the next stage over the link that `hello` names, and agrees with it.
///
/// # Errors
/// When it does not answer before the deadline, holds another contract, or the link cannot be made.
pub fn connect(
    address: &str,
    hello: &Hello,
    limits: FrameLimits,
    deadline: Instant,
) -> Result<LinkSender, LinkError> {
    let connection = connection::dial(address, hello, deadline)?;
    match hello.link {
        LinkKind::Tcp => tcp::sender(connection, limits),
        LinkKind::Shm => shm::sender(connection, limits, deadline),
    }
}

/// Takes the connection of the previous stage over the link that `hello` names, and agrees with it. Connections of another
/// epoch are turned away.
///
/// # Errors
/// When none comes before the deadline, the peer holds another contract, or the link cannot be made.
pub fn accept(
    listener: &TcpListener,
    hello: &Hello,
    limits: FrameLimits,
    deadline: Instant,
) -> Result<LinkReceiver, LinkError> {
    let connection = connection::answer(listener, hello, deadline)?;
    match hello.link {
        LinkKind::Tcp => tcp::receiver(connection, hello.epoch, limits),
        LinkKind::Shm => shm::receiver(connection, hello.epoch, limits, deadline),
    }
}

/// Totals of one direction of a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkStats {
    /// Whole frames.
    pub frames: u64,
    /// Rows in them.
    pub rows: u64,
    /// Bytes of tensors.
    pub payload_bytes: u64,
    /// Bytes of headers and descriptors.
    pub header_bytes: u64,
    /// Index entries in them.
    pub carry_entries: u64,
    /// Frames of aborted steps or older epochs that were dropped.
    pub dropped: u64,
}

/// [`LinkStats`] while they grow.
#[derive(Debug, Default)]
struct Counters {
    frames: AtomicU64,
    rows: AtomicU64,
    payload_bytes: AtomicU64,
    header_bytes: AtomicU64,
    carry_entries: AtomicU64,
    dropped: AtomicU64,
}

impl Counters {
    fn add(&self, rows: usize, payload: usize, header: usize, carry: usize) {
        self.frames.fetch_add(1, Ordering::Relaxed);
        self.rows.fetch_add(rows as u64, Ordering::Relaxed);
        self.payload_bytes.fetch_add(payload as u64, Ordering::Relaxed);
        self.header_bytes.fetch_add(header as u64, Ordering::Relaxed);
        self.carry_entries.fetch_add(carry as u64, Ordering::Relaxed);
    }

    fn read(&self) -> LinkStats {
        LinkStats {
            frames: self.frames.load(Ordering::Relaxed),
            rows: self.rows.load(Ordering::Relaxed),
            payload_bytes: self.payload_bytes.load(Ordering::Relaxed),
            header_bytes: self.header_bytes.load(Ordering::Relaxed),
            carry_entries: self.carry_entries.load(Ordering::Relaxed),
            dropped: self.dropped.load(Ordering::Relaxed),
        }
    }
}

/// A link that cannot go on, or could not be made.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum LinkError {
    /// The socket failed.
    #[error("link {peer}: {message}")]
    Io {
        /// The other end.
        peer: String,
        /// What the system said.
        message: String,
    },
    /// The two ends agree, but what the link needs cannot be had.
    #[error("link {peer}: it cannot be set up: {message}")]
    SetUp {
        /// The other end.
        peer: String,
        /// What is missing.
        message: String,
    },
    /// The peer closed the link between two frames.
    #[error("link {peer}: the peer closed it")]
    Closed {
        /// The other end.
        peer: String,
    },
    /// The peer closed the link inside a frame.
    #[error("link {peer}: the peer closed it inside a frame")]
    Broken {
        /// The other end.
        peer: String,
    },
    /// Nothing came, or nothing could be sent, in time.
    #[error("link {peer}: step {step_id} did not pass in time")]
    Timeout {
        /// The other end.
        peer: String,
        /// The step.
        step_id: u64,
    },
    /// The peer sent bytes that are not an agreed hand-off.
    #[error("link {peer}: {error}")]
    Frame {
        /// The other end.
        peer: String,
        /// What is wrong with them.
        error: FrameError,
    },
    /// A step came before its turn.
    #[error("link {peer}: step {found} arrived while step {expected} is due")]
    OutOfOrder {
        /// The other end.
        peer: String,
        /// The step that came.
        found: u64,
        /// The step that is due.
        expected: u64,
    },
    /// The two ends do not hold the same contract, epoch or neighbours.
    #[error("link {peer}: {what} differ: this side has {ours}, the other {theirs}")]
    Handshake {
        /// The other end.
        peer: String,
        /// What differs.
        what: &'static str,
        /// This side's.
        ours: String,
        /// The other's.
        theirs: String,
    },
}

impl LinkError {
    /// A stable word for the kind of error.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Io { .. } => "link-io",
            Self::SetUp { .. } => "link-set-up",
            Self::Closed { .. } => "link-closed",
            Self::Broken { .. } => "link-broken",
            Self::Timeout { .. } => "hand-off-timeout",
            Self::Frame { .. } => "bad-frame",
            Self::OutOfOrder { .. } => "out-of-order",
            Self::Handshake { .. } => "handshake",
        }
    }
}

#[cfg(test)]
mod tests;
