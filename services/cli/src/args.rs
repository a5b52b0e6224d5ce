//! The command line.

mod bench_serve;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use baton_plan::HiddenDtype;
use clap::{Args, Parser, Subcommand, ValueEnum};

pub(crate) use bench_serve::{ArrivalArg, BenchServeArgs};

/// Serves GLM-5.x and other DeepSeek-Sparse-Attention models over a pipeline of stages.
#[derive(Debug, Parser)]
#[command(name = "baton", version)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) telemetry: TelemetryArgs,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Coordinator, HTTP API and N stage processes on this machine
    Up(UpArgs),
    /// Coordinator and HTTP API; stages dial in
    Coordinator(CoordinatorArgs),
    /// One stage
    Stage(StageArgs),
    /// Shows how a model would be cut, and which layers a stock engine would get wrong
    Plan(PlanArgs),
    /// Shows whether a cut pipeline answers like the whole model; exit status 0: same, 1: differs, 2: no verdict
    Verify(VerifyArgs),
    /// Compares every operation of a backend with the CPU's float32 reference; exit status 1 when one is out of bounds
    Selftest(SelftestArgs),
    /// Measurements
    #[command(subcommand)]
    Bench(BenchCommand),
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// What the control plane costs: real stages whose compute is a fixed delay
    Pipeline(BenchPipelineArgs),
    /// How a server bears a load: time to first token, time between tokens, throughput; any OpenAI-compatible server
    Serve(BenchServeArgs),
    /// What one stage's layers take on a GPU, beside the counted floor; weights are made up on the device
    Stage(BenchStageArgs),
}

/// Logs, and where traces and metrics are sent.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Telemetry")]
pub(crate) struct TelemetryArgs {
    /// Shape of log lines [default: text, or what BATON_LOG_FORMAT says]
    #[arg(long, value_enum, global = true)]
    pub(crate) log_format: Option<LogFormatArg>,
    /// OpenTelemetry collector that traces and metrics are sent to, without a path
    /// [default: what OTEL_EXPORTER_OTLP_ENDPOINT says; without it nothing is sent]
    #[arg(long, value_name = "URL", global = true)]
    pub(crate) otlp_endpoint: Option<String>,
    /// How it is spoken to [default: what OTEL_EXPORTER_OTLP_PROTOCOL says, else grpc]
    #[arg(long, value_enum, global = true)]
    pub(crate) otlp_protocol: Option<OtlpProtocol>,
    /// Share of requests without a trace of their own that are traced, 0 to 1
    /// [default: what OTEL_TRACES_SAMPLER says, else all]
    #[arg(long, value_name = "RATIO", global = true, value_parser = ratio)]
    pub(crate) trace_ratio: Option<f64>,
    /// Of how many decode steps of a traced request one gets spans; 1 traces them all
    #[arg(long, value_name = "N", global = true, default_value_t = baton_telemetry::traces::DECODE_EVERY,
        value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) trace_decode_every: u64,
}

/// Shape of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormatArg {
    /// For people
    Text,
    /// One JSON object per line
    Json,
}

/// How a collector is spoken to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OtlpProtocol {
    /// OTLP over gRPC
    Grpc,
    /// OTLP over HTTP, in protobuf
    Http,
}

/// How the model is cut.
#[derive(Args, Clone, Debug)]
pub(crate) struct SplitArgs {
    /// Number of stages; the cuts are chosen by cost and memory
    #[arg(long, value_name = "N", conflicts_with = "split")]
    pub(crate) stages: Option<usize>,
    /// Layers per stage, for example 3,3,4
    #[arg(long, value_name = "N,N,...")]
    pub(crate) split: Option<String>,
    /// Bytes each stage may use for weights and KV, one number for all or one per stage
    #[arg(long, value_name = "BYTES,...", value_delimiter = ',')]
    pub(crate) memory: Vec<u64>,
}

