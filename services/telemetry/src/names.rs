//! Names of spans and of their attributes. What OpenTelemetry's conventions for HTTP and GenAI name has their names (the
//! crate of the conventions has given up its GenAI part); the rest begins with `baton.`.

/// Spans of one request, below the gateway's root span.
pub mod span {
    /// Text to token ids; a chat's template included.
    pub const TOKENIZE: &str = "tokenize";
    /// From submission to the first rows in a step; again after a preemption.
    pub const QUEUE: &str = "queue";
    /// One step that computes prompt rows of the request.
    pub const PREFILL: &str = "prefill chunk";
    /// One step that computes the request's last token and draws the next.
    pub const DECODE: &str = "decode step";
    /// One stage's part of a step.
    pub const STAGE: &str = "stage";
}

/// Attributes. Times are in microseconds.
pub mod attribute {
    /// Id in log lines and in the answer's `x-request-id`.
    pub const REQUEST_ID: &str = "baton.request.id";
    /// Which of a request's choices, from 0.
    pub const CHOICE: &str = "baton.choice.index";
    /// Tokens of the prompt whose KV was there already.
    pub const CACHED_TOKENS: &str = "baton.cached_tokens";
    /// Wiring that the step belongs to.
    pub const EPOCH: &str = "baton.epoch";
    /// The step; spans of one step in several traces share it.
    pub const STEP: &str = "baton.step.id";
    /// Rows of the whole step, of all its requests.
    pub const STEP_ROWS: &str = "baton.step.rows";
    /// Rows of this request.
    pub const ROWS: &str = "baton.rows";
    /// Position of the first of them in the request.
    pub const POSITION: &str = "baton.position";
    /// The stage, from 0.
    pub const STAGE: &str = "baton.stage.index";
    /// Its layers, the last one excluded: "0..3".
    pub const LAYERS: &str = "baton.stage.layers";
    /// Until the compute thread took the step.
    pub const QUEUE_WAIT: &str = "baton.stage.queue_wait_us";
    /// Until the hand-off was there.
    pub const RECEIVE_WAIT: &str = "baton.stage.receive_wait_us";
    /// In the slice's layers.
    pub const COMPUTE: &str = "baton.stage.compute_us";
    /// Giving the hand-off to the link.
    pub const SEND: &str = "baton.stage.send_us";
    /// Payload sent to the next stage for the step.
    pub const HANDOFF_BYTES: &str = "baton.handoff.bytes";
    /// Rows of the step whose indices were carried to the next stage.
    pub const CARRY_ROWS: &str = "baton.handoff.carry_rows";
    /// Kind of a failure, for example "stale-carry".
    pub const FAILURE: &str = "baton.failure.kind";
}

/// Attributes of OpenTelemetry's semantic conventions.
#[allow(missing_docs)] // The conventions say what they mean.
pub mod semantic {
    pub const HTTP_REQUEST_METHOD: &str = "http.request.method";
    pub const HTTP_ROUTE: &str = "http.route";
    pub const HTTP_RESPONSE_STATUS_CODE: &str = "http.response.status_code";
    pub const ERROR_TYPE: &str = "error.type";
    pub const GEN_AI_OPERATION_NAME: &str = "gen_ai.operation.name";
    pub const GEN_AI_PROVIDER_NAME: &str = "gen_ai.provider.name";
    pub const GEN_AI_REQUEST_MODEL: &str = "gen_ai.request.model";
    pub const GEN_AI_RESPONSE_MODEL: &str = "gen_ai.response.model";
    pub const GEN_AI_REQUEST_TEMPERATURE: &str = "gen_ai.request.temperature";
    pub const GEN_AI_REQUEST_TOP_P: &str = "gen_ai.request.top_p";
    pub const GEN_AI_REQUEST_CHOICE_COUNT: &str = "gen_ai.request.choice.count";
    pub const GEN_AI_REQUEST_MAX_TOKENS: &str = "gen_ai.request.max_tokens";
    pub const GEN_AI_REQUEST_SEED: &str = "gen_ai.request.seed";
    pub const GEN_AI_USAGE_INPUT_TOKENS: &str = "gen_ai.usage.input_tokens";
    pub const GEN_AI_USAGE_OUTPUT_TOKENS: &str = "gen_ai.usage.output_tokens";
    pub const GEN_AI_RESPONSE_FINISH_REASONS: &str = "gen_ai.response.finish_reasons";
}
