//! The `tcp` link.

use std::io::{ErrorKind, IoSlice, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream, ToSocketAddrs as _};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, SendTimeoutError, Sender, bounded};

use super::{Counters, HandOffReceiver, HandOffSender, LinkError, LinkStats};
use crate::frame::{
    EncodedFrame, FrameLimits, HEADER_BYTES, assemble, decode_descriptors, decode_header, encode,
};
use crate::handoff::HandOff;

/// Frames that may wait on either side of the socket before the sender is held back.
const QUEUE: usize = 2;
const MAGIC: [u8; 4] = *b"BTNH";
/// Bytes of a [`Hello`], which precedes the frames in both directions.
pub const HELLO_BYTES: usize = 64;
/// Pause between two looks for a connection.
const RETRY: Duration = Duration::from_millis(20);

/// What both ends say first and must agree on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Wiring.
    pub epoch: u64,
    /// Sending stage.
    pub from_stage: usize,
    /// Digest over the contracts of all stages, 32 hex digits.
    pub contract_digest: String,
}

impl Hello {
    fn to_bytes(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..12].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.from_stage as u32).to_le_bytes());
        let digest = self.contract_digest.as_bytes();
        let length = digest.len().min(HELLO_BYTES - 16);
        bytes[16..16 + length].copy_from_slice(&digest[..length]);
        bytes
    }

    fn read(stream: &mut TcpStream, peer: &str) -> Result<Self, LinkError> {
        let mut bytes = [0; HELLO_BYTES];
        stream.read_exact(&mut bytes).map_err(|e| io(peer, &e))?;
        if bytes[..4] != MAGIC {
            return Err(io(peer, &std::io::Error::other("not a baton link")));
        }
        let mut epoch = [0; 8];
        epoch.copy_from_slice(&bytes[4..12]);
        let mut stage = [0; 4];
        stage.copy_from_slice(&bytes[12..16]);
        let digest = bytes[16..].iter().copied().take_while(|&b| b != 0).collect::<Vec<u8>>();
        Ok(Self {
            epoch: u64::from_le_bytes(epoch),
            from_stage: u32::from_le_bytes(stage) as usize,
            contract_digest: String::from_utf8_lossy(&digest).into_owned(),
        })
    }

    fn ensure_same(&self, theirs: &Self, peer: &str) -> Result<(), LinkError> {
        let differ = |what, ours: String, theirs: String| {
            Err(LinkError::Handshake { peer: peer.to_owned(), what, ours, theirs })
        };
        if self.contract_digest != theirs.contract_digest {
            let (ours, theirs) = (self.contract_digest.clone(), theirs.contract_digest.clone());
            return differ("contract digests", ours, theirs);
        }
        if self.epoch != theirs.epoch {
            return differ("epochs", self.epoch.to_string(), theirs.epoch.to_string());
        }
        if self.from_stage != theirs.from_stage {
            let (ours, theirs) = (self.from_stage.to_string(), theirs.from_stage.to_string());
            return differ("sending stages", ours, theirs);
        }
        Ok(())
    }
}

/// Sends over one connection. Dropping it closes the connection once what was queued is written.
#[derive(Debug)]
pub struct TcpSender {
    peer: String,
    queue: Option<Sender<(EncodedFrame, usize, usize)>>,
    failures: Receiver<LinkError>,
    limits: FrameLimits,
    counters: Arc<Counters>,
    writer: Option<thread::JoinHandle<()>>,
}

/// Receives over one connection. Dropping it closes the connection.
#[derive(Debug)]
pub struct TcpReceiver {
    peer: String,
    epoch: u64,
    stream: TcpStream,
    frames: Receiver<Result<HandOff, LinkError>>,
    counters: Arc<Counters>,
    reader: Option<thread::JoinHandle<()>>,
    /// A connection that failed stays failed.
    failed: Option<LinkError>,
}

fn io(peer: &str, error: &std::io::Error) -> LinkError {
    LinkError::Io { peer: peer.to_owned(), message: error.to_string() }
}

/// Connects to the next stage and agrees with it.
///
/// # Errors
/// When it does not answer before the deadline, or holds another contract.
pub fn connect(
    address: &str,
    hello: &Hello,
    limits: FrameLimits,
    deadline: Instant,
) -> Result<TcpSender, LinkError> {
    let peer = format!("to stage {} ({address})", hello.from_stage + 1);
    let mut stream = loop {
        let attempt = address
            .to_socket_addrs()
            .and_then(|mut found| found.next().ok_or_else(|| ErrorKind::AddrNotAvailable.into()))
            .and_then(|found| TcpStream::connect_timeout(&found, Duration::from_secs(1)));
        match attempt {
            Ok(stream) => break stream,
            Err(error) if Instant::now() >= deadline => return Err(io(&peer, &error)),
            Err(_) => thread::sleep(RETRY),
        }
    };
    agree(&mut stream, hello, &peer, deadline)?;
    let (queue, frames) = bounded::<(EncodedFrame, usize, usize)>(QUEUE);
    let (failed, failures) = bounded(1);
    let counters = Arc::new(Counters::default());
    let writer = {
        let (counters, peer) = (Arc::clone(&counters), peer.clone());
        thread::Builder::new().name("link-send".into()).spawn(move || {
            for (frame, rows, carry) in frames {
                if let Err(error) = write(&mut stream, &frame) {
                    // The receiver of this is asked before every send; it holds the first failure.
                    let _ = failed.try_send(io(&peer, &error));
                    break;
                }
                counters.add(rows, frame.payload_bytes(), frame.head.len(), carry);
            }
            let _ = stream.shutdown(Shutdown::Write);
        })
    }
    .map_err(|e| io(&peer, &e))?;
    Ok(TcpSender { peer, queue: Some(queue), failures, limits, counters, writer: Some(writer) })
}

