//! Who runs when. Pure: steps out, results in.

use std::collections::{HashMap, VecDeque};

use baton_proto::v1;

use crate::block_manager::BlockManager;
use crate::request::{Event, FinishReason, Submission, TokenLogprob};
use crate::sequence::{KvState, Sequence};

/// What the scheduler may do.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    pub(crate) step_rows: usize,
    pub(crate) prefill_chunk: usize,
    pub(crate) micro_batches: usize,
    pub(crate) max_sequences: usize,
    pub(crate) max_positions: usize,
    pub(crate) eos_token_ids: Vec<u32>,
}

/// A segment of a step under way.
#[derive(Clone, Copy, Debug)]
struct Expected {
    sequence: u64,
    /// Whether it yields a token.
    samples: bool,
    /// Prompt tokens it scores.
    scores: usize,
}

/// Continuous batching with chunked prefill, first come first served.
#[derive(Debug)]
pub(crate) struct Scheduler {
    limits: Limits,
    blocks: BlockManager,
    waiting: VecDeque<Sequence>,
    /// In order of admission: the last one is the youngest.
    running: Vec<Sequence>,
    /// Step -> what its result must bring.
    in_flight: HashMap<u64, Vec<Expected>>,
    released: Vec<u64>,
    next_sequence: u64,
    next_step: u64,
    epoch: u64,
}

impl Scheduler {
    pub(crate) fn new(limits: Limits, kv_blocks: u32, block_size: usize, epoch: u64) -> Self {
        Self {
            limits,
            blocks: BlockManager::new(kv_blocks, block_size),
            waiting: VecDeque::new(),
            running: Vec::new(),
            in_flight: HashMap::new(),
            released: Vec::new(),
            next_sequence: 1,
            next_step: 1,
            epoch,
        }
    }

    pub(crate) fn free_blocks(&self) -> usize {
        self.blocks.free()
    }

    pub(crate) fn steps_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    pub(crate) fn live(&self) -> (usize, usize) {
        (self.running.len(), self.waiting.len())
    }

    /// Takes a request in, or tells it why it can never run.
    pub(crate) fn submit(&mut self, submission: Submission) {
        let request = &submission.request;
        let prompt = request.prompt.len();
        let longest = prompt.saturating_add(request.max_tokens).min(self.limits.max_positions);
        let refusal = if prompt == 0 {
            Some("the prompt is empty".to_owned())
        } else if prompt > self.limits.max_positions {
            let limit = self.limits.max_positions;
            Some(format!("the prompt has {prompt} tokens, the model takes {limit}"))
        } else if longest > self.blocks.capacity() {
            let capacity = self.blocks.capacity();
            Some(format!(
                "prompt and max_tokens need room for {longest} tokens, the pipeline has {capacity}"
            ))
        } else {
            None
        };
        let sequence = Sequence::new(self.next_sequence, submission);
        self.next_sequence += 1;
        if let Some(message) = refusal {
            sequence.tell(Event::Failed { message, retryable: false });
        } else if sequence.request.max_tokens == 0 && sequence.request.prompt_logprobs.is_none() {
            sequence.tell(Event::Finished(FinishReason::Length));
        } else {
            self.waiting.push_back(sequence);
        }
    }

