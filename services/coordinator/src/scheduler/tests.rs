use std::collections::HashMap as Map;

use proptest::prelude::*;
use tokio::sync::mpsc;

use super::*;
use crate::request::{FinishReason, GenerateRequest, Place};

fn request(prompt: usize, max_tokens: usize, scored: bool) -> GenerateRequest {
    GenerateRequest {
        prompt: (0..prompt as u32).collect(),
        max_tokens,
        prompt_logprobs: scored.then_some(0),
        ..Default::default()
    }
}

/// A toy pipeline: its "KV" is the token that was computed in every slot, and it answers with a hash of what it reads there.
#[derive(Default)]
struct Toy {
    tables: Map<u64, Vec<u32>>,
    slots: Map<usize, u32>,
    /// Rows computed.
    rows: usize,
    /// Whether blocks may belong to several sequences.
    shares: bool,
}

fn next(text: &[u32]) -> u32 {
    text.iter().fold(17u32, |h, t| h.wrapping_mul(31).wrapping_add(*t)) % 997 + 1
}

impl Toy {
    fn run(&mut self, step: &v1::Step, block_size: usize) -> v1::StepResult {
        for id in &step.released_sequences {
            self.tables.remove(id);
        }
        let mut result =
            v1::StepResult { step_id: step.step_id, epoch: step.epoch, ..Default::default() };
        for segment in &step.segments {
            let id = segment.sequence_id;
            let table = self.tables.entry(id).or_default();
            assert_eq!(table.len(), segment.known_blocks as usize, "known blocks");
            table.extend(&segment.new_blocks);
            let start = segment.start_position as usize;
            let end = start + segment.token_ids.len();
            assert!(end <= table.len() * block_size, "blocks cover the rows");
            let slot = |p: usize| table[p / block_size] as usize * block_size + p % block_size;
            for (position, token) in (start..end).zip(&segment.token_ids) {
                self.slots.insert(slot(position), *token);
            }
            let text: Vec<u32> = (0..end).map(|p| self.slots[&slot(p)]).collect();
            self.rows += segment.token_ids.len();
            if segment.sampling.is_some() {
                let token_id = next(&text);
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
        let alone = used.windows(2).all(|w| w[0] != w[1]);
        assert!(self.shares || alone, "a block belongs to two sequences");
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
        cache in any::<bool>(),
        failures in prop::collection::btree_set(1u32..60, 0..3),
    ) {
        let limits = Limits {
            step_rows: 24, prefill_chunk: chunk, micro_batches, max_sequences: 8,
            max_positions: 60, eos_token_ids: vec![3], cache_root: cache.then_some([7; 32]),
        };
        let mut scheduler = Scheduler::new(limits, kv_blocks, 4, 1);
        let mut toy = Toy { shares: cache, ..Toy::default() };
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
            if failures.contains(&(round as u32)) {
                // The pipeline fails with steps in flight, and comes back without any memory.
                pipe.clear();
                scheduler.suspend("stage 1 was lost");
                scheduler.resume(kv_blocks, 2 + round as u64);
                toy = Toy { shares: cache, ..Toy::default() };
            }
            while let Some(step) = scheduler.next_step(Instant::now()) {
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
                    Event::Admitted { .. } => {}
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
        cache_root: None,
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

fn limits() -> Limits {
    Limits {
        step_rows: 64,
        prefill_chunk: 64,
        micro_batches: 2,
        max_sequences: 8,
        max_positions: 1000,
        eos_token_ids: vec![],
        cache_root: Some([7; 32]),
    }
}

/// A scheduler with a toy pipeline, run step by step.
struct Run {
    scheduler: Scheduler,
    toy: Toy,
    pipe: VecDeque<v1::StepResult>,
}

impl Run {
    fn new(limits: Limits, kv_blocks: u32) -> Self {
        let scheduler = Scheduler::new(limits, kv_blocks, 4, 1);
        Self { scheduler, toy: Toy { shares: true, ..Toy::default() }, pipe: VecDeque::new() }
    }

    fn submit(&mut self, request: GenerateRequest) -> mpsc::UnboundedReceiver<Event> {
        let (events, receiver) = mpsc::unbounded_channel();
        self.scheduler.submit(Submission { request, events, place: Place::default() });
        receiver
    }

    /// Sends all steps that may be sent; returns the rows of each sequence in the last of them.
    fn send(&mut self) -> Vec<(u64, usize)> {
        let mut last = Vec::new();
        while let Some(step) = self.scheduler.next_step(Instant::now()) {
            last = step.segments.iter().map(|s| (s.sequence_id, s.token_ids.len())).collect();
            self.pipe.push_back(self.toy.run(&step, 4));
        }
        last
    }

    /// Takes the oldest answer.
    fn commit(&mut self) -> bool {
        let Some(result) = self.pipe.pop_front() else { return false };
        self.scheduler.commit(result);
        true
    }

    fn finish(&mut self) {
        loop {
            self.send();
            if !self.commit() {
                return;
            }
        }
    }
}

fn tokens(receiver: &mut mpsc::UnboundedReceiver<Event>) -> (usize, Vec<u32>, Option<Event>) {
    let (mut cached, mut tokens, mut end) = (0, Vec::new(), None);
    while let Ok(event) = receiver.try_recv() {
        match event {
            Event::Admitted { cached_tokens } => cached = cached_tokens,
            Event::Token { token, .. } => tokens.push(token.token),
            other => end = Some(other),
        }
    }
    (cached, tokens, end)
}

#[test]
fn a_prompt_that_was_seen_is_computed_from_its_last_full_block_on() {
    let mut run = Run::new(limits(), 200);
    let mut first = run.submit(request(101, 9, false));
    run.finish();
    let rows = run.toy.rows;
    let mut second = run.submit(request(101, 9, false));
    run.finish();
    let (cold, warm) = (tokens(&mut first), tokens(&mut second));
    assert_eq!((cold.0, warm.0), (0, 100));
    assert_eq!(cold.1, warm.1);
    // One prompt row, and one row for each token but the last.
    assert_eq!(run.toy.rows - rows, 1 + 8);
    assert_eq!(run.scheduler.cache_counts().hit_tokens, 100);
    assert_eq!(run.scheduler.free_blocks(), 200);
    // What was generated is known as well; another salt, and scores, know nothing.
    let mut longer: Vec<u32> = (0..101).collect();
    longer.extend(&cold.1);
    let mut third = run.submit(GenerateRequest { prompt: longer, ..request(0, 1, false) });
    let salted = GenerateRequest { cache_salt: "other".into(), ..request(101, 1, false) };
    let mut salted = run.submit(salted);
    let mut scored = run.submit(request(101, 1, true));
    run.finish();
    assert_eq!((tokens(&mut third).0, tokens(&mut salted).0, tokens(&mut scored).0), (108, 0, 0));
}

#[test]
fn what_was_not_computed_on_all_stages_is_never_a_hit() {
    let mut run = Run::new(Limits { prefill_chunk: 20, step_rows: 20, ..limits() }, 200);
    let aborted = run.submit(request(100, 4, false));
    run.send();
    assert_eq!(run.pipe.len(), 2, "two chunks are under way");
    assert!(run.commit());
    drop(aborted);
    let mut second = run.submit(request(100, 4, false));
    run.send();
    run.finish();
    let (cached, text, end) = tokens(&mut second);
    assert_eq!((cached, end), (20, Some(Event::Finished(FinishReason::Length))));
    let mut expected: Vec<u32> = (0..100).collect();
    for token in text {
        assert_eq!(token, next(&expected));
        expected.push(token);
    }
    assert_eq!(run.scheduler.free_blocks(), 200);
}

#[test]
fn a_short_prompt_does_not_wait_for_long_ones() {
    let mut run = Run::new(limits(), 2000);
    let _long: Vec<_> = (0..4).map(|i| run.submit(request(900 + i, 1, false))).collect();
    run.send();
    let mut short = run.submit(request(8, 1, false));
    for _ in 0..4 {
        run.commit();
        run.send();
    }
    let (_, text, end) = tokens(&mut short);
    assert_eq!((text.len(), end), (1, Some(Event::Finished(FinishReason::Length))));
    assert!(run.scheduler.live().0 == 4, "the long ones still run");
}

#[test]
fn decodes_go_on_beside_a_long_prompt_and_are_spread_over_the_steps() {
    let mut run = Run::new(Limits { micro_batches: 4, max_sequences: 9, ..limits() }, 2000);
    let _decoding: Vec<_> = (0..8).map(|i| run.submit(request(3 + i, 400, false))).collect();
    for _ in 0..12 {
        run.send();
        run.commit();
    }
    let _long = run.submit(request(900, 1, false));
    for _ in 0..12 {
        run.commit();
        let rows = run.send();
        let decoding = rows.iter().filter(|(_, rows)| *rows == 1).count();
        assert_eq!(decoding, 2, "a quarter of the eight: {rows:?}");
        assert_eq!(
            rows.iter().map(|(_, rows)| rows).sum::<usize>(),
            64,
            "the prompt fills the rest"
        );
    }
}

#[test]
fn priority_goes_first_and_the_last_one_gives_way() {
    let mut run = Run::new(Limits { max_sequences: 1, ..limits() }, 200);
    let mut order = Vec::new();
    let mut clients: Vec<_> = [0, 5, -1, 0]
        .map(|priority| run.submit(GenerateRequest { priority, ..request(8, 2, false) }))
        .into_iter()
        .enumerate()
        .collect();
    while !clients.is_empty() {
        run.send();
        assert!(run.commit());
        clients.retain_mut(|(i, receiver)| {
            let ended = matches!(tokens(receiver).2, Some(Event::Finished(_)));
            if ended {
                order.push(*i);
            }
            !ended
        });
    }
    assert_eq!(order, [2, 0, 3, 1]);
}

#[test]
fn a_deadline_ends_a_request_wherever_it_is() {
    let mut run = Run::new(Limits { max_sequences: 1, ..limits() }, 200);
    let now = Instant::now();
    let late = GenerateRequest { deadline: Some(now), ..request(8, 5, false) };
    let mut running = run.submit(request(8, 50, false));
    run.send();
    let mut waiting = run.submit(late);
    run.commit();
    run.send();
    assert_eq!(tokens(&mut waiting).2, Some(Event::Expired));
    let later = now + std::time::Duration::from_secs(5);
    let deadline = GenerateRequest { deadline: Some(later), ..request(8, 5, false) };
    drop(running);
    running = run.submit(deadline);
    run.finish_until(later);
    assert_eq!(tokens(&mut running).2, Some(Event::Expired));
    assert_eq!(run.scheduler.free_blocks(), 200);
}

impl Run {
    /// Commits what is under way and lets the clock stand at `now`.
    fn finish_until(&mut self, now: Instant) {
        while self.commit() {}
        while let Some(step) = self.scheduler.next_step(now) {
            self.pipe.push_back(self.toy.run(&step, 4));
        }
        while self.commit() {}
    }
}

/// Allows even tokens only, and ends after three.
#[derive(Debug)]
struct Even;

#[derive(Debug)]
struct EvenMatcher(usize);

impl crate::Grammar for Even {
    fn start(&self) -> Box<dyn crate::Matcher> {
        Box::new(EvenMatcher(0))
    }
}

impl crate::Matcher for EvenMatcher {
    fn allowed(&mut self) -> Result<Option<Vec<u8>>, String> {
        Ok(Some(vec![0b0101_0101; 200]))
    }

    fn accept(&mut self, token: u32) -> Result<bool, String> {
        self.0 += 1;
        if token.is_multiple_of(2) { Ok(self.0 == 3) } else { Err(format!("{token} is odd")) }
    }
}

#[test]
fn a_grammar_s_mask_travels_in_every_draw_and_its_end_ends_the_text() {
    let mut run = Run::new(limits(), 200);
    let grammar = Some(std::sync::Arc::new(Even) as std::sync::Arc<dyn crate::Grammar>);
    let mut client = run.submit(GenerateRequest { grammar, ..request(8, 50, false) });
    let mut drawn = 0;
    while let Some(step) = run.scheduler.next_step(Instant::now()) {
        let Some(segment) = step.segments.first() else { break };
        assert_eq!(segment.sampling.as_ref().unwrap().allowed_tokens, Some(vec![0b0101_0101; 200]));
        let mut result = run.toy.run(&step, 4);
        result.sampled[0].token_id = 2 * drawn;
        drawn += 1;
        run.scheduler.commit(result);
    }
    assert_eq!(tokens(&mut client), (0, vec![0, 2, 4], Some(Event::Finished(FinishReason::Stop))));
}

#[test]
fn penalties_count_what_was_generated() {
    let mut run = Run::new(limits(), 200);
    let mut penalised = request(3, 4, false);
    penalised.sampling.repetition_penalty = 1.5;
    penalised.sampling.logit_bias = vec![(5, -2.0)];
    let _client = run.submit(penalised);
    let mut last = None;
    while let Some(step) = run.scheduler.next_step(Instant::now()) {
        let Some(segment) = step.segments.first() else { break };
        last = segment.sampling.clone();
        let mut result = run.toy.run(&step, 4);
        result.sampled[0].token_id = 2;
        run.scheduler.commit(result);
    }
    let last = last.unwrap();
    assert_eq!((last.biased_tokens, last.biases), (vec![5], vec![-2.0]));
    let penalties = last.penalties.unwrap();
    assert_eq!((penalties.tokens, penalties.generated), (vec![0, 1, 2], vec![0, 0, 3]));
}

#[test]
fn a_smaller_pipeline_ends_what_it_has_no_room_for() {
    let mut run = Run::new(limits(), 200);
    let mut large = run.submit(request(400, 9, false));
    let mut small = run.submit(request(100, 9, false));
    run.send();
    run.commit();
    run.scheduler.suspend("stage 1 was lost");
    run.scheduler.resume(50, 2);
    (run.toy, run.pipe) = (Toy { shares: true, ..Toy::default() }, VecDeque::new());
    run.finish();
    let message = "prompt and max_tokens need room for 409 tokens, the pipeline has 200".to_owned();
    assert_eq!(tokens(&mut large).2, Some(Event::Failed { message, retryable: false }));
    let (_, text, end) = tokens(&mut small);
    assert_eq!((text.len(), end), (9, Some(Event::Finished(FinishReason::Length))));
    assert_eq!(run.scheduler.free_blocks(), 50);
}
