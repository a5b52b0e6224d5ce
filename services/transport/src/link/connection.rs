//! The connection under every link: found, and agreed on by both ends before anything else is said.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{TcpListener, TcpStream, ToSocketAddrs as _};
use std::thread;
use std::time::{Duration, Instant};

use baton_plan::LinkKind;

use super::LinkError;

const MAGIC: [u8; 4] = *b"BTNH";
/// Bytes of a [`Hello`], which precedes everything else in both directions.
pub const HELLO_BYTES: usize = 64;
/// Where the digest stands in them; the kind of link is the byte after it.
const DIGEST: std::ops::Range<usize> = 16..63;
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
    /// How hand-offs will travel.
    pub link: LinkKind,
}

/// A connection to a peer that holds the same contract.
#[derive(Debug)]
pub(super) struct Connection {
    /// What messages call the peer.
    pub(super) peer: String,
    pub(super) stream: TcpStream,
}

/// A failure of the system, on the way to or from `peer`.
pub(super) fn io(peer: &str, error: &std::io::Error) -> LinkError {
    LinkError::Io { peer: peer.to_owned(), message: error.to_string() }
}

impl Hello {
    pub(super) fn to_bytes(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..12].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.from_stage as u32).to_le_bytes());
        let digest = self.contract_digest.as_bytes();
        let length = digest.len().min(DIGEST.len());
        bytes[DIGEST][..length].copy_from_slice(&digest[..length]);
        bytes[DIGEST.end] = code(self.link);
        bytes
    }

    pub(super) fn read(stream: &mut TcpStream, peer: &str) -> Result<Self, LinkError> {
        let mut bytes = [0; HELLO_BYTES];
        stream.read_exact(&mut bytes).map_err(|e| io(peer, &e))?;
        if bytes[..4] != MAGIC {
            return Err(io(peer, &std::io::Error::other("not a baton link")));
        }
        let mut epoch = [0; 8];
        epoch.copy_from_slice(&bytes[4..12]);
        let mut stage = [0; 4];
        stage.copy_from_slice(&bytes[12..16]);
        let digest = bytes[DIGEST].iter().copied().take_while(|&b| b != 0).collect::<Vec<u8>>();
        let link = LinkKind::ALL.into_iter().find(|kind| code(*kind) == bytes[DIGEST.end]);
        Ok(Self {
            epoch: u64::from_le_bytes(epoch),
            from_stage: u32::from_le_bytes(stage) as usize,
            contract_digest: String::from_utf8_lossy(&digest).into_owned(),
            link: link
                .ok_or_else(|| io(peer, &std::io::Error::other("an unknown kind of link")))?,
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
        if self.link != theirs.link {
            return differ("links", self.link.to_string(), theirs.link.to_string());
        }
        Ok(())
    }
}

/// A kind of link in a hello.
fn code(link: LinkKind) -> u8 {
    match link {
        LinkKind::Tcp => 0,
        LinkKind::Shm => 1,
    }
}

/// Connects to the next stage and agrees with it.
///
/// # Errors
/// When it does not answer before the deadline, or holds another contract.
pub(super) fn dial(
    address: &str,
    hello: &Hello,
    deadline: Instant,
) -> Result<Connection, LinkError> {
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
    Ok(Connection { peer, stream })
}

/// Takes the connection of the previous stage and agrees with it. Connections of another epoch are turned away.
///
/// # Errors
/// When none comes before the deadline, or the peer holds another contract.
pub(super) fn answer(
    listener: &TcpListener,
    hello: &Hello,
    deadline: Instant,
) -> Result<Connection, LinkError> {
    let waiting = format!("from stage {}", hello.from_stage);
    listener.set_nonblocking(true).map_err(|e| io(&waiting, &e))?;
    loop {
        match listener.accept() {
            Ok((mut stream, address)) => {
                let peer = format!("{waiting} ({address})");
                stream.set_nonblocking(false).map_err(|e| io(&peer, &e))?;
                match agree(&mut stream, hello, &peer, deadline) {
                    Ok(()) => return Ok(Connection { peer, stream }),
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
    stream.set_nodelay(true).map_err(|e| io(peer, &e))?;
    stream.set_read_timeout(Some(left(deadline))).map_err(|e| io(peer, &e))?;
    stream.write_all(&hello.to_bytes()).map_err(|e| io(peer, &e))?;
    let theirs = Hello::read(stream, peer)?;
    stream.set_read_timeout(None).map_err(|e| io(peer, &e))?;
    hello.ensure_same(&theirs, peer)
}

/// Time until the deadline, as a socket's timeout wants it.
fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}

impl Connection {
    /// Sends a short text; what links tell each other before the first frame.
    ///
    /// # Errors
    /// When the connection fails.
    pub(super) fn tell(&mut self, text: &[u8]) -> Result<(), LinkError> {
        let mut bytes = (text.len() as u16).to_le_bytes().to_vec();
        bytes.extend_from_slice(&text[..text.len().min(usize::from(u16::MAX))]);
        self.stream.write_all(&bytes).map_err(|e| io(&self.peer, &e))
    }

    /// The peer's next text.
    ///
    /// # Errors
    /// When none comes before the deadline.
    pub(super) fn hear(&mut self, deadline: Instant) -> Result<Vec<u8>, LinkError> {
        let peer = &self.peer;
        self.stream.set_read_timeout(Some(left(deadline))).map_err(|e| io(peer, &e))?;
        let mut length = [0; 2];
        self.stream.read_exact(&mut length).map_err(|e| io(peer, &e))?;
        let mut text = vec![0; usize::from(u16::from_le_bytes(length))];
        self.stream.read_exact(&mut text).map_err(|e| io(peer, &e))?;
        self.stream.set_read_timeout(None).map_err(|e| io(peer, &e))?;
        Ok(text)
    }
}
