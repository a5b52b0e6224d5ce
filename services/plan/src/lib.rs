//! From a model's `config.json` to its index schedule, its partition into stages and the hand-off contract of every cut.
//!
//! Pure: no tensors, no I/O beyond reading a config file, nothing asynchronous.

pub mod balance;
pub mod config;
pub mod contract;
pub mod kv;
pub mod link;
pub mod partition;
pub mod published;
pub mod report;
pub mod schedule;
pub mod tensors;
#[cfg(test)]
mod test_models;

pub use balance::{Balance, BalanceError, BalanceOptions, balance};
pub use config::{
    Architecture, ConfigError, Fp8Block, MlpKind, ModelConfig, RopeLayout, RopeParameters,
    WeightDtype, Yarn,
};
pub use contract::{
    Contract, ContractError, ContractOptions, HiddenDtype, IndexDtype, StageContract,
};
pub use kv::KvLayout;
pub use link::LinkKind;
pub use partition::{Partition, PartitionError};
pub use report::PlanReport;
pub use schedule::{IndexSchedule, LayerKind};
pub use tensors::{Precision, Storage, TensorSpec};
