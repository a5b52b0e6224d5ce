//! A sequence's part of a step.

use baton_proto::v1;

use super::Scheduler;
use crate::sampling;
use crate::trace::Queued;

impl Scheduler {
    /// Rows of a running sequence for the next step, at most `limit`.
    pub(super) fn segment(&mut self, id: u64, limit: usize) -> Option<v1::Segment> {
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
        if let Some(since) = sequence.queued.take() {
            let traceparent = sequence.request.traceparent.clone();
            self.left_queue.push(Queued { traceparent, since, cached_tokens: start });
        }
        let known = sequence.kv.known;
        sequence.kv.known = sequence.kv.blocks.len();
        sequence.kv.computed = until;
        sequence.in_flight += 1;
        sequence.served = self.next_step;
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
        let samples = until == sequence.tokens.len() && sequence.request.max_tokens > 0;
        sequence.awaiting_token = samples;
        let sampling = samples.then(|| sampling::sampling(sequence, eos));
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
}
