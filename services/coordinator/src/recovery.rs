//! From a failed pipeline to the next one, while requests wait.

use std::time::Instant;

use tokio::time::{interval, sleep};

use crate::driver::{Driver, Failure, Inbox, POLL, fail};
use crate::report;
use crate::wiring::Wired;

impl Driver {
    /// Wires the stages again and keeps the requests meanwhile; those that wait too long end. None after a shutdown.
    ///
    /// Nothing that a client has heard is said again: a sequence is its tokens, and the next pipeline computes their KV anew.
    pub(crate) async fn recover(&mut self, failure: &Failure, epoch: u64) -> Option<Wired> {
        let Self { settings, wiring, scheduler, inbox } = self;
        let Inbox { submissions, state, shutdown, .. } = inbox;
        let reason = failure.to_string();
        let began = Instant::now();
        wiring.startup.failed(&reason);
        let limit = settings.recovery_timeout;
        // The time after which requests end, until they have.
        let mut waits = (!limit.is_zero()).then_some(limit);
        match waits {
            Some(_) => scheduler.suspend(&reason),
            None => scheduler.fail_all(&reason),
        }
        let wired = wiring.wire_again(epoch);
        let overdue = sleep(limit);
        tokio::pin!(wired, overdue);
        let mut tick = interval(POLL);
        loop {
            settings.numbers.scheduler(scheduler);
            tokio::select! {
                wired = &mut wired => {
                    tracing::info!(
                        epoch = wired.epoch,
                        "the pipeline is back after {:.1} s",
                        began.elapsed().as_secs_f64()
                    );
                    return Some(wired);
                }
                submission = submissions.recv() => match submission {
                    // It came before the readiness dropped.
                    Some(submission) if waits.is_some() => scheduler.submit(submission),
                    Some(submission) => fail(&submission, &reason),
                    None => return None,
                },
                () = &mut overdue, if waits.is_some() => {
                    waits = None;
                    scheduler.fail_all(&format!("{reason}; the pipeline did not come back within {limit:?}"));
                }
                // Clients may go and deadlines pass.
                _ = tick.tick() => scheduler.drop_gone(Instant::now()),
                question = state.question() => {
                    let starts = wiring.startup.now();
                    let now = report::recovering(&wiring.contract, &starts, failure, scheduler, epoch);
                    // One that was given up needs no answer.
                    let _ = question.send(now);
                }
                () = shutdown.cancelled() => return None,
            }
        }
    }
}
