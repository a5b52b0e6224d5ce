//! Times of single kernels, by events around every launch.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::{result, sys};

/// Launches since profiling began.
#[derive(Default)]
pub(crate) struct Profile(Mutex<Option<Vec<Span>>>);

struct Span {
    kernel: &'static str,
    begin: sys::CUevent,
    end: sys::CUevent,
}

// SAFETY: event handles may be used from any thread.
unsafe impl Send for Span {}

/// One kernel's launches.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KernelTime {
    /// How many there were.
    pub launches: usize,
    /// What they took together.
    pub micros: f64,
}

impl Profile {
    /// Starts anew.
    pub(crate) fn start(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Vec::new());
    }

    /// Runs `launch` between two events, when profiling is on.
    pub(crate) fn around<R>(
        &self,
        kernel: &'static str,
        stream: sys::CUstream,
        launch: impl FnOnce() -> R,
    ) -> R {
        let mut spans = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(spans) = spans.as_mut() else { return launch() };
        let event = || {
            let event = result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).ok()?;
            // SAFETY: both handles are alive.
            unsafe { result::event::record(event, stream) }.ok()?;
            Some(event)
        };
        let begin = event();
        let outcome = launch();
        if let (Some(begin), Some(end)) = (begin, event()) {
            spans.push(Span { kernel, begin, end });
        }
        outcome
    }

    /// Ends profiling and adds the times up; the stream has been waited for.
    pub(crate) fn stop(&self) -> BTreeMap<&'static str, KernelTime> {
        let spans =
            self.0.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default();
        let mut times: BTreeMap<&'static str, KernelTime> = BTreeMap::new();
        for Span { kernel, begin, end } in spans {
            let time = times.entry(kernel).or_default();
            time.launches += 1;
            // SAFETY: both events were recorded on a stream that has been waited for, and are destroyed once.
            unsafe {
                time.micros += f64::from(result::event::elapsed(begin, end).unwrap_or(0.0)) * 1e3;
                let _ = result::event::destroy(begin);
                let _ = result::event::destroy(end);
            }
        }
        times
    }
}
