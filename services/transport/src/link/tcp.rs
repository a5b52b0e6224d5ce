//! The `tcp` link: frames follow the hellos on the same connection.

use std::net::{Shutdown, TcpStream};

use super::LinkError;
use super::connection::{Connection, io};
use super::queue::{LinkReceiver, LinkSender, Outgoing};
use crate::frame::FrameLimits;

impl Outgoing for TcpStream {
    fn finish(&mut self) {
        // One that failed is closed already.
        let _ = self.shutdown(Shutdown::Write);
    }
}

pub(super) fn sender(connection: Connection, limits: FrameLimits) -> Result<LinkSender, LinkError> {
    LinkSender::start(connection.peer, connection.stream, limits)
}

pub(super) fn receiver(
    connection: Connection,
    epoch: u64,
    limits: FrameLimits,
) -> Result<LinkReceiver, LinkError> {
    let Connection { peer, stream } = connection;
    let incoming = stream.try_clone().map_err(|e| io(&peer, &e))?;
    let interrupt = Box::new(move || {
        // The peer may have closed it.
        let _ = stream.shutdown(Shutdown::Both);
    });
    LinkReceiver::start(peer, epoch, incoming, interrupt, limits)
}