    /// The next step, if there is something to run and room for it in flight.
    pub(crate) fn next_step(&mut self) -> Option<v1::Step> {
        if self.in_flight.len() >= self.limits.micro_batches {
            return None;
        }
        self.drop_cancelled();
        let mut budget = self.limits.step_rows;
        let mut segments = Vec::new();
        // Decode rows are spread evenly over the steps in flight: every step carries its share.
        let decoding = self.running.iter().filter(|s| s.is_decoding()).count();
        let mut share = decoding.div_ceil(self.limits.micro_batches);
        let ids: Vec<(u64, bool)> = self.running.iter().map(|s| (s.id, s.is_decoding())).collect();
        for (id, _) in ids.iter().filter(|(_, decoding)| *decoding) {
            if budget == 0 || share == 0 {
                break;
            }
            if let Some(segment) = self.segment(*id, 1) {
                segments.push(segment);
                budget -= 1;
                share -= 1;
            }
        }
        for (id, _) in ids.iter().filter(|(_, decoding)| !*decoding) {
            let chunk = budget.min(self.limits.prefill_chunk);
            if let Some(segment) = self.segment(*id, chunk) {
                budget -= segment.token_ids.len();
                segments.push(segment);
            }
        }
        while budget > 0 && self.running.len() < self.limits.max_sequences {
            // A newcomer takes free blocks only; it preempts nobody.
            let Some(next) = self.waiting.front() else { break };
            let chunk = budget.min(self.limits.prefill_chunk).min(next.tokens.len());
            if self.blocks.needed(chunk) > self.blocks.free() {
                break;
            }
            let Some(mut next) = self.waiting.pop_front() else { break };
            next.place = None;
            let id = next.id;
            self.running.push(next);
            if let Some(segment) = self.segment(id, chunk) {
                budget -= segment.token_ids.len();
                segments.push(segment);
            }
        }
        if segments.is_empty() && self.released.is_empty() {
            return None;
        }
        // A preempted sequence may have been given a segment before it lost its blocks.
        segments.retain(|s| self.running.iter().any(|r| r.id == s.sequence_id));
        let step_id = self.next_step;
        self.next_step += 1;
        let expected = segments.iter().map(|segment| Expected {
            sequence: segment.sequence_id,
            samples: segment.sampling.is_some(),
            scores: segment.prompt_scoring.as_ref().map_or(0, |scoring| scoring.targets.len()),
        });
        self.in_flight.insert(step_id, expected.collect());
        Some(v1::Step {
            epoch: self.epoch,
            step_id,
            segments,
            padding_rows: 0,
            released_sequences: std::mem::take(&mut self.released),
        })
    }

    /// Rows of a running sequence for the next step, at most `limit`.
    fn segment(&mut self, id: u64, limit: usize) -> Option<v1::Segment> {
        let at = self.running.iter().position(|s| s.id == id)?;
        let rows = self.running[at].ready_rows().min(limit);
        if rows == 0 {
            return None;
        }
        let sequence = &self.running[at];
        let mut until = sequence.kv.computed + rows;
        // Computed anew after preemption, a chunk ends where scoring had come to: targets begin with its first row.
        if (sequence.kv.computed + 1..until).contains(&sequence.scored) {
            until = sequence.scored;
        }
        while !self.blocks.extend(&mut self.running[at].kv.blocks, until) {
            // The youngest without rows under way gives way; a sequence never preempts an older one.
            let victim = (at + 1..self.running.len()).rev().find(|&v| {
                self.running[v].in_flight == 0 && !self.running[v].kv.blocks.is_empty()
            })?;
            self.preempt(victim);
        }
        let eos = &self.limits.eos_token_ids;
        let sequence = &mut self.running[at];
        let start = sequence.kv.computed;
        let known = sequence.kv.known;
        sequence.kv.known = sequence.kv.blocks.len();
        sequence.kv.computed = until;
        sequence.in_flight += 1;
        let prompt = sequence.request.prompt.len();
        let prompt_scoring = sequence.request.prompt_logprobs.and_then(|top| {
            // Row r predicts token r + 1; after preemption rows are computed again and not scored again.
            let first = start.max(sequence.scored);
            let end = until.min(prompt - 1);
            (start == first && first < end).then(|| {
                sequence.scored = end;
                v1::PromptScoring {
                    targets: sequence.tokens[first + 1..=end].to_vec(),
                    top: top as u32,
                }
            })
        });
        let request = &sequence.request;
        let samples = until == sequence.tokens.len() && request.max_tokens > 0;
        sequence.awaiting_token = samples;
        let sampling = samples.then(|| v1::Sampling {
            temperature: request.sampling.temperature,
            top_p: request.sampling.top_p,
            top_k: request.sampling.top_k,
            min_p: request.sampling.min_p,
            seed: request.sampling.seed,
            draw: (sequence.tokens.len() - prompt) as u64,
            logprobs: request.logprobs.map(|n| n as u32),
            banned_tokens: if request.ignore_eos { eos.clone() } else { Vec::new() },
        });
        Some(v1::Segment {
            sequence_id: id,
            start_position: start as u32,
            token_ids: sequence.tokens[start..until].to_vec(),
            known_blocks: known as u32,
            new_blocks: sequence.kv.blocks[known..].to_vec(),
            sampling,
            prompt_scoring,
            traceparent: sequence.request.traceparent.clone(),
        })
    }

