//! Puts a workload to a server: closed loop, or open loop at the workload's own times.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_verify::server::Server;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::ask::{Answer, Manner, ask};
use super::workload::Planned;

/// How far a load goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    /// No request is begun after this.
    pub(crate) seconds: Option<f64>,
    /// Requests under way at once.
    pub(crate) concurrency: usize,
}

/// What became of a load.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) answers: Vec<Answer>,
    /// What those that failed say.
    pub(crate) failures: Vec<String>,
    /// From the first request to the last answer.
    pub(crate) seconds: f64,
}

/// Runs the whole load. When `stop` is cancelled, requests under way are given up and what was answered counts.
pub(crate) async fn run(
    server: &Server,
    workload: impl Iterator<Item = Planned>,
    (manner, extent): (Manner, Extent),
    stop: &CancellationToken,
    mut answered: impl FnMut(&Outcome),
) -> Outcome {
    let begun = Instant::now();
    let end = extent.seconds.and_then(|s| Duration::try_from_secs_f64(s).ok());
    let room = Arc::new(Semaphore::new(extent.concurrency.min(Semaphore::MAX_PERMITS)));
    let mut outcome = Outcome::default();
    let mut under_way = JoinSet::new();
    let mut workload = workload.take_while(|next| end.is_none_or(|end| next.due < end));
    let mut next = workload.next();
    while next.is_some() || !under_way.is_empty() {
        let turn = async {
            match &next {
                Some(planned) => turn(&room, begun + planned.due).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = stop.cancelled() => break,
            Some(done) = under_way.join_next() => {
                match done {
                    Ok(Ok(answer)) => outcome.answers.push(answer),
                    Ok(Err(failure)) => outcome.failures.push(failure),
                    Err(panic) => outcome.failures.push(panic.to_string()),
                }
                outcome.seconds = begun.elapsed().as_secs_f64();
                answered(&outcome);
            }
            permit = turn => {
                if end.is_some_and(|end| begun.elapsed() >= end) {
                    next = None;
                } else if let Some(planned) = std::mem::replace(&mut next, workload.next()) {
                    // In a closed loop a request is due when there is room for it.
                    let due = if planned.due.is_zero() { begun.elapsed() } else { planned.due };
                    let server = server.clone();
                    under_way.spawn(async move {
                        let _permit = permit;
                        let answer = ask(&server, &planned, manner, (begun, due)).await;
                        answer.map_err(|error| format!("{error:#}"))
                    });
                }
            }
        }
    }
    outcome
}

/// Waits until it is time and there is room.
async fn turn(room: &Arc<Semaphore>, due: Instant) -> Option<OwnedSemaphorePermit> {
    tokio::time::sleep_until(due.into()).await;
    // The semaphore is never closed.
    Arc::clone(room).acquire_owned().await.ok()
}
