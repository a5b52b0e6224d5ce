//! What a stage has done in the life of its process, counted by the compute thread and read by others meanwhile.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_proto::v1;

macro_rules! totals {
    ($($field:ident: $meaning:literal),* $(,)?) => {
        /// Counters that grow for as long as the process lives.
        #[derive(Debug)]
        pub(crate) struct Totals {
            $(#[doc = $meaning] pub(crate) $field: AtomicU64,)*
            /// Steps that could not be run, by the failure's kind.
            failures: Mutex<BTreeMap<&'static str, u64>>,
            /// Milliseconds from `born` to the beginning of the step under way; 0 without one.
            running_since: AtomicU64,
            /// KV blocks in the tables of sequences now.
            pub(crate) kv_blocks_held: AtomicU64,
            born: Instant,
        }

        /// Their values at one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub(crate) struct Counts {
            $(#[doc = $meaning] pub(crate) $field: u64,)*
        }

        impl Totals {
            pub(crate) fn new() -> Self {
                Self {
                    $($field: AtomicU64::new(0),)*
                    failures: Mutex::default(),
                    running_since: AtomicU64::new(0),
                    kv_blocks_held: AtomicU64::new(0),
                    born: Instant::now(),
                }
            }

            pub(crate) fn now(&self) -> Counts {
                Counts { $($field: self.$field.load(Ordering::Relaxed),)* }
            }
        }

        impl Counts {
            /// What has come since an earlier moment.
            pub(crate) fn since(self, earlier: Self) -> Self {
                Self { $($field: self.$field - earlier.$field,)* }
            }
        }
    };
}

totals! {
    steps: "Steps done, failed ones included.",
    failed_steps: "Those that failed.",
    rows: "Rows computed.",
    queue_wait: "Microseconds.",
    receive_wait: "Microseconds.",
    compute: "Microseconds.",
    send: "Microseconds.",
    bytes_sent: "Payload of hand-offs sent.",
    rows_sent: "Their rows.",
    carry_rows_sent: "Rows of their carries.",
    bytes_received: "Payload of hand-offs received.",
    carry_rows_received: "Rows of their carries.",
    nan_scores: "Scores that were no numbers.",
}

/// Adds to one of the counters.
pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

impl Totals {
    /// A step begins.
    pub(crate) fn begins(&self) {
        let since = u64::try_from(self.born.elapsed().as_millis()).unwrap_or(u64::MAX).max(1);
        self.running_since.store(since, Ordering::Relaxed);
    }

    /// It has ended, well or not.
    pub(crate) fn ends(&self, times: &v1::StepTimes, failure: Option<&'static str>) {
        self.running_since.store(0, Ordering::Relaxed);
        add(&self.steps, 1);
        add(&self.queue_wait, times.queue_wait.into());
        add(&self.receive_wait, times.receive_wait.into());
        add(&self.compute, times.compute.into());
        add(&self.send, times.send.into());
        if let Some(kind) = failure {
            add(&self.failed_steps, 1);
            *self
                .failures
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .entry(kind)
                .or_default() += 1;
        }
    }

    /// How long the step under way has run.
    pub(crate) fn running(&self) -> Option<Duration> {
        let since = Some(self.running_since.load(Ordering::Relaxed)).filter(|&since| since > 0)?;
        Some(self.born.elapsed().saturating_sub(Duration::from_millis(since)))
    }

    pub(crate) fn failures(&self) -> BTreeMap<&'static str, u64> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test fails by panicking.

    use super::*;

    #[test]
    fn an_epoch_is_counted_from_its_beginning_and_a_step_while_it_runs() {
        let totals = Totals::new();
        let times = v1::StepTimes { queue_wait: 1, compute: 5, ..Default::default() };
        totals.ends(&times, Some("panic"));
        let wired = totals.now();
        assert_eq!((wired.steps, wired.failed_steps), (1, 1));
        totals.begins();
        assert!(totals.running().unwrap() < Duration::from_secs(60));
        totals.ends(&times, None);
        assert_eq!(totals.running(), None);
        let since = totals.now().since(wired);
        let expected = Counts { steps: 1, queue_wait: 1, compute: 5, ..Default::default() };
        assert_eq!(since, expected);
        assert_eq!(totals.failures(), BTreeMap::from([("panic", 1)]));
    }
}
