//! A proxy in the link between two stages that reads every frame and may pass on another one.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use anyhow::{Context as _, ensure};
use baton_plan::{HiddenDtype, IndexDtype, ModelConfig};
use baton_transport::HandOff;
use baton_transport::frame::{self, FrameLimits, HEADER_BYTES};
use baton_transport::link::HELLO_BYTES;

use crate::models::model_dir;
use crate::pipeline::free_address;

/// What stands in the link: takes each hand-off in order and gives the bytes to pass on, none to hold it back.
type Change = dyn FnMut(HandOff, &FrameLimits) -> Vec<u8> + Send;

/// A listening proxy. Whatever goes through it is recorded.
#[derive(Clone, Debug)]
pub struct Proxy {
    address: SocketAddr,
    target: String,
    limits: FrameLimits,
    seen: Arc<Mutex<Seen>>,
}

/// What went through.
#[derive(Debug, Default)]
struct Seen {
    hand_offs: Vec<HandOff>,
    /// Why the proxy could not read or pass on something.
    fault: Option<String>,
}

/// The bytes of a hand-off, with right checksums.
#[must_use]
pub fn bytes(hand_off: HandOff, limits: &FrameLimits) -> Vec<u8> {
    frame::encode(hand_off, limits).to_bytes()
}

impl Proxy {
    /// A proxy in a pipeline of this tiny checkpoint with default options, which changes hand-offs with `change`.
    ///
    /// # Errors
    /// When the checkpoint cannot be read or there is no free port.
    pub fn start(
        model: &str,
        change: impl FnMut(HandOff, &FrameLimits) -> Vec<u8> + Send + 'static,
    ) -> anyhow::Result<Self> {
        let config = ModelConfig::load(&model_dir(model))?;
        let limits = FrameLimits {
            row_capacity: 512,
            hidden_size: config.hidden_size,
            hidden_dtype: HiddenDtype::F32,
            index_topk: config.index_topk,
            index_dtype: IndexDtype::I32,
        };
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let seen = Arc::default();
        let address = listener.local_addr()?;
        let proxy = Self { address, target: free_address()?, limits, seen };
        let serving = proxy.clone();
        let change: Arc<Mutex<Change>> = Arc::new(Mutex::new(change));
        thread::spawn(move || {
            for upstream in listener.incoming() {
                let (proxy, change) = (serving.clone(), Arc::clone(&change));
                thread::spawn(move || {
                    let served = upstream.context("accept").and_then(|u| proxy.serve(&u, &change));
                    if let Err(fault) = served {
                        let fault = format!("{fault:#}");
                        proxy.seen(|seen| seen.fault.get_or_insert(fault).clone());
                    }
                });
            }
        });
        Ok(proxy)
    }

    /// A proxy that changes nothing.
    ///
    /// # Errors
    /// As [`Proxy::start`].
    pub fn untouched(model: &str) -> anyhow::Result<Self> {
        Self::start(model, bytes)
    }

    /// Where the sending stage has to connect to.
    #[must_use]
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// Where the receiving stage has to listen.
    #[must_use]
    pub fn target(&self) -> &str {
        &self.target
    }

    /// Every hand-off that came, as it was sent.
    ///
    /// # Errors
    /// When the proxy itself failed, so that a test cannot take its fault for the stage's answer.
    pub fn hand_offs(&self) -> anyhow::Result<Vec<HandOff>> {
        self.seen(|seen| {
            ensure!(seen.fault.is_none(), "the proxy failed: {:?}", seen.fault);
            Ok(seen.hand_offs.clone())
        })
    }

    fn seen<T>(&self, look: impl FnOnce(&mut Seen) -> T) -> T {
        look(&mut self.seen.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// One connection: hellos and the way back as they are, frames through `change`.
    fn serve(&self, mut upstream: &TcpStream, change: &Mutex<Change>) -> anyhow::Result<()> {
        let downstream = TcpStream::connect(&self.target).context("connect to the stage")?;
        for stream in [upstream, &downstream] {
            stream.set_nodelay(true)?;
        }
        let (mut from, mut to) = (downstream.try_clone()?, upstream.try_clone()?);
        thread::spawn(move || {
            // Either side may close first.
            let _ = std::io::copy(&mut from, &mut to);
            let _ = to.shutdown(Shutdown::Both);
        });
        let mut hello = [0; HELLO_BYTES];
        upstream.read_exact(&mut hello).context("read the hello")?;
        (&downstream).write_all(&hello).context("pass on the hello")?;
        while let Some(received) = read(upstream, &self.limits)? {
            let hand_off = frame::decode(&received, &self.limits)?;
            // Else a proxy that changes nothing would change the bytes.
            let again = bytes(hand_off.clone(), &self.limits);
            ensure!(again == received, "the codec wrote step {} otherwise", hand_off.step_id);
            self.seen(|seen| seen.hand_offs.push(hand_off.clone()));
            let mut change = change.lock().unwrap_or_else(PoisonError::into_inner);
            let passed = change(hand_off, &self.limits);
            if (&downstream).write_all(&passed).is_err() {
                // A stage that has refused a frame closes the link.
                break;
            }
        }
        let _ = downstream.shutdown(Shutdown::Write);
        Ok(())
    }
}

/// The bytes of the next frame; none at the end.
fn read(mut stream: &TcpStream, limits: &FrameLimits) -> anyhow::Result<Option<Vec<u8>>> {
    let mut fixed = [0; HEADER_BYTES];
    match stream.read_exact(&mut fixed) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(None),
        // A stage that is killed resets its connections.
        Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(None),
        Err(error) => return Err(error).context("read a frame"),
    }
    let mut bytes = fixed.to_vec();
    let mut more = |count: usize, bytes: &mut Vec<u8>| {
        let end = bytes.len();
        bytes.resize(end + count, 0);
        stream.read_exact(&mut bytes[end..]).context("read the rest of a frame")
    };
    let header = frame::decode_header(&fixed, limits)?;
    more(header.descriptor_bytes(), &mut bytes)?;
    let descriptors = frame::decode_descriptors(&header, &bytes, limits)?;
    let payloads: usize = descriptors.iter().map(|d| d.bytes).sum();
    more(payloads, &mut bytes)?;
    Ok(Some(bytes))
}
