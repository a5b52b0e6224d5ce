//! The control plane's messages and services, generated from `proto/baton/v1`.
//!
//! Nothing but generated types and conversions lives here: what a message means is decided by the crate that reads it.

/// Version 1 of the protocol.
#[allow(missing_docs, unreachable_pub, unused_qualifications, clippy::all)]
pub mod v1 {
    tonic::include_proto!("baton.v1");

    /// The compiled descriptor, for gRPC reflection.
    pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/baton.bin"));
}
