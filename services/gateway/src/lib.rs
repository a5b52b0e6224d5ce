//! The OpenAI-compatible HTTP API in front of the pipeline.
//!
//! A request passes `completions` or `chat` (its fields become [`GenerateRequest`]s, through `params`, `prompt`,
//! `chat_template` and `tokenizer`), then `generate` (hands one request per choice to the coordinator), then `choice`
//! (tokens become text, cut at stop strings) and leaves as one JSON answer or through `sse`. The gateway knows nothing
//! of stages or tensors; it talks to the pipeline only through [`CoordinatorHandle`].
//!
//! [`GenerateRequest`]: baton_coordinator::GenerateRequest
//! [`CoordinatorHandle`]: baton_coordinator::CoordinatorHandle

mod answer;
mod app;
mod body;
mod chat;
mod chat_template;
mod choice;
mod completions;
mod config;
mod constraint;
mod detokenizer;
mod error;
mod fields;
mod generate;
mod health;
mod logprobs;
mod metrics;
mod models;
mod output;
mod page;
mod params;
mod prompt;
mod responses;
mod sampling_fields;
mod sse;
mod stop;
mod tokenize;
mod tokenizer;
mod trace;

pub use app::{Gateway, serve};
pub use chat_template::TemplateError;
pub use config::{GatewayConfig, GatewayError, GenerationDefaults, Limits};
pub use tokenizer::TokenizerError;
