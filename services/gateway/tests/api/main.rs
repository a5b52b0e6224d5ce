//! The gateway over a real socket, with a fake coordinator behind it.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails, in its helpers too")]

mod cancel;
mod chat;
mod clients;
mod completions;
mod errors;
mod fake;
mod health;
mod metrics;
mod responses;
mod stream;
