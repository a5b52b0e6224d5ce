//! Support of the end-to-end tests: the real `baton` program, started on the tiny checkpoints of `tests/models`, and the
//! answers that were recorded for them.
//!
//! The program is looked for beside the test's own build directory, or where `BATON_BIN` says; build it first with
//! `cargo build --bin baton`.

pub mod browser;
pub mod client;
pub mod collector;
pub mod models;
pub mod oracle;
pub mod pipeline;
pub mod process;
pub mod program;
pub mod prometheus;
pub mod proxy;
pub mod server;

pub use browser::Browser;
pub use client::Client;
pub use collector::Collector;
pub use oracle::{Oracle, OraclePrompt};
pub use pipeline::Pipeline;
pub use program::Program;
pub use prometheus::Prometheus;
pub use proxy::Proxy;
pub use server::Server;
