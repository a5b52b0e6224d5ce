//! From a model's `config.json` to its index schedule, its partition into stages and the hand-off contract of every cut.
//!
//! Pure: no tensors, no I/O beyond reading a config file, nothing asynchronous.

pub mod config;
pub mod contract;
pub mod schedule;

pub use config::{Architecture, Fp8Block, MlpKind, ModelConfig, RopeLayout, RopeParameters, Yarn};
pub use contract::{Contract, HiddenDtype, IndexDtype, StageContract};
pub use schedule::{IndexSchedule, LayerKind};
