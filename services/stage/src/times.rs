//! When a step came and how long each part of it took.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use baton_proto::v1;

/// A step and when it came.
#[derive(Debug)]
pub(crate) struct Arrived {
    pub(crate) step: v1::Step,
    pub(crate) at: Instant,
    /// The same moment by the wall clock: microseconds since 1970.
    pub(crate) unix_micros: u64,
}

impl Arrived {
    pub(crate) fn now(step: v1::Step) -> Self {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let unix_micros = u64::try_from(unix.as_micros()).unwrap_or(u64::MAX);
        Self { step, at: Instant::now(), unix_micros }
    }
}

/// Cuts time into parts without gaps.
#[derive(Debug)]
pub(crate) struct Laps {
    last: Instant,
}

impl Laps {
    pub(crate) fn since(start: Instant) -> Self {
        Self { last: start }
    }

    /// Microseconds since the last call, or since the start.
    pub(crate) fn lap(&mut self) -> u32 {
        let now = Instant::now();
        let lap = now.duration_since(std::mem::replace(&mut self.last, now));
        u32::try_from(lap.as_micros()).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn laps_follow_each_other_without_gaps() {
        let start = Instant::now().checked_sub(Duration::from_secs(2)).unwrap();
        let mut laps = Laps::since(start);
        let mut sum = u64::from(laps.lap());
        assert!(sum >= 2_000_000, "{sum}");
        for _ in 0..3 {
            sum += u64::from(laps.lap());
        }
        let whole = start.elapsed().as_micros() as u64;
        // Every lap is rounded down to a microsecond.
        assert!((whole - 1000..=whole).contains(&sum), "{sum} of {whole}");
    }
}