/// What the coordinator decides for the whole pipeline.
#[derive(Args, Clone, Debug)]
pub(crate) struct PipelineArgs {
    #[command(flatten)]
    pub(crate) split: SplitArgs,
    /// Name the API serves the model under [default: the directory's name]
    #[arg(long, value_name = "NAME")]
    pub(crate) served_model_name: Option<String>,
    /// How hand-offs travel
    #[arg(long, value_enum, default_value_t = LinkKind::Tcp)]
    pub(crate) link: LinkKind,
    /// Type of the residual stream [default: f32 on the CPU]
    #[arg(long, value_enum)]
    pub(crate) activation_dtype: Option<ActivationDtype>,
    /// Most rows (tokens) in one step
    #[arg(long, value_name = "ROWS", default_value_t = 512)]
    pub(crate) step_rows: usize,
    /// Most prompt tokens of one request in one step [default: the step's rows]
    #[arg(long, value_name = "ROWS")]
    pub(crate) prefill_chunk: Option<usize>,
    /// Micro-batches in flight [default: the number of stages]
    #[arg(long, value_name = "N")]
    pub(crate) micro_batches: Option<usize>,
    /// Tokens per KV block
    #[arg(long, value_name = "TOKENS", default_value_t = 16)]
    pub(crate) block_size: usize,
    /// Upper bound on KV blocks per stage [default: from memory and the longest context]
    #[arg(long, value_name = "BLOCKS")]
    pub(crate) kv_blocks: Option<u32>,
    /// Compute every prompt whole, even if an earlier one began alike
    #[arg(long)]
    pub(crate) no_prefix_cache: bool,
    /// Requests that may wait before further ones are refused
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub(crate) max_waiting: usize,
    /// Sequences that may run at once
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub(crate) max_sequences: usize,
    /// Show in `/metrics` what vLLM has too under vLLM's names as well, for dashboards and autoscalers made for it
    #[arg(long)]
    pub(crate) vllm_metrics: bool,
    /// Longest wait for all stages to join
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub(crate) join_timeout: Duration,
    /// Longest time a loading stage may go without progress
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = seconds)]
    pub(crate) load_timeout: Duration,
    /// Longest time a step may take
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub(crate) step_timeout: Duration,
    /// How long requests wait for a pipeline that lost a stage to come back; 0 ends them at once
    #[arg(long, value_name = "SECONDS", default_value = "300", value_parser = seconds)]
    pub(crate) recovery_timeout: Duration,
}

#[derive(Args, Debug)]
pub(crate) struct UpArgs {
    /// Checkpoint directory [default: the built-in demo model]
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
    /// Address of the HTTP API
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1")]
    pub(crate) host: std::net::IpAddr,
    /// Port of the HTTP API; 0 takes a free one
    #[arg(long, default_value_t = 8000)]
    pub(crate) port: u16,
    #[command(flatten)]
    pub(crate) pipeline: PipelineArgs,
    /// Device of the stages
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    pub(crate) backend: Device,
    /// GPU of each stage, from 0 [default: the stage's index, over the GPUs that there are]
    #[arg(long, value_name = "N,N,...", value_delimiter = ',')]
    pub(crate) gpus: Vec<usize>,
    /// Compute threads per stage [default: the machine's cores over the stages]
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<usize>,
    /// Epsilon of the latent norms, to compare with implementations that fix it [default: rms_norm_eps]
    #[arg(long, value_name = "EPS")]
    pub(crate) latent_norm_eps: Option<f64>,
}

#[derive(Args, Debug)]
pub(crate) struct CoordinatorArgs {
    /// Checkpoint directory; config, tokenizer and index are read, weights are not
    #[arg(long, value_name = "DIR")]
    pub(crate) model: PathBuf,
    /// Address of the HTTP API
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0:8000")]
    pub(crate) http: SocketAddr,
    /// Address the stages dial
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0:9000")]
    pub(crate) grpc: SocketAddr,
    #[command(flatten)]
    pub(crate) pipeline: PipelineArgs,
    /// Longest time that running requests may go on after the first SIGTERM or SIGINT; a second one ends them
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub(crate) drain_timeout: Duration,
    /// Epsilon of the latent norms; the stages must be given the same
    #[arg(long, value_name = "EPS")]
    pub(crate) latent_norm_eps: Option<f64>,
}

#[derive(Args, Debug)]
pub(crate) struct StageArgs {
    /// The coordinator, for example http://coordinator:9000
    #[arg(long, value_name = "URL")]
    pub(crate) coordinator: String,
    /// Checkpoint directory; only this stage's tensors are read
    #[arg(long, value_name = "DIR", required_unless_present = "delay_ms")]
    pub(crate) model: Option<PathBuf>,
    /// Address the coordinator dials
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0:0")]
    pub(crate) listen: SocketAddr,
    /// Address the previous stage's link dials [default: the same host, a free port]
    #[arg(long, value_name = "ADDR")]
    pub(crate) link_listen: Option<SocketAddr>,
    /// Host name or address that others reach this stage under [default: the one it reaches the coordinator from]
    #[arg(long, value_name = "HOST")]
    pub(crate) advertise: Option<String>,
    /// Address the previous stage's link dials, when it is not the listening one: behind NAT, a proxy or a mapped port
    /// [default: the advertised host and the port of --link-listen]
    #[arg(long, value_name = "HOST:PORT", value_parser = host_and_port)]
    pub(crate) advertise_link: Option<String>,
    /// Device
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    pub(crate) backend: Device,
    /// Which GPU, from 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) gpu: usize,
    /// Compute threads [default: the machine's cores]
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<usize>,
    /// Bytes for weights and KV pages [default: unlimited]
    #[arg(long, value_name = "BYTES")]
    pub(crate) memory: Option<u64>,
    /// Address of `/metrics` [default: not answered]
    #[arg(long, value_name = "ADDR")]
    pub(crate) metrics: Option<SocketAddr>,
    /// The stage index to ask for
    #[arg(long, value_name = "N")]
    pub(crate) index: Option<u32>,
    /// Stand by: take the place of a stage that is lost
    #[arg(long)]
    pub(crate) standby: bool,
    /// End when the coordinator goes away, instead of dialling again
    #[arg(long)]
    pub(crate) exit_with_coordinator: bool,
    /// Epsilon of the latent norms; the coordinator must be given the same
    #[arg(long, value_name = "EPS")]
    pub(crate) latent_norm_eps: Option<f64>,
    /// No model: every step sleeps this long (to measure what control plane and links cost)
    #[arg(long, value_name = "MS", conflicts_with = "model")]
    pub(crate) delay_ms: Option<f64>,
}

