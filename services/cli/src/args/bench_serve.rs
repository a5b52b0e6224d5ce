//! `baton bench serve`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::bench::serve::Lengths;

#[derive(Args, Debug)]
pub(crate) struct BenchServeArgs {
    /// The server
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub(crate) url: String,
    /// Model name at the server [default: the only one it serves]
    #[arg(long, value_name = "NAME")]
    pub(crate) model_name: Option<String>,
    /// API key
    #[arg(long, value_name = "KEY", env = "OPENAI_API_KEY", hide_env_values = true)]
    pub(crate) api_key: Option<String>,
    /// Requests [default: 200, or as many as --seconds allow]
    #[arg(long, value_name = "N")]
    pub(crate) requests: Option<usize>,
    /// Begin no request after this time
    #[arg(long, value_name = "SECONDS")]
    pub(crate) seconds: Option<f64>,
    /// Requests under way at once [default: 8 in a closed loop, no bound with --rate]
    #[arg(long, value_name = "N")]
    pub(crate) concurrency: Option<usize>,
    /// Open loop: requests per second, whether or not earlier ones have been answered [default: a closed loop]
    #[arg(long, value_name = "PER_SECOND")]
    pub(crate) rate: Option<f64>,
    /// How requests of an open loop arrive
    #[arg(long, value_enum, default_value_t = ArrivalArg::Poisson, requires = "rate")]
    pub(crate) arrivals: ArrivalArg,
    /// Prompt tokens, about: N, LOW-HIGH, normal:MEAN,DEVIATION or lognormal:MEDIAN,SIGMA
    #[arg(long, value_name = "LENGTHS", default_value = "128")]
    pub(crate) prompt_tokens: Lengths,
    /// Most tokens of an answer, in the same forms
    #[arg(long, value_name = "LENGTHS", default_value = "64")]
    pub(crate) output_tokens: Lengths,
    /// Tokens that all prompts begin with, about, before their own
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    pub(crate) shared_prefix: usize,
    /// Ask through chat completions [default: completions]
    #[arg(long)]
    pub(crate) chat: bool,
    /// Temperature of all requests
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    pub(crate) temperature: f64,
    /// Ask for `ignore_eos`, so that answers have their whole length; vLLM, SGLang and baton know it
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// Of prompts, lengths and arrivals
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Write figures and plots as one self-contained page
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    /// Print JSON, with a line for every answer
    #[arg(long)]
    pub(crate) json: bool,
}

/// How requests of an open loop arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ArrivalArg {
    /// Independently of each other
    Poisson,
    /// At even times
    Even,
}