    /// Sends a sequence back to the queue; its tokens are computed again, and nothing it said is said again.
    fn preempt(&mut self, at: usize) {
        let mut sequence = self.running.remove(at);
        self.released.push(sequence.id);
        self.blocks.release(&mut sequence.kv.blocks);
        sequence.kv = KvState::default();
        sequence.id = self.next_sequence;
        self.next_sequence += 1;
        self.waiting.push_front(sequence);
    }

    fn drop_cancelled(&mut self) {
        self.waiting.retain(|s| !s.cancelled());
        while let Some(at) = self.running.iter().position(Sequence::cancelled) {
            self.remove(at);
        }
    }

    fn remove(&mut self, at: usize) -> Sequence {
        let mut sequence = self.running.remove(at);
        self.released.push(sequence.id);
        self.blocks.release(&mut sequence.kv.blocks);
        sequence
    }

    /// Takes the last stage's answer to a step.
    pub(crate) fn commit(&mut self, result: v1::StepResult) {
        let step = result.step_id;
        let Some(expected) = self.in_flight.remove(&step) else { return };
        let (mut sampled, mut scores) = (HashMap::new(), HashMap::new());
        sampled.extend(result.sampled.into_iter().map(|s| (s.sequence_id, s)));
        scores.extend(result.prompt_scores.into_iter().map(|s| (s.sequence_id, s.tokens)));
        for part in expected {
            // One that was cancelled or preempted meanwhile wants no answer.
            let Some(at) = self.running.iter().position(|s| s.id == part.sequence) else {
                continue;
            };
            self.running[at].in_flight -= 1;
            let scored = scores.remove(&part.sequence).unwrap_or_default();
            let token = sampled.remove(&part.sequence);
            if scored.len() != part.scores || token.is_some() != part.samples {
                let message = format!(
                    "step {step}: the last stage answered with {} tokens and {} scores, expected {} and {}",
                    usize::from(token.is_some()),
                    scored.len(),
                    usize::from(part.samples),
                    part.scores
                );
                self.remove(at).tell(Event::Failed { message, retryable: true });
                continue;
            }
            if !scored.is_empty() {
                let scored = scored
                    .into_iter()
                    .map(|s| (TokenLogprob { token: s.token_id, logprob: s.logprob }, tops(s.top)));
                self.running[at].tell(Event::Prompt(scored.collect()));
            }
            if let Some(token) = token {
                self.extend(at, token);
            }
        }
        // Requests that only wanted their prompt scored end with its last row.
        while let Some(at) = self.running.iter().position(|s| {
            s.request.max_tokens == 0 && s.kv.computed == s.tokens.len() && s.in_flight == 0
        }) {
            self.remove(at).tell(Event::Finished(FinishReason::Length));
        }
    }

    /// Appends a drawn token to its sequence, which may end with it.
    fn extend(&mut self, at: usize, sampled: v1::Sampled) {
        let sequence = &mut self.running[at];
        sequence.awaiting_token = false;
        sequence.tokens.push(sampled.token_id);
        sequence.tell(Event::Token {
            token: TokenLogprob { token: sampled.token_id, logprob: sampled.logprob },
            top: tops(sampled.top),
        });
        if let Some(reason) = self.finish_reason(at) {
            self.remove(at).tell(Event::Finished(reason));
        }
    }

    fn finish_reason(&self, at: usize) -> Option<FinishReason> {
        let sequence = &self.running[at];
        let request = &sequence.request;
        let last = sequence.tokens.last()?;
        let eos = !request.ignore_eos && self.limits.eos_token_ids.contains(last);
        if eos || request.stop_token_ids.contains(last) {
            return Some(FinishReason::Stop);
        }
        let full = sequence.generated() >= request.max_tokens
            || sequence.tokens.len() >= self.limits.max_positions;
        full.then_some(FinishReason::Length)
    }

    /// Ends everything that is under way or waits.
    pub(crate) fn fail_all(&mut self, message: &str) {
        for sequence in self.running.drain(..).chain(self.waiting.drain(..)) {
            sequence.tell(Event::Failed { message: message.to_owned(), retryable: true });
        }
        self.in_flight.clear();
    }
}

fn tops(top: Vec<v1::TokenLogprob>) -> Vec<TokenLogprob> {
    top.into_iter().map(|t| TokenLogprob { token: t.token_id, logprob: t.logprob }).collect()
}

#[cfg(test)]
mod tests;
