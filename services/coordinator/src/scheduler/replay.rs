//! What the end of an epoch does to the sequences: their token logs outlive it, and the next epoch computes them anew.

use super::Scheduler;
use crate::block_manager::BlockManager;
use crate::request::Event;

/// Failures of the pipeline that a running request lives through without a word of progress in between: one that brings
/// the pipeline down itself would do so for ever.
const MOST_SETBACKS: u32 = 3;

impl Scheduler {
    /// The pipeline has failed: nothing under way will be answered. Sequences wait with what their clients have heard.
    pub(crate) fn suspend(&mut self, reason: &str) {
        self.in_flight.clear();
        self.released.clear();
        // What the blocks hold is lost on one stage at least.
        self.blocks = BlockManager::new(self.blocks.total(), self.blocks.block_size());
        // The last one first: each goes back in front of those that wait.
        for mut sequence in std::mem::take(&mut self.running).into_iter().rev() {
            match sequence.rewind() {
                Err(message) => sequence.tell(Event::Failed { message, retryable: false }),
                Ok(()) if sequence.setbacks > MOST_SETBACKS => {
                    let message = format!(
                        "the pipeline failed {} times while it computed this request, at last because {reason}",
                        sequence.setbacks
                    );
                    sequence.tell(Event::Failed { message, retryable: false });
                }
                Ok(()) => self.requeue(sequence),
            }
        }
    }

    /// A pipeline is wired again, perhaps with fewer blocks than before.
    pub(crate) fn resume(&mut self, kv_blocks: u32, epoch: u64) {
        self.blocks = BlockManager::new(kv_blocks, self.blocks.block_size());
        self.epoch = epoch;
        self.next_step = 1;
        let waiting = std::mem::take(&mut self.waiting);
        for sequence in waiting {
            match self.refusal(&sequence.request) {
                Some(message) => sequence.tell(Event::Failed { message, retryable: false }),
                None => self.waiting.push_back(sequence),
            }
        }
    }
}
