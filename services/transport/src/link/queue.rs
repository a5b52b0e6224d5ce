//! The two ends of a link: a bounded queue and a thread that writes or reads frames, whatever they travel over.

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Instant;

use crossbeam_channel::{Receiver, RecvTimeoutError, SendTimeoutError, Sender, bounded};

use super::connection::io;
use super::{Counters, HandOffReceiver, HandOffSender, LinkError, LinkStats};
use crate::frame::{
    EncodedFrame, FrameLimits, HEADER_BYTES, assemble, decode_descriptors, decode_header, encode,
};
use crate::handoff::HandOff;

/// Frames that may wait on either side before the sender is held back.
const QUEUE: usize = 2;

/// Bytes on their way to the peer.
pub(super) trait Outgoing: Write + Send + 'static {
    /// Says that nothing more follows.
    fn finish(&mut self);
}

/// Ends the wait of whoever reads from a link; its reads end from then on.
pub(super) type Interrupt = Box<dyn FnMut() + Send>;

/// Sends over one link. Dropping it closes the link once what was queued is written.
#[derive(Debug)]
pub struct LinkSender {
    peer: String,
    queue: Option<Sender<(EncodedFrame, usize, usize)>>,
    failures: Receiver<LinkError>,
    limits: FrameLimits,
    counters: Arc<Counters>,
}

/// Receives over one link. Dropping it closes the link.
pub struct LinkReceiver {
    peer: String,
    epoch: u64,
    interrupt: Interrupt,
    frames: Receiver<Result<HandOff, LinkError>>,
    counters: Arc<Counters>,
    reader: Option<thread::JoinHandle<()>>,
    /// A link that failed stays failed.
    failed: Option<LinkError>,
}

impl LinkSender {
    /// Starts the thread that writes.
    pub(super) fn start(
        peer: String,
        mut outgoing: impl Outgoing,
        limits: FrameLimits,
    ) -> Result<Self, LinkError> {
        let (queue, frames) = bounded::<(EncodedFrame, usize, usize)>(QUEUE);
        let (failed, failures) = bounded(1);
        let counters = Arc::new(Counters::default());
        let writer = {
            let (counters, peer) = (Arc::clone(&counters), peer.clone());
            thread::Builder::new().name("link-send".into()).spawn(move || {
                for (frame, rows, carry) in frames {
                    if let Err(error) = write(&mut outgoing, &frame) {
                        // The receiver of this is asked before every send; it holds the first failure.
                        let _ = failed.try_send(io(&peer, &error));
                        break;
                    }
                    counters.add(rows, frame.payload_bytes(), frame.head.len(), carry);
                }
                outgoing.finish();
            })
        };
        // It ends when the queue does; it is not waited for, since its peer may have stopped reading.
        writer.map_err(|e| io(&peer, &e))?;
        Ok(Self { peer, queue: Some(queue), failures, limits, counters })
    }
}

impl LinkReceiver {
    /// Starts the thread that reads.
    pub(super) fn start(
        peer: String,
        epoch: u64,
        mut incoming: impl Read + Send + 'static,
        interrupt: Interrupt,
        limits: FrameLimits,
    ) -> Result<Self, LinkError> {
        let (queue, frames) = bounded(QUEUE);
        let counters = Arc::new(Counters::default());
        let reader = {
            let (counters, peer) = (Arc::clone(&counters), peer.clone());
            thread::Builder::new().name("link-receive".into()).spawn(move || {
                loop {
                    let frame = read(&mut incoming, &limits, &peer, &counters);
                    let last = frame.is_err();
                    if queue.send(frame).is_err() || last {
                        break;
                    }
                }
            })
        }
        .map_err(|e| io(&peer, &e))?;
        Ok(Self { peer, epoch, interrupt, frames, counters, reader: Some(reader), failed: None })
    }
}

