use std::collections::HashMap as Map;

use proptest::prelude::*;
use tokio::sync::mpsc;

use super::*;
use crate::request::{GenerateRequest, Place, SamplingParams};

fn request(prompt: usize, max_tokens: usize, scored: bool) -> GenerateRequest {
    GenerateRequest {
        prompt: (0..prompt as u32).collect(),
        max_tokens,
        sampling: SamplingParams { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, seed: 0 },
        logprobs: None,
        prompt_logprobs: scored.then_some(0),
        stop_token_ids: vec![],
        ignore_eos: false,
        traceparent: String::new(),
    }
}

/// A toy pipeline: knows of a sequence only what steps said, and answers with a hash of it.
#[derive(Default)]
struct Toy {
    tables: Map<u64, Vec<u32>>,
    texts: Map<u64, Vec<u32>>,
}

fn next(text: &[u32]) -> u32 {
    text.iter().fold(17u32, |h, t| h.wrapping_mul(31).wrapping_add(*t)) % 997 + 1
}

impl Toy {
    fn run(&mut self, step: &v1::Step, block_size: usize) -> v1::StepResult {
        for id in &step.released_sequences {
            self.tables.remove(id);
            self.texts.remove(id);
        }
        let mut result =
            v1::StepResult { step_id: step.step_id, epoch: step.epoch, ..Default::default() };
        for segment in &step.segments {
            let id = segment.sequence_id;
            let table = self.tables.entry(id).or_default();
            assert_eq!(table.len(), segment.known_blocks as usize, "known blocks");
            table.extend(&segment.new_blocks);
            let text = self.texts.entry(id).or_default();
            assert_eq!(text.len(), segment.start_position as usize, "positions follow each other");
            text.extend(&segment.token_ids);
            assert!(text.len() <= table.len() * block_size, "blocks cover the rows");
            if segment.sampling.is_some() {
                let token_id = next(text);
                result.sampled.push(v1::Sampled {
                    sequence_id: id,
                    token_id,
                    ..Default::default()
                });
            }
            if let Some(scoring) = &segment.prompt_scoring {
                let tokens = scoring
                    .targets
                    .iter()
                    .map(|&token_id| v1::ScoredToken { token_id, ..Default::default() });
                result
                    .prompt_scores
                    .push(v1::PromptScores { sequence_id: id, tokens: tokens.collect() });
            }
        }
        let mut used: Vec<u32> = self.tables.values().flatten().copied().collect();
        used.sort_unstable();
        assert!(used.windows(2).all(|w| w[0] != w[1]), "a block belongs to two sequences");
        result
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn every_request_gets_its_own_text_and_no_block_is_lost(
        arrivals in prop::collection::vec((1usize..40, 0usize..20, any::<bool>(), 0usize..12), 1..12),
        kv_blocks in 16u32..40,
        micro_batches in 1usize..5,
        chunk in 1usize..20,
    ) {
        let limits = Limits {
            step_rows: 24, prefill_chunk: chunk, micro_batches, max_sequences: 8,
            max_positions: 60, eos_token_ids: vec![3],
        };
        let mut scheduler = Scheduler::new(limits, kv_blocks, 4, 1);
        let mut toy = Toy::default();
        let mut clients = Vec::new();
        for (prompt, max_tokens, scored, cancel_after) in arrivals {
            let (events, receiver) = mpsc::unbounded_channel();
            scheduler.submit(Submission {
                request: request(prompt, max_tokens, scored),
                events,
                place: Place::default(),
            });
            // Some clients go away after a while.
            let patience = (cancel_after < 3).then_some(cancel_after);
            clients.push((prompt, max_tokens, scored, patience, Some(receiver), Vec::new()));
        }
        let mut pipe = VecDeque::new();
        for round in 0..5000 {
            while let Some(step) = scheduler.next_step() {
                pipe.push_back(toy.run(&step, 4));
            }
            let Some(result) = pipe.pop_front() else { break };
            scheduler.commit(result);
            for client in &mut clients {
                if client.3 == Some(round) {
                    client.4 = None;
                }
                if let Some(receiver) = &mut client.4 {
                    while let Ok(event) = receiver.try_recv() {
                        client.5.push(event);
                    }
                }
            }
        }
        prop_assert_eq!(scheduler.live(), (0, 0));
        prop_assert_eq!(scheduler.free_blocks(), kv_blocks as usize);
        prop_assert!(toy.tables.is_empty(), "stages still know of {:?}", toy.tables);
        for (prompt, max_tokens, scored, patience, mut receiver, mut events) in clients {
            if patience.is_some() {
                continue;
            }
            while let Ok(event) = receiver.as_mut().unwrap().try_recv() {
                events.push(event);
            }
            let mut text: Vec<u32> = (0..prompt as u32).collect();
            let mut scores = Vec::new();
            let mut end = None;
            for event in events {
                prop_assert!(end.is_none(), "something came after the end");
                match event {
                    Event::Prompt(tokens) => scores.extend(tokens.iter().map(|t| t.0.token)),
                    Event::Token { token, .. } => {
                        prop_assert_eq!(token.token, next(&text));
                        text.push(token.token);
                    }
                    other => end = Some(other),
                }
            }
            let expected_end = match text.last() {
                Some(3) if text.len() > prompt => FinishReason::Stop,
                _ => FinishReason::Length,
            };
            prop_assert_eq!(end, Some(Event::Finished(expected_end)));
            if expected_end == FinishReason::Length {
                prop_assert_eq!(text.len(), (prompt + max_tokens).min(60).max(prompt));
            }
            if scored {
                prop_assert_eq!(scores, (1..prompt as u32).collect::<Vec<_>>());
            }
        }
    }
}

#[test]
fn what_can_never_run_is_told_so() {
    let limits = Limits {
        step_rows: 8,
        prefill_chunk: 8,
        micro_batches: 1,
        max_sequences: 8,
        max_positions: 100,
        eos_token_ids: vec![],
    };
    let mut scheduler = Scheduler::new(limits, 4, 4, 1);
    for (prompt, max_tokens, words) in [
        (0, 1, "empty"),
        (101, 1, "takes 100"),
        (10, 20, "room for 30 tokens, the pipeline has 16"),
    ] {
        let (events, mut receiver) = mpsc::unbounded_channel();
        scheduler.submit(Submission {
            request: request(prompt, max_tokens, false),
            events,
            place: Place::default(),
        });
        match receiver.try_recv().unwrap() {
            Event::Failed { message, retryable: false } => {
                assert!(message.contains(words), "{message}");
            }
            other => panic!("{other:?}"),
        }
    }
}
