//! Sixteen f32 lanes on AVX-512, AVX2 and portable code, and the choice between them.
//!
//! All three fuse multiply and add, so they agree to the last bit.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

use super::tensor::LANES;

/// Sixteen f32 lanes.
///
/// The x86 implementations use instructions the processor may lack: code generic over `Lane` is entered through
/// [`dispatch`] alone, which has asked the processor.
pub(crate) trait Lane: Copy {
    fn splat(value: f32) -> Self;
    fn load(from: &[f32; LANES]) -> Self;
    fn store(self, to: &mut [f32; LANES]);
    /// `self + a * b`, rounded once.
    fn fma(self, a: Self, b: Self) -> Self;
    /// `self * other`.
    fn mul(self, other: Self) -> Self;
    /// Zero where negative; a NaN stays.
    fn relu(self) -> Self;

    /// The sum of the lanes, halves added to halves.
    #[inline(always)]
    fn sum(self) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(&mut lanes);
        let mut half = LANES / 2;
        while half > 0 {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
            half /= 2;
        }
        lanes[0]
    }
}

/// Portable lanes.
#[derive(Clone, Copy)]
pub(crate) struct Portable([f32; LANES]);

impl Lane for Portable {
    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self([value; LANES])
    }
    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self {
        Self(*from)
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        *to = self.0;
    }
    #[inline(always)]
    fn fma(mut self, a: Self, b: Self) -> Self {
        for ((s, a), b) in self.0.iter_mut().zip(a.0).zip(b.0) {
            *s = a.mul_add(b, *s);
        }
        self
    }
    #[inline(always)]
    fn mul(mut self, other: Self) -> Self {
        self.0.iter_mut().zip(other.0).for_each(|(s, o)| *s *= o);
        self
    }
    #[inline(always)]
    fn relu(self) -> Self {
        // Not `max`, which would hide a NaN.
        Self(self.0.map(|v| if v < 0.0 { 0.0 } else { v }))
    }
}

/// AVX-512 lanes.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) struct Avx512(__m512);

// SAFETY (whole block): reached through `dispatch` only, after the processor reported avx512f; loads and stores are
// unaligned accesses to sixteen f32 behind a reference.
#[cfg(target_arch = "x86_64")]
impl Lane for Avx512 {
    #[inline(always)]
    fn splat(value: f32) -> Self {
        // SAFETY: see the block.
        Self(unsafe { _mm512_set1_ps(value) })
    }
    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self {
        // SAFETY: see the block.
        Self(unsafe { _mm512_loadu_ps(from.as_ptr()) })
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        // SAFETY: see the block.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), self.0) }
    }
    #[inline(always)]
    fn fma(self, a: Self, b: Self) -> Self {
        // SAFETY: see the block.
        Self(unsafe { _mm512_fmadd_ps(a.0, b.0, self.0) })
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: see the block.
        Self(unsafe { _mm512_mul_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn relu(self) -> Self {
        // SAFETY: see the block. The instruction returns its second operand when either is a NaN.
        Self(unsafe { _mm512_max_ps(_mm512_setzero_ps(), self.0) })
    }
}

/// AVX2 lanes, in two halves.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(crate) struct Avx2(__m256, __m256);

// SAFETY (whole block): reached through `dispatch` only, after the processor reported avx2 and fma; both halves lie
// inside the sixteen f32 behind the reference.
#[cfg(target_arch = "x86_64")]
impl Lane for Avx2 {
    #[inline(always)]
    fn splat(value: f32) -> Self {
        // SAFETY: see the block.
        unsafe { Self(_mm256_set1_ps(value), _mm256_set1_ps(value)) }
    }
    #[inline(always)]
    fn load(from: &[f32; LANES]) -> Self {
        // SAFETY: see the block.
        unsafe { Self(_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from.as_ptr().add(8))) }
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        // SAFETY: see the block.
        unsafe {
            _mm256_storeu_ps(to.as_mut_ptr(), self.0);
            _mm256_storeu_ps(to.as_mut_ptr().add(8), self.1);
        }
    }
    #[inline(always)]
    fn fma(self, a: Self, b: Self) -> Self {
        // SAFETY: see the block.
        unsafe { Self(_mm256_fmadd_ps(a.0, b.0, self.0), _mm256_fmadd_ps(a.1, b.1, self.1)) }
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: see the block.
        unsafe { Self(_mm256_mul_ps(self.0, other.0), _mm256_mul_ps(self.1, other.1)) }
    }
    #[inline(always)]
    fn relu(self) -> Self {
        // SAFETY: see the block. The instruction returns its second operand when either is a NaN.
        unsafe {
            let zero = _mm256_setzero_ps();
            Self(_mm256_max_ps(zero, self.0), _mm256_max_ps(zero, self.1))
        }
    }
}

/// Work that is written once over [`Lane`]; `run` must be `#[inline(always)]`, so that it is compiled for the lanes'
/// instruction set.
pub(crate) trait Kernel {
    fn run<L: Lane>(self);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn on_avx512<K: Kernel>(kernel: K) {
    kernel.run::<Avx512>();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn on_avx2<K: Kernel>(kernel: K) {
    kernel.run::<Avx2>();
}

/// Lanes that this processor has: values come from [`Width::available`] alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Width(Instructions);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Instructions {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

impl Width {
    /// Widest first.
    #[inline]
    pub(crate) fn available() -> impl Iterator<Item = Self> {
        #[cfg(target_arch = "x86_64")]
        let vectors = {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            [avx512.then_some(Instructions::Avx512), avx2.then_some(Instructions::Avx2)]
        };
        #[cfg(not(target_arch = "x86_64"))]
        let vectors = [];
        vectors.into_iter().flatten().chain([Instructions::Portable]).map(Self)
    }

    /// Runs a kernel on these lanes.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) {
        match self.0 {
            // SAFETY: a `Width` exists only when the processor has reported every feature the function enables.
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => unsafe { on_avx512(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => unsafe { on_avx2(kernel) },
            Instructions::Portable => kernel.run::<Portable>(),
        }
    }
}

/// Runs a kernel on the widest lanes the processor has.
#[inline]
pub(crate) fn dispatch<K: Kernel>(kernel: K) {
    if let Some(widest) = Width::available().next() {
        widest.run(kernel);
    }
}

/// `e^x` within two units in the last place, in operations that vectorise; saturates outside `[-87, 88]`.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    /// Adding it rounds a small f32 to an integer that sits in the low mantissa bits.
    const ROUND: f32 = 12_582_912.0;
    // Written as comparisons, which let a NaN through; `clamp` would as well but does not vectorise.
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 88.0 { 88.0 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-0.693_359_4, x);
    let r = n.mul_add(2.121_944_4e-4, r);
    let p = 1.0 / 5040.0;
    let p = r.mul_add(p, 1.0 / 720.0);
    let p = r.mul_add(p, 1.0 / 120.0);
    let p = r.mul_add(p, 1.0 / 24.0);
    let p = r.mul_add(p, 1.0 / 6.0);
    let p = r.mul_add(p, 0.5);
    let p = r.mul_add(p, 1.0);
    let p = r.mul_add(p, 1.0);
    p * f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23))
}
