//! Registry, wiring, KV blocks and scheduler: drives the stages and answers the gateway.

pub mod request;

pub use request::{
    CoordinatorHandle, Event, FinishReason, GenerateRequest, Readiness, SamplingParams,
    SubmitError, TokenLogprob,
};
