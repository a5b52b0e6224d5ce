//! What the processor reaches at most, measured: the floor that benchmarks hold the kernels against.

use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::CpuBackend;
use super::simd::{Kernel, Lane, dispatch};
use super::tensor::LANES;

/// Chains of dependent operations side by side: enough to hide the latency of one.
const CHAINS: usize = 8;
/// Fused multiply-adds of each chain between two looks at the clock.
const STEPS: usize = 1 << 16;
/// How long a measurement goes on.
const WINDOW: Duration = Duration::from_millis(200);

/// The highest rates of a backend's threads together.
#[derive(Clone, Copy, Debug)]
pub struct Ceiling {
    /// Bytes per second of reading a buffer of the given size over and over.
    pub read: f64,
    /// Single-precision operations per second; a fused multiply-add counts as two.
    pub flops: f64,
}

impl CpuBackend {
    /// Measures both rates on this backend's threads, reading a buffer of `bytes` bytes.
    #[must_use]
    pub fn ceiling(&self, bytes: usize) -> Ceiling {
        let threads = self.team.parts(usize::MAX);
        let share = (bytes / 4 / threads).next_multiple_of(CHAINS * LANES);
        let buffer = vec![1.0_f32; share * threads];
        let read = self.best(|| {
            buffer.par_chunks(share).for_each(|part| {
                let mut sum = 0.0;
                dispatch(Read { part, sum: &mut sum });
                std::hint::black_box(sum);
            });
        });
        let flops = self.best(|| {
            (0..threads).into_par_iter().for_each(|_| {
                let mut sum = 0.0;
                dispatch(Multiply { sum: &mut sum });
                std::hint::black_box(sum);
            });
        });
        Ceiling {
            read: (buffer.len() * 4) as f64 / read,
            flops: (2 * threads * CHAINS * STEPS * LANES) as f64 / flops,
        }
    }

    /// Seconds of the fastest of many runs.
    fn best(&self, run: impl Fn() + Sync) -> f64 {
        self.team.awake(|| {
            let begun = Instant::now();
            let mut best = f64::INFINITY;
            while begun.elapsed() < WINDOW {
                let start = Instant::now();
                run();
                best = best.min(start.elapsed().as_secs_f64());
            }
            best
        })
    }
}

struct Read<'a> {
    part: &'a [f32],
    sum: &'a mut f32,
}

impl Kernel for Read<'_> {
    #[inline(always)]
    fn run<L: Lane>(self) {
        let one = L::splat(1.0);
        let mut acc = [L::splat(0.0); CHAINS];
        for chunk in self.part.as_chunks::<{ CHAINS * LANES }>().0 {
            for (acc, lanes) in acc.iter_mut().zip(chunk.as_chunks::<LANES>().0) {
                *acc = acc.fma(L::load(lanes), one);
            }
        }
        *self.sum = total(acc);
    }
}

struct Multiply<'a> {
    sum: &'a mut f32,
}

impl Kernel for Multiply<'_> {
    #[inline(always)]
    fn run<L: Lane>(self) {
        let (factor, term) = (L::splat(0.5), L::splat(std::hint::black_box(0.25)));
        let mut acc = [L::splat(0.0); CHAINS];
        for _ in 0..STEPS {
            for acc in &mut acc {
                *acc = term.fma(*acc, factor);
            }
        }
        *self.sum = total(acc);
    }
}

#[inline(always)]
fn total<L: Lane>(acc: [L; CHAINS]) -> f32 {
    let mut sum = 0.0;
    for acc in acc {
        let mut lanes = [0.0; LANES];
        acc.store(&mut lanes);
        sum += lanes.iter().sum::<f32>();
    }
    sum
}
