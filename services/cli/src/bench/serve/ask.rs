//! One streamed request, and when its parts came.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use baton_verify::server::Server;
use serde_json::{Value, json};

use super::workload::Planned;

/// How requests are put.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Manner {
    /// Through `/v1/chat/completions`.
    pub(crate) chat: bool,
    pub(crate) temperature: f64,
    /// No answer ends before its length: not every server knows the field.
    pub(crate) ignore_eos: bool,
}

/// A request that was answered whole. Times are since the beginning of the measurement.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    /// When it was due: with an open loop, time in which the client could not send it counts.
    pub(crate) due: Duration,
    /// When each piece of text came.
    pub(crate) pieces: Vec<Duration>,
    pub(crate) ended: Duration,
    pub(crate) prompt_tokens: u64,
    pub(crate) cached_tokens: u64,
    pub(crate) completion_tokens: u64,
}

/// Asks and reads the answer to its end.
///
/// # Errors
/// When the server refuses, breaks off or ends without any text.
pub(crate) async fn ask(
    server: &Server,
    planned: &Planned,
    manner: Manner,
    (begun, due): (Instant, Duration),
) -> anyhow::Result<Answer> {
    let (path, body) = request(server.model(), planned, manner);
    let mut response = server.open(path, &body).await?;
    let mut answer = Answer {
        due,
        pieces: Vec::new(),
        ended: Duration::ZERO,
        prompt_tokens: 0,
        cached_tokens: 0,
        completion_tokens: 0,
    };
    let mut lines = Lines::default();
    while let Some(bytes) = response.chunk().await.map_err(|e| server.broken(path, &e))? {
        let now = begun.elapsed();
        lines.buffer.extend_from_slice(&bytes);
        while let Some(line) = lines.next() {
            let Some(data) = line.strip_prefix("data:").map(str::trim) else { continue };
            if data == "[DONE]" {
                continue;
            }
            let event = serde_json::from_str(data).with_context(|| format!("an event {data:?}"))?;
            take(&mut answer, &event, now)?;
        }
    }
    answer.ended = begun.elapsed();
    if answer.pieces.is_empty() && answer.completion_tokens == 0 {
        bail!("{path} ended its stream without any text");
    }
    if answer.completion_tokens == 0 {
        // A server that reports no usage: every piece is taken for a token.
        answer.completion_tokens = answer.pieces.len() as u64;
    }
    Ok(answer)
}

fn request(model: &str, planned: &Planned, manner: Manner) -> (&'static str, Value) {
    let mut body = json!({
        "model": model,
        "max_tokens": planned.tokens,
        "temperature": manner.temperature,
        "seed": planned.seed,
        "stream": true,
        "stream_options": {"include_usage": true},
    });
    if manner.ignore_eos {
        body["ignore_eos"] = true.into();
    }
    if manner.chat {
        body["messages"] = json!([{"role": "user", "content": planned.prompt}]);
        return ("/v1/chat/completions", body);
    }
    body["prompt"] = planned.prompt.as_str().into();
    ("/v1/completions", body)
}

fn take(answer: &mut Answer, event: &Value, now: Duration) -> anyhow::Result<()> {
    if let Some(error) = event.get("error") {
        bail!("{}", error["message"].as_str().unwrap_or("an error event without a message"));
    }
    let choice = &event["choices"][0];
    let texts =
        [&choice["text"], &choice["delta"]["content"], &choice["delta"]["reasoning_content"]];
    if texts.iter().any(|text| text.as_str().is_some_and(|text| !text.is_empty())) {
        answer.pieces.push(now);
    }
    if let Some(usage) = event.get("usage").filter(|usage| usage.is_object()) {
        let count = |value: &Value| value.as_u64().unwrap_or(0);
        answer.prompt_tokens = count(&usage["prompt_tokens"]);
        answer.cached_tokens = count(&usage["prompt_tokens_details"]["cached_tokens"]);
        answer.completion_tokens = count(&usage["completion_tokens"]);
    }
    Ok(())
}

/// Complete lines of what has come so far.
#[derive(Debug, Default)]
struct Lines {
    buffer: Vec<u8>,
}

impl Lines {
    fn next(&mut self) -> Option<String> {
        let end = self.buffer.iter().position(|&byte| byte == b'\n')?;
        let line: Vec<u8> = self.buffer.drain(..=end).collect();
        Some(String::from_utf8_lossy(&line).trim_end().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer() -> Answer {
        let zero = Duration::ZERO;
        Answer {
            due: zero,
            pieces: Vec::new(),
            ended: zero,
            prompt_tokens: 0,
            cached_tokens: 0,
            completion_tokens: 0,
        }
    }

    #[test]
    fn pieces_of_every_route_count_and_empty_ones_do_not() {
        let mut answer = answer();
        for (at, event) in [
            json!({"choices": [{"text": "a"}]}),
            json!({"choices": [{"text": "", "finish_reason": "length"}]}),
            json!({"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
            json!({"choices": [{"delta": {"content": "b"}}]}),
            json!({"choices": [{"delta": {"reasoning_content": "c"}}], "usage": null}),
            json!({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4,
                "prompt_tokens_details": {"cached_tokens": 8}}}),
        ]
        .iter()
        .enumerate()
        {
            take(&mut answer, event, Duration::from_secs(at as u64)).unwrap();
        }
        assert_eq!(answer.pieces, [0, 3, 4].map(Duration::from_secs));
        assert_eq!(
            (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens),
            (9, 8, 4)
        );
        let error = json!({"error": {"message": "stage 1 was lost"}});
        assert!(
            take(&mut answer, &error, Duration::ZERO).unwrap_err().to_string().contains("stage 1")
        );
    }

    #[test]
    fn lines_may_come_in_pieces() {
        let mut lines = Lines::default();
        lines.buffer.extend_from_slice(b"data: {\"a\r\n\ndata:");
        assert_eq!(lines.next().as_deref(), Some("data: {\"a"));
        assert_eq!(lines.next().as_deref(), Some(""));
        assert_eq!(lines.next(), None);
        lines.buffer.extend_from_slice(b" x\n");
        assert_eq!(lines.next().as_deref(), Some("data: x"));
    }
}
