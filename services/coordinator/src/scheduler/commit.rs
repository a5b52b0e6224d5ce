//! What the last stage's answers do to the sequences.

use std::collections::HashMap;

use baton_proto::v1;

use super::Scheduler;
use crate::request::{Event, FinishReason, TokenLogprob};
use crate::sequence::Sequence;

impl Scheduler {
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
            self.publish(at, part.until);
            if !scored.is_empty() {
                let sequence = &mut self.running[at];
                sequence.scores_told += scored.len();
                sequence.setbacks = 0;
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

    /// All stages have computed this sequence up to `until`: others may share the blocks that are full.
    fn publish(&mut self, at: usize, until: usize) {
        let block_size = self.blocks.block_size();
        let Sequence { kv, hashes, tokens, .. } = &mut self.running[at];
        kv.committed = until;
        let Some(hashes) = hashes else { return };
        let full = kv.committed / block_size;
        let hashes = hashes.of(tokens, full, block_size);
        for (id, hash) in kv.blocks.iter().zip(hashes).skip(kv.published) {
            self.blocks.publish(*id, *hash);
        }
        kv.published = full;
    }

    /// Appends a drawn token to its sequence, which may end with it.
    fn extend(&mut self, at: usize, sampled: v1::Sampled) {
        let sequence = &mut self.running[at];
        sequence.awaiting_token = false;
        sequence.setbacks = 0;
        sequence.tokens.push(sampled.token_id);
        if let Some(seen) = &mut sequence.seen {
            *seen.entry(sampled.token_id).or_insert(0) += 1;
        }
        sequence.tell(Event::Token {
            token: TokenLogprob { token: sampled.token_id, logprob: sampled.logprob },
            top: tops(sampled.top),
        });
        match self.finish_reason(at, sampled.token_id) {
            Ok(None) => {}
            Ok(Some(reason)) => self.remove(at).tell(Event::Finished(reason)),
            Err(message) => self.remove(at).tell(Event::Failed { message, retryable: false }),
        }
    }

    /// Why a sequence ends with its last token, if it does.
    fn finish_reason(&mut self, at: usize, last: u32) -> Result<Option<FinishReason>, String> {
        let sequence = &mut self.running[at];
        let request = &sequence.request;
        let eos = !request.ignore_eos && self.limits.eos_token_ids.contains(&last);
        if eos || request.stop_token_ids.contains(&last) {
            return Ok(Some(FinishReason::Stop));
        }
        if let Some(matcher) = &mut sequence.matcher
            && matcher.accept(last)?
        {
            return Ok(Some(FinishReason::Stop));
        }
        let full = sequence.generated() >= sequence.request.max_tokens
            || sequence.tokens.len() >= self.limits.max_positions;
        if full {
            return Ok(Some(FinishReason::Length));
        }
        sequence.prepare_mask()?;
        Ok(None)
    }
}

fn tops(top: Vec<v1::TokenLogprob>) -> Vec<TokenLogprob> {
    top.into_iter().map(|t| TokenLogprob { token: t.token_id, logprob: t.logprob }).collect()
}
