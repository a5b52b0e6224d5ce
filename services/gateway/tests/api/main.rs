//! The gateway over a real socket, with a fake coordinator behind it.

mod cancel;
mod chat;
mod clients;
mod completions;
mod errors;
mod fake;
mod health;
mod stream;