#[derive(Args, Debug)]
pub(crate) struct PlanArgs {
    /// Checkpoint directory
    #[arg(long, value_name = "DIR", required_unless_present = "config")]
    pub(crate) model: Option<PathBuf>,
    /// Config file alone
    #[arg(long, value_name = "FILE", conflicts_with = "model")]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) split: SplitArgs,
    /// Type of the residual stream [default: the config's]
    #[arg(long, value_enum)]
    pub(crate) activation_dtype: Option<ActivationDtype>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct VerifyArgs {
    /// Checkpoint directory, run uncut and cut side by side in this process [default: the built-in demo model]
    #[arg(long, value_name = "DIR", conflicts_with_all = ["endpoint", "reference"])]
    pub(crate) model: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) split: SplitArgs,
    /// Device of the cut pipeline
    #[arg(long, value_enum, default_value_t = Device::Cpu, conflicts_with = "endpoint")]
    pub(crate) backend: Device,
    /// Device of the uncut model; on another one than the cut pipeline's, likelihoods are compared and not bits
    /// [default: the cut pipeline's]
    #[arg(long, value_enum, conflicts_with = "endpoint")]
    pub(crate) reference_backend: Option<Device>,
    /// Runs a fault on purpose in the cut pipeline, to see what it does and that the checks find it
    #[arg(long, value_enum, conflicts_with = "endpoint")]
    pub(crate) reproduce: Option<Fault>,
    /// OpenAI-compatible server to verify, of baton or any other engine
    #[arg(long, value_name = "URL", requires = "reference", conflicts_with_all = ["stages", "split"])]
    pub(crate) endpoint: Option<String>,
    /// Server that is taken to be right, for example the same model without a pipeline
    #[arg(long, value_name = "URL", requires = "endpoint")]
    pub(crate) reference: Option<String>,
    /// Model name at the servers [default: the only one they serve]
    #[arg(long, value_name = "NAME", requires = "endpoint")]
    pub(crate) model_name: Option<String>,
    /// Its name at the reference, when it differs
    #[arg(long, value_name = "NAME", requires = "reference")]
    pub(crate) reference_model_name: Option<String>,
    /// API key for both servers
    #[arg(long, value_name = "KEY", env = "OPENAI_API_KEY", hide_env_values = true)]
    pub(crate) api_key: Option<String>,
    /// Text to read [default: a built-in passage of 1,300 words]
    #[arg(long, value_name = "FILE")]
    pub(crate) text: Option<PathBuf>,
    /// Characters of a segment sent to servers: more tokens than index_topk, fewer than the context
    #[arg(long, value_name = "CHARS", default_value_t = 2000)]
    pub(crate) segment: usize,
    /// Word lists to copy, for each of three lengths
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub(crate) trials: usize,
    /// Difference of the mean loss between servers that counts as rounding
    #[arg(long, value_name = "NATS", default_value_t = 0.005)]
    pub(crate) tolerance: f64,
    /// Write the report with plots as one self-contained page
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct SelftestArgs {
    /// Device to test
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    pub(crate) backend: Device,
    /// Which GPU, from 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) gpu: usize,
    /// Only small sizes: seconds instead of minutes, for a run under a checker
    #[arg(long)]
    pub(crate) small: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// A fault that can be reproduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Fault {
    /// Index rows are not carried over a cut, as in stock engines
    Stale,
}

#[derive(Args, Debug)]
pub(crate) struct BenchPipelineArgs {
    /// Number of stages
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub(crate) stages: usize,
    /// What every stage takes for every step
    #[arg(long, value_name = "MS", default_value_t = 10.0)]
    pub(crate) stage_ms: f64,
    /// Sequences that decode at once
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(crate) sequences: usize,
    /// Micro-batches in flight [default: the number of stages]
    #[arg(long, value_name = "N")]
    pub(crate) micro_batches: Option<usize>,
    /// How long to measure
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0, allow_negative_numbers = true)]
    pub(crate) seconds: f64,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct BenchStageArgs {
    /// Config of the model
    #[arg(long, value_name = "FILE")]
    pub(crate) config: PathBuf,
    /// Layers of the stage, the last one excluded
    #[arg(long, value_name = "A..B", value_parser = layers)]
    pub(crate) layers: std::ops::Range<usize>,
    /// What the weights are
    #[arg(long, value_enum, default_value_t = BenchWeights::RandomFp8)]
    pub(crate) weights: BenchWeights,
    /// Decode batches
    #[arg(
        long,
        value_name = "N,N,...",
        value_delimiter = ',',
        default_value = "1,8,32,64,128,256"
    )]
    pub(crate) batch: Vec<usize>,
    /// Tokens before each row
    #[arg(long, value_name = "TOKENS", default_value_t = 32_768)]
    pub(crate) context: usize,
    /// Prefill chunks at the end of that context
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', default_value = "1024,4096,8192")]
    pub(crate) prefill: Vec<usize>,
    /// Type of the residual stream
    #[arg(long, value_enum, default_value_t = ActivationDtype::Bf16)]
    pub(crate) activation_dtype: ActivationDtype,
    /// Which GPU, from 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) gpu: usize,
    /// Runs of each case; the median counts
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub(crate) repeats: usize,
    /// What a kernel reads per second at best: the floor's divisor
    #[arg(long, value_name = "TB/s", default_value_t = 4.3)]
    pub(crate) bandwidth: f64,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// What the weights of a benchmark are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BenchWeights {
    /// Drawn on the device, stored as the config says
    RandomFp8,
}

