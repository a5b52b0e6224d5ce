//! A pipeline whose coordinator and stages are started one by one, as they are on several machines.

use std::ffi::OsStr;
use std::net::TcpListener;

use anyhow::Context as _;

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
}

/// An address that was free a moment ago.
///
/// # Errors
/// When there is none.
pub fn free_address() -> anyhow::Result<String> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string())
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
    let fixed = ["stage", "--listen", "127.0.0.1:0", "--threads", "1", "--exit-with-coordinator"];
    let named = ["--coordinator", &url, "--model"];
    let fixed = fixed.iter().chain(&named).map(OsStr::new);
    let options = options.iter().map(OsStr::new);
    Program::start(fixed.chain([model.as_os_str()]).chain(options))
}

impl Pipeline {
    /// Serves a tiny checkpoint over processes of their own. `proxies[n]`, where there is one, stands in the link into
    /// stage `n + 1`: the previous stage dials it instead.
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
        let options: Vec<&str> = ["--split", split].iter().chain(options).copied().collect();
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
        Ok(Self { server, stages: programs })
    }
}
