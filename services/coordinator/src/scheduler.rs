//! Who runs when. Pure: steps out, results in.

mod commit;
mod replay;
mod segment;
mod share;

use std::collections::{HashMap, VecDeque};
use std::time::{Instant, SystemTime};

use baton_proto::v1;
use baton_telemetry::traces;

use crate::block_manager::BlockManager;
use crate::prefix::{self, BlockHash, BlockHashes};
use crate::request::{Event, FinishReason, GenerateRequest, Submission};
use crate::sequence::{KvState, Sequence};
use crate::trace::Queued;

/// What the scheduler may do.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    pub(crate) step_rows: usize,
    pub(crate) prefill_chunk: usize,
    pub(crate) micro_batches: usize,
    pub(crate) max_sequences: usize,
    pub(crate) max_positions: usize,
    pub(crate) eos_token_ids: Vec<u32>,
    /// The model's identity in the prefix cache; none without a cache.
    pub(crate) cache_root: Option<BlockHash>,
}

/// A segment of a step under way.
#[derive(Clone, Copy, Debug)]
struct Expected {
    sequence: u64,
    /// One past its last position.
    until: usize,
    /// Whether it yields a token.
    samples: bool,
    /// Prompt tokens it scores.
    scores: usize,
}

/// What the prefix cache did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CacheCounts {
    /// Prompt tokens of requests that looked.
    pub(crate) queried_tokens: u64,
    /// Those of them that were there.
    pub(crate) hit_tokens: u64,
    /// Blocks known now.
    pub(crate) blocks: usize,
}