fn write(outgoing: &mut impl Write, frame: &EncodedFrame) -> std::io::Result<()> {
    let mut pieces: Vec<IoSlice<'_>> = std::iter::once(&frame.head)
        .chain(&frame.payloads)
        .map(|piece| IoSlice::new(piece))
        .collect();
    let mut left = &mut pieces[..];
    IoSlice::advance_slices(&mut left, 0);
    while !left.is_empty() {
        match outgoing.write_vectored(left) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => IoSlice::advance_slices(&mut left, written),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn read(
    incoming: &mut impl Read,
    limits: &FrameLimits,
    peer: &str,
    counters: &Counters,
) -> Result<HandOff, LinkError> {
    let bad = |error| LinkError::Frame { peer: peer.to_owned(), error };
    let broken = |error: std::io::Error| match error.kind() {
        ErrorKind::UnexpectedEof => LinkError::Broken { peer: peer.to_owned() },
        _ => io(peer, &error),
    };
    let mut fixed = [0; HEADER_BYTES];
    // The first byte alone, to tell a peer that has finished from one that broke off.
    match incoming.read(&mut fixed[..1]) {
        Ok(0) => return Err(LinkError::Closed { peer: peer.to_owned() }),
        Ok(_) => {}
        Err(error) => return Err(io(peer, &error)),
    }
    incoming.read_exact(&mut fixed[1..]).map_err(broken)?;
    let header = decode_header(&fixed, limits).map_err(bad)?;
    let mut head = fixed.to_vec();
    head.resize(HEADER_BYTES + header.descriptor_bytes(), 0);
    incoming.read_exact(&mut head[HEADER_BYTES..]).map_err(broken)?;
    let descriptors = decode_descriptors(&header, &head, limits).map_err(bad)?;
    let mut payloads = Vec::with_capacity(descriptors.len());
    for descriptor in &descriptors {
        let mut payload = vec![0; descriptor.bytes];
        incoming.read_exact(&mut payload).map_err(broken)?;
        payloads.push(payload);
    }
    let bytes = payloads.iter().map(Vec::len).sum();
    let hand_off = assemble(&header, &descriptors, payloads, limits).map_err(bad)?;
    let carry = hand_off.carry.as_ref().map_or(0, |carry| carry.indices.len());
    counters.add(hand_off.rows, bytes, head.len(), carry);
    Ok(hand_off)
}

impl HandOffSender for LinkSender {
    fn send(&mut self, hand_off: HandOff, deadline: Instant) -> Result<(), LinkError> {
        if let Ok(error) = self.failures.try_recv() {
            return Err(error);
        }
        let closed = || LinkError::Closed { peer: self.peer.clone() };
        let queue = self.queue.as_ref().ok_or_else(closed)?;
        let (step_id, rows) = (hand_off.step_id, hand_off.rows);
        let carry = hand_off.carry.as_ref().map_or(0, |carry| carry.indices.len());
        let frame = encode(hand_off, &self.limits);
        queue.send_deadline((frame, rows, carry), deadline).map_err(|error| match error {
            SendTimeoutError::Timeout(_) => LinkError::Timeout { peer: self.peer.clone(), step_id },
            SendTimeoutError::Disconnected(_) => {
                self.failures.try_recv().unwrap_or_else(|_| closed())
            }
        })
    }

    fn stats(&self) -> LinkStats {
        self.counters.read()
    }
}

impl HandOffReceiver for LinkReceiver {
    fn recv(&mut self, step_id: u64, deadline: Instant) -> Result<HandOff, LinkError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        loop {
            let frame = self.frames.recv_deadline(deadline).unwrap_or_else(|error| {
                Err(match error {
                    RecvTimeoutError::Timeout => {
                        LinkError::Timeout { peer: self.peer.clone(), step_id }
                    }
                    RecvTimeoutError::Disconnected => LinkError::Closed { peer: self.peer.clone() },
                })
            });
            match frame {
                Ok(hand_off) if hand_off.epoch < self.epoch || hand_off.step_id < step_id => {
                    self.counters.dropped.fetch_add(1, Ordering::Relaxed);
                }
                Ok(hand_off) if hand_off.step_id > step_id => {
                    let (peer, found) = (self.peer.clone(), hand_off.step_id);
                    let error = LinkError::OutOfOrder { peer, found, expected: step_id };
                    self.failed = Some(error.clone());
                    return Err(error);
                }
                Ok(hand_off) => return Ok(hand_off),
                Err(error @ LinkError::Timeout { .. }) => return Err(error),
                Err(error) => {
                    self.failed = Some(error.clone());
                    return Err(error);
                }
            }
        }
    }

    fn stats(&self) -> LinkStats {
        self.counters.read()
    }
}

impl std::fmt::Debug for LinkReceiver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LinkReceiver").field("peer", &self.peer).finish_non_exhaustive()
    }
}

impl Drop for LinkReceiver {
    fn drop(&mut self) {
        (self.interrupt)();
        // Lets a reader go that waits for room in the queue.
        self.frames = crossbeam_channel::never();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}
