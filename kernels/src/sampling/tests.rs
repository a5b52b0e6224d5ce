use super::*;

fn request() -> SampleRequest {
    SampleRequest {
        row: 0,
        temperature: 1.0,
        top_p: 1.0,
        top_k: 0,
        min_p: 0.0,
        seed: 7,
        draw: 0,
        logprobs: None,
        banned: Vec::new(),
        adjustments: Adjustments::default(),
    }
}

#[test]
fn greedy_takes_the_lower_of_equal_ids_and_skips_banned_and_nan() {
    let logits = [1.0, f32::NAN, 3.0, 3.0, -1.0];
    let mut r = SampleRequest { temperature: 0.0, ..request() };
    assert_eq!(sample(&logits, &r).token, 2);
    r.banned = vec![2];
    assert_eq!(sample(&logits, &r).token, 3);
    r.banned = vec![3, 2, 0];
    assert_eq!(sample(&logits, &r).token, 4);
}

#[test]
fn a_seed_and_draw_fix_the_token() {
    let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.7).sin()).collect();
    let tokens = |seed| -> Vec<u32> {
        (0..40)
            .map(|draw| sample(&logits, &SampleRequest { seed, draw, ..request() }).token)
            .collect()
    };
    assert_eq!(tokens(1), tokens(1));
    assert_ne!(tokens(1), tokens(2));
    let mut distinct = tokens(1);
    distinct.sort_unstable();
    distinct.dedup();
    assert!(distinct.len() > 10, "draws differ: {distinct:?}");
}

#[test]
fn draws_follow_the_probabilities() {
    let p = [0.5_f32, 0.3, 0.15, 0.05];
    let logits = p.map(f32::ln);
    let mut counts = [0_u32; 4];
    for draw in 0..20_000 {
        counts[sample(&logits, &SampleRequest { draw, ..request() }).token as usize] += 1;
    }
    for (count, p) in counts.iter().zip(p) {
        assert!((*count as f32 / 20_000.0 - p).abs() < 0.015, "{counts:?}");
    }
}

#[test]
fn filters_cut_the_tail() {
    let logits = [0.5_f32, 0.3, 0.15, 0.05].map(f32::ln);
    let reach = |r: SampleRequest| -> Vec<u32> {
        let mut seen: Vec<u32> = (0..2_000)
            .map(|draw| sample(&logits, &SampleRequest { draw, ..r.clone() }).token)
            .collect();
        seen.sort_unstable();
        seen.dedup();
        seen
    };
    assert_eq!(reach(request()), [0, 1, 2, 3]);
    assert_eq!(reach(SampleRequest { top_k: 2, ..request() }), [0, 1]);
    assert_eq!(reach(SampleRequest { top_p: 0.7, ..request() }), [0, 1]);
    assert_eq!(reach(SampleRequest { top_p: 0.0, ..request() }), [0]);
    assert_eq!(reach(SampleRequest { min_p: 0.25, ..request() }), [0, 1, 2]);
    assert_eq!(reach(SampleRequest { banned: vec![0], top_k: 1, ..request() }), [1]);
}

#[test]
fn logprobs_are_those_of_the_raw_logits() {
    let logits = [2.0, 1.0, 2.0, -3.0];
    let r = SampleRequest { temperature: 0.3, top_k: 1, logprobs: Some(3), ..request() };
    let got = sample(&logits, &r);
    let norm: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum::<f64>().ln();
    assert!((f64::from(got.logprob) - (2.0 - norm)).abs() < 1e-6);
    assert_eq!(got.top.iter().map(|t| t.0).collect::<Vec<_>>(), [0, 2, 1]);
    let scored = score(&logits, &ScoreRequest { row: 0, target: 3, top: 0 });
    assert!((f64::from(scored.logprob) - (-3.0 - norm)).abs() < 1e-6);
    assert!(scored.top.is_empty());
}

fn adjusted(adjustments: Adjustments) -> SampleRequest {
    SampleRequest { temperature: 0.0, adjustments, ..request() }
}

#[test]
fn a_mask_leaves_only_its_tokens_and_none_beyond_its_end() {
    let logits: Vec<f32> = (0..20).map(|i| i as f32).collect();
    let mask = |bytes: &[u8]| Adjustments { allowed: Some(bytes.to_vec()), ..Default::default() };
    assert_eq!(sample(&logits, &adjusted(mask(&[0b101, 0b10]))).token, 9);
    assert_eq!(sample(&logits, &adjusted(mask(&[0b101]))).token, 2);
    let banned = SampleRequest { banned: vec![2], ..adjusted(mask(&[0b101])) };
    assert_eq!(sample(&logits, &banned).token, 0);
    assert!(!banned.is_plain_greedy() && !adjusted(mask(&[1])).is_plain_greedy());
    for draw in 0..50 {
        let drawn = SampleRequest { temperature: 2.0, draw, ..adjusted(mask(&[0b11])) };
        assert!(sample(&logits, &drawn).token < 2);
    }
}

#[test]
fn bias_moves_the_choice_but_not_the_reported_probability() {
    let logits = [2.0, 1.0, 0.0];
    let biased = adjusted(Adjustments { bias: vec![(2, 5.0), (99, 1.0)], ..Default::default() });
    let sampled = sample(&logits, &biased);
    assert_eq!(sampled.token, 2);
    assert_eq!(
        sampled.logprob,
        score(&logits, &ScoreRequest { row: 0, target: 2, top: 0 }).logprob
    );
}

#[test]
fn penalties_follow_their_formulas() {
    let penalised = |presence, frequency, repetition, seen: &[(u32, u32)]| {
        let penalties = Penalties { presence, frequency, repetition, seen: seen.to_vec() };
        let adjustments = Adjustments { penalties: Some(penalties), ..Default::default() };
        adjustments.apply(&[3.0, -2.0, 1.0]).into_owned()
    };
    // Presence counts once, frequency every time, and neither counts the prompt.
    assert_eq!(penalised(0.5, 0.0, 1.0, &[(0, 3), (1, 0)]), [2.5, -2.0, 1.0]);
    assert_eq!(penalised(0.0, 0.5, 1.0, &[(0, 3), (1, 0)]), [1.5, -2.0, 1.0]);
    // Repetition makes both signs less likely, in prompt and answer alike.
    assert_eq!(penalised(0.0, 0.0, 2.0, &[(0, 1), (1, 0)]), [1.5, -4.0, 1.0]);
    assert_eq!(penalised(0.5, 0.25, 2.0, &[(0, 2)]), [0.5, -2.0, 1.0]);
}
