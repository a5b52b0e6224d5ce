//! Stages in this process, driven over gRPC as a coordinator drives them, with hand-offs over real links.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod harness;
mod health;
mod links;
mod steps;