/// Takes the connection of the previous stage and agrees with it. Connections of another epoch are turned away.
///
/// # Errors
/// When none comes before the deadline, or the peer holds another contract.
pub fn accept(
    listener: &TcpListener,
    hello: &Hello,
    limits: FrameLimits,
    deadline: Instant,
) -> Result<TcpReceiver, LinkError> {
    let waiting = format!("from stage {}", hello.from_stage);
    listener.set_nonblocking(true).map_err(|e| io(&waiting, &e))?;
    loop {
        match listener.accept() {
            Ok((mut stream, address)) => {
                let peer = format!("{waiting} ({address})");
                stream.set_nonblocking(false).map_err(|e| io(&peer, &e))?;
                match agree(&mut stream, hello, &peer, deadline) {
                    Ok(()) => return receive(stream, peer, hello.epoch, limits),
                    Err(LinkError::Handshake { what: "epochs", .. } | LinkError::Io { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(RETRY),
            Err(error) => return Err(io(&waiting, &error)),
        }
        if Instant::now() >= deadline {
            return Err(LinkError::Timeout { peer: waiting, step_id: 0 });
        }
    }
}

/// Both ends send their hello, then compare: so both know what differs.
fn agree(
    stream: &mut TcpStream,
    hello: &Hello,
    peer: &str,
    deadline: Instant,
) -> Result<(), LinkError> {
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    stream.set_nodelay(true).map_err(|e| io(peer, &e))?;
    stream.set_read_timeout(Some(left)).map_err(|e| io(peer, &e))?;
    stream.write_all(&hello.to_bytes()).map_err(|e| io(peer, &e))?;
    let theirs = Hello::read(stream, peer)?;
    stream.set_read_timeout(None).map_err(|e| io(peer, &e))?;
    hello.ensure_same(&theirs, peer)
}

fn receive(
    stream: TcpStream,
    peer: String,
    epoch: u64,
    limits: FrameLimits,
) -> Result<TcpReceiver, LinkError> {
    let mut reading = stream.try_clone().map_err(|e| io(&peer, &e))?;
    let (queue, frames) = bounded(QUEUE);
    let counters = Arc::new(Counters::default());
    let reader = {
        let (counters, peer) = (Arc::clone(&counters), peer.clone());
        thread::Builder::new().name("link-receive".into()).spawn(move || {
            loop {
                let frame = read_frame(&mut reading, &limits, &peer, &counters);
                let last = frame.is_err();
                if queue.send(frame).is_err() || last {
                    break;
                }
            }
        })
    }
    .map_err(|e| io(&peer, &e))?;
    Ok(TcpReceiver { peer, epoch, stream, frames, counters, reader: Some(reader), failed: None })
}

fn write(stream: &mut TcpStream, frame: &EncodedFrame) -> std::io::Result<()> {
    let mut pieces: Vec<IoSlice<'_>> = std::iter::once(&frame.head)
        .chain(&frame.payloads)
        .map(|piece| IoSlice::new(piece))
        .collect();
    let mut left = &mut pieces[..];
    IoSlice::advance_slices(&mut left, 0);
    while !left.is_empty() {
        match stream.write_vectored(left) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => IoSlice::advance_slices(&mut left, written),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn read_frame(
    stream: &mut TcpStream,
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
    match stream.read(&mut fixed[..1]) {
        Ok(0) => return Err(LinkError::Closed { peer: peer.to_owned() }),
        Ok(_) => {}
        Err(error) => return Err(io(peer, &error)),
    }
    stream.read_exact(&mut fixed[1..]).map_err(broken)?;
    let header = decode_header(&fixed, limits).map_err(bad)?;
    let mut head = fixed.to_vec();
    head.resize(HEADER_BYTES + header.descriptor_bytes(), 0);
    stream.read_exact(&mut head[HEADER_BYTES..]).map_err(broken)?;
    let descriptors = decode_descriptors(&header, &head, limits).map_err(bad)?;
    let mut payloads = Vec::with_capacity(descriptors.len());
    for descriptor in &descriptors {
        let mut payload = vec![0; descriptor.bytes];
        stream.read_exact(&mut payload).map_err(broken)?;
        payloads.push(payload);
    }
    let bytes = payloads.iter().map(Vec::len).sum();
    let hand_off = assemble(&header, &descriptors, payloads, limits).map_err(bad)?;
    let carry = hand_off.carry.as_ref().map_or(0, |carry| carry.indices.len());
    counters.add(hand_off.rows, bytes, head.len(), carry);
    Ok(hand_off)
}

impl HandOffSender for TcpSender {
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

impl HandOffReceiver for TcpReceiver {
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
                    self.counters.dropped.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
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

impl Drop for TcpSender {
    fn drop(&mut self) {
        // The writer ends when the queue does; it is not waited for, since its peer may have stopped reading.
        self.queue = None;
        self.writer = None;
    }
}

impl Drop for TcpReceiver {
    fn drop(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Both);
        // Lets a reader go that waits for room in the queue.
        self.frames = crossbeam_channel::never();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

#[cfg(test)]
mod tests;
