//! The `shm` link: frames go through a ring in memory that both processes map. The connection stays open beside it; its
//! end is how either side learns that the other process has died.

mod ring;

use std::fs::File;
use std::io::ErrorKind;
use std::net::{Shutdown, TcpStream};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use self::ring::{Reader, Ring, Watch, Writer};
use super::LinkError;
use super::connection::{Connection, io};
use super::queue::{LinkReceiver, LinkSender, Outgoing};
use crate::frame::FrameLimits;

/// Where files live in memory alone.
const DIRECTORY: &str = "/dev/shm";
const PREFIX: &str = "baton-link-";
/// Bytes under way at most. Frames may be larger: they pass through it in pieces. Small enough for a container's usual
/// 64 MiB of shared memory.
const CAPACITY: u64 = 4 << 20;

/// Whether the peer still has the connection open.
struct Peer(TcpStream);

impl Watch for Peer {
    fn is_there(&self) -> bool {
        match self.0.peek(&mut [0]) {
            Ok(bytes) => bytes > 0,
            Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        }
    }
}

impl Outgoing for Writer<Peer> {
    fn finish(&mut self) {
        self.close();
    }
}

fn setup(peer: &str, what: impl std::fmt::Display) -> LinkError {
    LinkError::SetUp { peer: peer.to_owned(), message: what.to_string() }
}

/// Makes the ring, and tells the peer where it is.
pub(super) fn sender(
    mut connection: Connection,
    limits: FrameLimits,
    deadline: Instant,
) -> Result<LinkSender, LinkError> {
    let peer = connection.peer.clone();
    let failed = |error: std::io::Error| {
        setup(&peer, format_args!("{CAPACITY} bytes in {DIRECTORY}: {error}"))
    };
    let file = tempfile::Builder::new().prefix(PREFIX).tempfile_in(DIRECTORY).map_err(failed)?;
    let ring = Ring::create(file.as_file(), CAPACITY).map_err(failed)?;
    connection.tell(file.path().as_os_str().as_bytes())?;
    let answer = connection.hear(deadline)?;
    // Both have it mapped, or neither will: the name is not needed any more and must not outlive the processes.
    drop(file);
    if !answer.is_empty() {
        return Err(setup(&peer, format_args!("it says: {}", String::from_utf8_lossy(&answer))));
    }
    let watch = watch(connection.stream).map_err(|e| io(&peer, &e))?;
    LinkSender::start(peer, Writer::new(Arc::new(ring), watch), limits)
}

/// Maps the ring that the peer made.
pub(super) fn receiver(
    mut connection: Connection,
    epoch: u64,
    limits: FrameLimits,
    deadline: Instant,
) -> Result<LinkReceiver, LinkError> {
    let peer = connection.peer.clone();
    let path = PathBuf::from(std::ffi::OsStr::from_bytes(&connection.hear(deadline)?));
    let ring = match open(&path) {
        Ok(ring) => Arc::new(ring),
        Err(error) => {
            let message = format!("{}: {error}", path.display());
            connection.tell(message.as_bytes())?;
            return Err(setup(&peer, message));
        }
    };
    connection.tell(&[])?;
    let socket = connection.stream.try_clone().map_err(|e| io(&peer, &e))?;
    let watch = watch(connection.stream).map_err(|e| io(&peer, &e))?;
    let interrupt = {
        let ring = Arc::clone(&ring);
        Box::new(move || {
            ring.close_reader();
            // The peer may have closed it.
            let _ = socket.shutdown(Shutdown::Both);
        })
    };
    LinkReceiver::start(peer, epoch, Reader::new(ring, watch), interrupt, limits)
}

/// Opens a ring by its name, which must be one of ours: the peer says what to open.
fn open(path: &Path) -> std::io::Result<Ring> {
    let ours = path.parent() == Some(Path::new(DIRECTORY))
        && path.file_name().is_some_and(|name| name.as_bytes().starts_with(PREFIX.as_bytes()));
    if !ours {
        return Err(std::io::Error::other("not the name of a link's memory"));
    }
    Ring::open(&File::options().read(true).write(true).open(path)?)
}

fn watch(stream: TcpStream) -> std::io::Result<Peer> {
    stream.set_nonblocking(true)?;
    Ok(Peer(stream))
}
