//! A pipeline whose coordinator and stages are started one by one, as they are on several machines.

use std::ffi::OsStr;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::net::TcpListener;

use anyhow::{Context as _, bail};

use crate::models::model_dir;
use crate::program::Program;
use crate::proxy::Proxy;
use crate::server::Server;

/// A running pipeline of single processes. Dropping it kills them all.
#[derive(Debug)]
pub struct Pipeline {
    /// The coordinator, and a client of it.
    pub server: Server,
    /// In stage order.
    pub stages: Vec<Program>,
    /// Where stages find the coordinator.
    pub grpc: String,
}

/// Ports below those that systems give to whoever asks for any: nobody else takes one between the look and its use.
const PORTS: std::ops::Range<u64> = 10_000..32_000;

/// An address that was free a moment ago.
///
/// # Errors
/// When none is found.
pub fn free_address() -> anyhow::Result<String> {
    for _ in 0..100 {
        // A new state is random, and another one in every process.
        let random = RandomState::new().build_hasher().finish();
        let address = format!("127.0.0.1:{}", PORTS.start + random % (PORTS.end - PORTS.start));
        if TcpListener::bind(&address).is_ok() {
            return Ok(address);
        }
    }
    bail!("no free port in {PORTS:?}")
}

/// The coordinator alone; stages find it at `grpc`.
///
/// # Errors
/// When it does not start.
pub fn coordinator(grpc: &str, model: &str, options: &[&str]) -> anyhow::Result<Program> {
    let model = model_dir(model);
    let fixed = ["coordinator", "--http", "127.0.0.1:0", "--grpc", grpc, "--model"].map(OsStr::new);
    let options = options.iter().map(OsStr::new);
    Program::start(fixed.into_iter().chain([model.as_os_str()]).chain(options))
}

/// One stage, which ends with its coordinator.
///
/// # Errors
/// When it does not start.
pub fn stage(grpc: &str, model: &str, options: &[&str]) -> anyhow::Result<Program> {
    let model = model_dir(model);
    let url = format!("http://{grpc}");
    let fixed = ["stage", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--threads", "1"];
    let named = ["--exit-with-coordinator", "--coordinator", &url, "--model"];
    let fixed = fixed.iter().chain(&named).map(OsStr::new);
    let options = options.iter().map(OsStr::new);
    Program::start(fixed.chain([model.as_os_str()]).chain(options))
}

impl Pipeline {
    /// Serves a tiny checkpoint over processes of their own. `proxies[n]`, where there is one, stands in the link into
    /// stage `n + 1`: the previous stage dials it instead. Requests do not wait for a failed pipeline to come back unless the
    /// options say so.
    ///
    /// # Errors
    /// When the pipeline is not ready in time.
    pub async fn start(
        model: &str,
        split: &str,
        options: &[&str],
        proxies: &[Option<&Proxy>],
    ) -> anyhow::Result<Self> {
        let grpc = free_address()?;
        let mut fixed = vec!["--split", split];
        if !options.contains(&"--recovery-timeout") {
            fixed.extend(["--recovery-timeout", "0"]);
        }
        let options: Vec<&str> = fixed.iter().chain(options).copied().collect();
        let program = coordinator(&grpc, model, &options)?;
        let stages = split.split(',').count();
        let mut programs = Vec::with_capacity(stages);
        for index in 0..stages {
            let number = index.to_string();
            let mut options = vec!["--index", &number];
            let before = index.checked_sub(1).and_then(|cut| *proxies.get(cut)?);
            let (link, advertised);
            if let Some(proxy) = before {
                (link, advertised) = (proxy.target().to_owned(), proxy.address());
                options.extend(["--link-listen", &link, "--advertise-link", &advertised]);
            }
            programs.push(stage(&grpc, model, &options)?);
        }
        let server = Server::ready(program, model)
            .await
            .with_context(|| programs.iter().map(Program::stderr).collect::<Vec<_>>().join("\n"))?;
        Ok(Self { server, stages: programs, grpc })
    }
}
