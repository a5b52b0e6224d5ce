//! From a model's `config.json` to its index schedule, its partition into stages and the hand-off contract of every cut.
//!
//! Pure: no tensors, no I/O beyond reading a config file, nothing asynchronous.

pub mod balance;
pub mod config;
pub mod contract;
pub mod kv;
pub mod schedule;
pub mod tensors;
#[cfg(test)]
mod test_models;

pub use balance::{Balance, BalanceError, BalanceOptions, balance};
pub use config::{Architecture, Fp8Block, MlpKind, ModelConfig, RopeLayout, RopeParameters, Yarn};
pub use contract::{Contract, HiddenDtype, IndexDtype, StageContract};
pub use kv::KvLayout;
pub use schedule::{IndexSchedule, LayerKind};
pub use tensors::{Precision, Storage, TensorSpec};
