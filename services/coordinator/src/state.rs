//! The pipeline's state as `/pipeline` shows it: made when somebody asks, so that it is never older than the question.

use std::convert::Infallible;

use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};

/// Someone who waits for the state.
pub type Question = oneshot::Sender<Value>;

/// Questions that may wait for the driver's next turn.
const QUESTIONS: usize = 64;

/// Asks for the state. Cheap to clone.
#[derive(Clone, Debug)]
pub struct StateReader(mpsc::Sender<Question>);

/// Takes the questions. Whoever holds it answers.
#[derive(Debug)]
pub struct StateWriter(mpsc::Receiver<Question>);

/// Both ends.
#[must_use]
pub fn channel() -> (StateWriter, StateReader) {
    let (ask, questions) = mpsc::channel(QUESTIONS);
    (StateWriter(questions), StateReader(ask))
}

impl StateReader {
    pub(crate) async fn read(&self) -> Value {
        let (question, answer) = oneshot::channel();
        // Neither fails before the coordinator has ended.
        let _ = self.0.send(question).await;
        answer
            .await
            .unwrap_or_else(|_| json!({"failure": "the coordinator has stopped", "stages": []}))
    }
}

impl StateWriter {
    /// The next question. Pends while nobody asks.
    pub async fn question(&mut self) -> Question {
        match self.0.recv().await {
            Some(question) => question,
            None => std::future::pending().await,
        }
    }

    /// Answers every question with what `state` says then.
    pub async fn answer(&mut self, state: impl Fn() -> Value) -> Infallible {
        loop {
            // One that was given up needs no answer.
            let _ = self.question().await.send(state());
        }
    }
}