/// Where a stage computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Device {
    /// The processor
    Cpu,
    /// An NVIDIA GPU
    Cuda,
}

/// How hand-offs travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LinkKind {
    /// TCP sockets
    Tcp,
    /// Memory that stages of one host share
    Shm,
}

/// Type of the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ActivationDtype {
    /// Single precision
    F32,
    /// bfloat16
    Bf16,
}

impl From<ActivationDtype> for HiddenDtype {
    fn from(dtype: ActivationDtype) -> Self {
        match dtype {
            ActivationDtype::F32 => Self::F32,
            ActivationDtype::Bf16 => Self::Bf16,
        }
    }
}

impl LinkKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tcp => baton_plan::LinkKind::Tcp.name(),
            Self::Shm => baton_plan::LinkKind::Shm.name(),
        }
    }
}

fn ratio(text: &str) -> Result<f64, String> {
    let ratio = text.parse().ok().filter(|ratio| (0.0..=1.0).contains(ratio));
    ratio.ok_or_else(|| format!("{text:?}, expected a number from 0 to 1"))
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text:?} is not a number of seconds"))?;
    Duration::try_from_secs_f64(seconds).map_err(|e| format!("{text} seconds: {e}"))
}

fn layers(text: &str) -> Result<std::ops::Range<usize>, String> {
    let parse = |part: &str| part.parse::<usize>().ok();
    match text.split_once("..").map(|(a, b)| (parse(a), parse(b))) {
        Some((Some(start), Some(end))) if start < end => Ok(start..end),
        _ => Err(format!("{text:?}, expected A..B with A below B")),
    }
}

/// A host may be a name that only the other side can resolve, so it is not looked up.
fn host_and_port(text: &str) -> Result<String, String> {
    match text.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok_and(|p| p > 0) => {
            Ok(text.to_owned())
        }
        _ => Err(format!("{text:?}, expected HOST:PORT with a port from 1 to 65535")),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn stages_and_split_exclude_each_other() {
        let both = ["baton", "plan", "--config", "c.json", "--stages", "2", "--split", "1,1"];
        assert!(Cli::try_parse_from(both).is_err());
    }

    #[test]
    fn an_advertised_link_has_a_host_and_a_port() {
        for good in ["stage-1.pods:7000", "10.0.0.1:1", "[::1]:65535"] {
            assert_eq!(host_and_port(good), Ok(good.to_owned()));
        }
        for bad in ["stage-1", ":7000", "stage-1:", "stage-1:0", "stage-1:65536", "7000"] {
            assert!(host_and_port(bad).unwrap_err().contains(bad), "{bad}");
        }
    }

    #[test]
    fn seconds_refuse_what_is_not_a_time() {
        assert_eq!(seconds("1.5"), Ok(Duration::from_millis(1500)));
        assert!(seconds("-1").is_err());
        assert!(seconds("soon").unwrap_err().contains("soon"));
    }
}
