//! The threads of a backend.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::backend::KernelError;

/// Multiply-adds below which work stays on the calling thread: handing a part to a thread that is awake costs about as
/// much.
const PARALLEL_WORK: usize = 1 << 14;

/// A pool whose threads wait for work without sleeping while a step runs: waking a thread takes longer than most
/// operations of a decode step.
#[derive(Debug)]
pub(crate) struct Team(rayon::ThreadPool);

impl Team {
    pub(crate) fn new(threads: Option<usize>) -> Result<Self, KernelError> {
        let failed = |message: String| KernelError::Device { device: "cpu".to_owned(), message };
        let threads = match threads {
            Some(0) => return Err(failed("threads: expected at least 1, found 0".to_owned())),
            Some(n) => n,
            None => std::thread::available_parallelism().map_or(1, usize::from),
        };
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|n| format!("kernels-{n}"))
            .build()
            .map(Self)
            .map_err(|e| failed(format!("cannot start {threads} threads: {e}")))
    }

    pub(crate) fn threads(&self) -> usize {
        self.0.current_num_threads()
    }

    /// Into how many parts to cut `work` multiply-adds: one, or as many as there are threads.
    pub(crate) fn parts(&self, work: usize) -> usize {
        if work < PARALLEL_WORK { 1 } else { self.threads() }
    }

    /// Runs `work` on one of the threads.
    pub(crate) fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.0.install(work)
    }

    /// Runs `work` on one of the threads while the others stay awake.
    pub(crate) fn awake<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        if self.threads() == 1 {
            return work();
        }
        self.0.install(|| {
            rayon::in_place_scope(|scope| {
                let leader = rayon::current_thread_index();
                let done = std::sync::Arc::new(AtomicBool::new(false));
                let ended = SetOnDrop(std::sync::Arc::clone(&done));
                scope.spawn_broadcast(move |_, thread| {
                    // The leader would wait here for itself.
                    while Some(thread.index()) != leader && !done.load(Ordering::Acquire) {
                        if rayon::yield_now() != Some(rayon::Yield::Executed) {
                            std::hint::spin_loop();
                        }
                    }
                });
                let result = work();
                drop(ended);
                result
            })
        })
    }
}

/// Ends the waiting of the others when the work ends, and when it panics.
struct SetOnDrop(std::sync::Arc<AtomicBool>);

impl Drop for SetOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}
