//! The operations a DeepSeek-Sparse-Attention model is written in, and the backends that run them.
//!
//! [`Backend`] is the one interface: `baton-model` is written against it once, and every device implements it.
//! This crate knows nothing of configs, checkpoints, pipelines or gRPC.

pub mod backend;
pub mod batch;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod sampling;
pub mod selftest;

pub use backend::{
    Backend, Dtype, ExpertMatrices, IndexParams, KernelError, MatrixData, MatrixView, RopeLayout,
    RopeTable, RouterParams,
};
pub use batch::{Batch, Segment};
pub use cpu::{CpuBackend, CpuOptions};
#[cfg(feature = "cuda")]
pub use cuda::{CudaBackend, CudaOptions};