/// Continuous batching with chunked prefill: by priority, then first come first served; prompts under way take turns.
#[derive(Debug)]
pub(crate) struct Scheduler {
    limits: Limits,
    blocks: BlockManager,
    waiting: VecDeque<Sequence>,
    /// By priority, then in order of admission: the last one gives way first.
    running: Vec<Sequence>,
    /// Step -> what its result must bring.
    in_flight: HashMap<u64, Vec<Expected>>,
    released: Vec<u64>,
    next_sequence: u64,
    next_step: u64,
    epoch: u64,
    cache: CacheCounts,
    preemptions: u64,
    /// Traced sequences that have left the queue since somebody asked.
    left_queue: Vec<Queued>,
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
            cache: CacheCounts::default(),
            preemptions: 0,
            left_queue: Vec::new(),
        }
    }

    pub(crate) fn total_blocks(&self) -> u32 {
        self.blocks.total()
    }

    pub(crate) fn caches_prefixes(&self) -> bool {
        self.limits.cache_root.is_some()
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

    pub(crate) fn cache_counts(&self) -> CacheCounts {
        CacheCounts { blocks: self.blocks.cached(), ..self.cache }
    }

    /// Traced sequences that got their first rows since the last call.
    pub(crate) fn left_queue(&mut self) -> impl Iterator<Item = Queued> + '_ {
        self.left_queue.drain(..)
    }

    /// Traces of the requests that run or wait, for log lines.
    pub(crate) fn trace_ids(&self) -> String {
        let live = self.running.iter().chain(&self.waiting);
        let ids = live.map(|s| traces::trace_id(&s.request.traceparent));
        ids.filter(|id| !id.is_empty()).collect::<Vec<_>>().join(",")
    }

    pub(crate) fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// Takes a request in, or tells it why it can never run.
    pub(crate) fn submit(&mut self, submission: Submission) {
        let refusal = self.refusal(&submission.request);
        let mut sequence = Sequence::new(self.next_sequence, submission);
        self.next_sequence += 1;
        if let Some(message) = refusal {
            sequence.tell(Event::Failed { message, retryable: false });
        } else if sequence.request.max_tokens == 0 && sequence.request.prompt_logprobs.is_none() {
            sequence.tell(Event::Finished(FinishReason::Length));
        } else if let Err(message) = sequence.prepare_mask() {
            sequence.tell(Event::Failed { message, retryable: false });
        } else {
            // Scores of a prompt need all its rows.
            let cached = sequence.request.prompt_logprobs.is_none();
            sequence.hashes =
                self.limits.cache_root.filter(|_| cached).map(|model| {
                    BlockHashes::new(prefix::root(&model, &sequence.request.cache_salt))
                });
            let at = self.waiting.partition_point(|s| s.priority() <= sequence.priority());
            self.waiting.insert(at, sequence);
        }
    }

    /// Why a request can never run, if it cannot.
    fn refusal(&self, request: &GenerateRequest) -> Option<String> {
        let prompt = request.prompt.len();
        let longest = prompt.saturating_add(request.max_tokens).min(self.limits.max_positions);
        if prompt == 0 {
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
        }
    }

    /// The next step, if there is something to run and room for it in flight.
    pub(crate) fn next_step(&mut self, now: Instant) -> Option<v1::Step> {
        if self.in_flight.len() >= self.limits.micro_batches {
            return None;
        }
        self.drop_gone(now);
        let mut segments = Vec::new();
        let mut budget = self.limits.step_rows;
        // Decode rows are spread evenly over the steps in flight: every step carries its share.
        let decoding: Vec<u64> =
            self.running.iter().filter(|s| s.is_decoding()).map(|s| s.id).collect();
        let mut share = decoding.len().div_ceil(self.limits.micro_batches);
        for id in decoding {
            if budget == 0 || share == 0 {
                break;
            }
            if let Some(segment) = self.segment(id, 1) {
                segments.push(segment);
                budget -= 1;
                share -= 1;
            }
        }
        self.admit(budget);
        self.fill(budget, &mut segments);
        if segments.is_empty() && self.released.is_empty() {
            return None;
        }
        let step_id = self.next_step;
        self.next_step += 1;
        let expected = segments.iter().map(|segment| Expected {
            sequence: segment.sequence_id,
            until: segment.start_position as usize + segment.token_ids.len(),
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

    /// Adds prompt rows to a step that has room for `budget` of them.
    fn fill(&mut self, mut budget: usize, segments: &mut Vec<v1::Segment>) {
        let turns = self.turns();
        let wants: Vec<usize> = turns.iter().map(|(_, want)| *want).collect();
        let mut left_out = Vec::new();
        for ((id, want), rows) in turns.into_iter().zip(share::divide(budget, &wants)) {
            match self.segment(id, rows) {
                Some(segment) => {
                    budget -= segment.token_ids.len();
                    segments.push(segment);
                }
                None => left_out.push((id, want)),
            }
        }
        // Rows that some could not use for want of blocks go to those that may take blocks from others: the first in line.
        left_out.sort_by_key(|(id, _)| self.running.iter().position(|s| s.id == *id));
        for (id, want) in left_out {
            if let Some(segment) = self.segment(id, want.min(budget)) {
                budget -= segment.token_ids.len();
                segments.push(segment);
            }
        }
    }

    /// Lets sequences run that wait, as long as there is room for their first rows.
    fn admit(&mut self, budget: usize) {
        // Newcomers have the first turn, so that a short prompt does not wait for long ones.
        let (mut rows, mut promised) = (0, 0);
        while self.running.len() < self.limits.max_sequences && rows < budget {
            let Some(mut next) = self.waiting.pop_front() else { break };
            let cached = self.take_prefix(&mut next);
            let first = (next.tokens.len() - cached).min(self.limits.prefill_chunk).min(budget);
            // A newcomer takes free blocks only; it preempts nobody.
            let needed = self.blocks.needed(cached + first) - next.kv.blocks.len();
            if promised + needed > self.blocks.free() {
                self.blocks.release(&mut next.kv.blocks);
                next.kv = KvState::default();
                self.waiting.push_front(next);
                break;
            }
            promised += needed;
            rows += first.min(share::LEAST);
            next.place = None;
            if !std::mem::replace(&mut next.admitted, true) {
                if next.hashes.is_some() {
                    self.cache.queried_tokens += next.tokens.len() as u64;
                    self.cache.hit_tokens += cached as u64;
                }
                next.tell(Event::Admitted { cached_tokens: cached });
            }
            let at = self.running.partition_point(|s| s.priority() <= next.priority());
            self.running.insert(at, next);
        }
    }

    /// Gives a sequence the blocks that hold the beginning of its text already; returns the tokens they cover.
    fn take_prefix(&mut self, sequence: &mut Sequence) -> usize {
        let block_size = self.blocks.block_size();
        // The last token is always computed: its row yields the next one.
        let most = (sequence.tokens.len() - 1) / block_size;
        if let Some(hashes) = &mut sequence.hashes {
            let blocks = self.blocks.take_prefix(hashes.of(&sequence.tokens, most, block_size));
            let cached = blocks.len() * block_size;
            let published = blocks.len();
            sequence.kv =
                KvState { blocks, known: 0, computed: cached, committed: cached, published };
        }
        sequence.kv.computed
    }

    /// Sequences with prompt rows to compute and how many they may get; those that waited longest first.
    fn turns(&self) -> Vec<(u64, usize)> {
        let mut turns: Vec<&Sequence> =
            self.running.iter().filter(|s| !s.is_decoding() && s.ready_rows() > 0).collect();
        turns.sort_by_key(|s| (s.priority(), s.served));
        let chunk = self.limits.prefill_chunk;
        turns.into_iter().map(|s| (s.id, s.ready_rows().min(chunk))).collect()
    }

    /// Sends a sequence back to the queue; its tokens are computed again, and nothing it said is said again.
    fn preempt(&mut self, at: usize) {
        let mut sequence = self.running.remove(at);
        self.released.push(sequence.id);
        self.blocks.release(&mut sequence.kv.blocks);
        self.preemptions += 1;
        self.requeue(sequence);
    }

    /// Puts a sequence that has run in front of those of its priority that wait, as one whose tokens stages know nothing of.
    fn requeue(&mut self, mut sequence: Sequence) {
        sequence.kv = KvState::default();
        sequence.queued = (!sequence.request.traceparent.is_empty()).then(SystemTime::now);
        sequence.id = self.next_sequence;
        self.next_sequence += 1;
        let at = self.waiting.partition_point(|s| s.priority() < sequence.priority());
        self.waiting.insert(at, sequence);
    }

    /// Forgets sequences whose client has gone or whose time is over.
    pub(crate) fn drop_gone(&mut self, now: Instant) {
        let gone = |s: &Sequence| s.cancelled() || s.expired(now);
        let end = |s: &Sequence| {
            if !s.cancelled() {
                s.tell(Event::Expired);
            }
        };
        self.waiting.retain(|s| {
            if gone(s) {
                end(s);
            }
            !gone(s)
        });
        while let Some(at) = self.running.iter().position(gone) {
            end(&self.remove(at));
        }
    }

    fn remove(&mut self, at: usize) -> Sequence {
        let mut sequence = self.running.remove(at);
        self.released.push(sequence.id);
        self.blocks.release(&mut sequence.kv.blocks);
        sequence
    }

    /// Ends everything that is under way or waits.
    pub(crate) fn fail_all(&mut self, message: &str) {
        for sequence in self.running.drain(..).chain(self.waiting.drain(..)) {
            sequence.tell(Event::Failed { message: message.to_owned(), retryable: true });
        }
        self.in_flight.clear();
    }
}

#[cfg(test)]
mod tests;
