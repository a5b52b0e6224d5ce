use std::time::Duration;

use super::*;
use crate::bench::serve::html;

fn answer(due: u64, pieces: &[u64], ended: u64) -> Answer {
    Answer {
        due: Duration::from_millis(due),
        pieces: pieces.iter().copied().map(Duration::from_millis).collect(),
        ended: Duration::from_millis(ended),
        prompt_tokens: 10,
        cached_tokens: 4,
        completion_tokens: pieces.len() as u64,
    }
}

fn outcome() -> Outcome {
    Outcome {
        answers: vec![answer(0, &[100, 110, 130], 140), answer(50, &[250], 300)],
        failures: vec!["refused".into(), "refused".into()],
        seconds: 0.5,
    }
}

fn summary() -> Summary {
    Summary::new(("http://here", "<model>", "closed loop of 2".into(), 3), &outcome())
}

#[test]
fn times_count_from_when_a_request_was_due() {
    let summary = summary();
    assert_eq!(summary.time_to_first_token_ms.sorted, [100.0, 200.0]);
    assert_eq!(summary.latency_ms.sorted, [140.0, 250.0]);
    let gaps: Vec<_> = summary.inter_token_ms.sorted.iter().map(|ms| ms.round()).collect();
    assert_eq!(gaps, [10.0, 20.0]);
    // An answer of one token has no time per further token.
    assert_eq!(summary.per_output_token_ms.samples, 1);
    assert!((summary.per_output_token_ms.mean - 15.0).abs() < 1e-9);
    assert_eq!((summary.completed, summary.failed, summary.failures["refused"]), (2, 2, 2));
    assert!((summary.completion_tokens_per_second - 8.0).abs() < 1e-9);
    assert_eq!((summary.prompt_tokens, summary.cached_tokens, summary.most_under_way), (20, 8, 2));
}

#[test]
fn percentiles_lie_between_samples() {
    let hundred: Vec<f64> = (0..=100).map(f64::from).collect();
    assert_eq!(percentile(&hundred, 95.0), 95.0);
    assert_eq!(percentile(&[1.0, 2.0], 50.0), 1.5);
    assert_eq!(percentile(&[], 50.0), 0.0);
}

#[test]
fn the_page_holds_its_plots_and_loads_nothing() {
    let page = html::page(&summary(), &outcome()).unwrap();
    assert_eq!(page.matches("<svg").count(), 5);
    assert!(page.contains("&lt;model&gt;") && page.contains("2 times: refused"));
    assert!(!page.contains("src=") && !page.contains("href="));
    // Nothing answered leaves nothing to plot, and a page all the same.
    let nothing = Outcome::default();
    let empty = Summary::new(("u", "m", String::new(), 0), &nothing);
    assert!(html::page(&empty, &nothing).unwrap().contains("<svg"));
}
