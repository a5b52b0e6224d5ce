//! Every operation of a backend beside the CPU's, on random values.
//!
//! Written against the trait, so that it says of any device what the CPU reference says. Inputs are drawn from a fixed
//! seed and rounded to the device's compute type first: what is compared is the operation, not the rounding of its input.

mod attention;
mod feed_forward;
mod rows;
mod values;

use crate::backend::{Backend, Dtype, KernelError};
use crate::cpu::{CpuBackend, CpuOptions};
use values::Values;

/// One operation on one shape.
#[derive(Clone, Debug, PartialEq)]
pub struct Check {
    /// The operation's name in [`Backend`].
    pub operation: &'static str,
    /// Shape and stored type.
    pub case: String,
    /// `|device - reference| / |reference|` over all values; for choices the share of rows that differ.
    pub error: f64,
    /// The largest error that passes.
    pub bound: f64,
}

impl Check {
    /// Whether the error is within the bound; a NaN is not.
    #[must_use]
    pub fn passes(&self) -> bool {
        self.error <= self.bound
    }
}

/// The compute type of the device under test and what follows from it.
#[derive(Clone, Copy, Debug)]
pub struct Precision {
    /// Of activations.
    pub dtype: Dtype,
    /// Bound for plain arithmetic.
    pub bound: f64,
    /// Bound where activations are quantised to FP8.
    pub fp8_bound: f64,
}

impl Precision {
    /// For float32 activations.
    pub const F32: Self = Self { dtype: Dtype::F32, bound: 1e-5, fp8_bound: 1e-5 };
    /// For bfloat16 activations.
    pub const BF16: Self = Self { dtype: Dtype::Bf16, bound: 1e-2, fp8_bound: 5e-2 };
}

/// Sides of a comparison and what was found so far.
struct Bench<'a, B: Backend> {
    device: &'a B,
    cpu: CpuBackend,
    precision: Precision,
    /// With the sizes of GLM, or without.
    full: bool,
    values: Values,
    checks: Vec<Check>,
}

/// Runs every operation on both; `full` adds the sizes of GLM-5, which takes the reference a minute.
///
/// # Errors
/// When the device fails; an operation that answers wrongly is a [`Check`] that does not pass.
pub fn run<B: Backend>(
    device: &B,
    precision: Precision,
    full: bool,
) -> Result<Vec<Check>, KernelError> {
    let mut bench = Bench {
        device,
        cpu: CpuBackend::new(CpuOptions::default())?,
        precision,
        full,
        values: Values::new(7),
        checks: Vec::new(),
    };
    rows::check(&mut bench)?;
    attention::check(&mut bench)?;
    feed_forward::check(&mut bench)?;
    device.check()?;
    Ok(bench.checks)
}

impl<B: Backend> Bench<'_, B> {
    /// The same random tensor on both sides.
    fn tensors(
        &mut self,
        rows: usize,
        width: usize,
    ) -> (B::Tensor, <CpuBackend as Backend>::Tensor) {
        let values = self.values.take(rows * width);
        self.both(&values, rows, width)
    }

    /// Given values on both sides, rounded to the compute type.
    fn both(
        &self,
        values: &[f32],
        rows: usize,
        width: usize,
    ) -> (B::Tensor, <CpuBackend as Backend>::Tensor) {
        let dtype = self.precision.dtype;
        let bytes = values::bytes(values, dtype);
        (
            self.device.import(&bytes, rows, width, dtype),
            self.cpu.import(&bytes, rows, width, dtype),
        )
    }

    /// Compares two tensors.
    fn compare(
        &mut self,
        operation: &'static str,
        case: String,
        found: &B::Tensor,
        expected: &<CpuBackend as Backend>::Tensor,
        bound: f64,
    ) {
        let found = values::floats(&self.device.export(found, Dtype::F32));
        let expected = values::floats(&self.cpu.export(expected, Dtype::F32));
        let error = values::relative(&found, &expected);
        self.checks.push(Check { operation, case, error, bound });
    }

    /// Compares what is exact: the share of lines that differ.
    fn compare_lines<T: PartialEq>(
        &mut self,
        operation: &'static str,
        case: String,
        found: &[T],
        expected: &[T],
        line: usize,
    ) {
        let lines = expected.len() / line.max(1);
        let wrong = found
            .chunks(line.max(1))
            .zip(expected.chunks(line.max(1)))
            .filter(|(f, e)| f != e)
            .count();
        let error =
            if found.len() == expected.len() { wrong as f64 / lines.max(1) as f64 } else { 1.0 };
        self.checks.push(Check { operation, case, error, bound: 0.0 });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_passes_its_own_test_and_every_operation_is_in_it() {
        let cpu = CpuBackend::new(CpuOptions::default()).unwrap();
        let checks = run(&cpu, Precision::F32, false).unwrap();
        for check in &checks {
            assert!(check.passes(), "{check:?}");
        }
        for operation in [
            "embed",
            "rms_norm",
            "add",
            "linear",
            "linear_f32",
            "rope",
            "select",
            "sparse_attention",
            "swiglu",
            "route + run_experts",
            "accumulate",
            "gather",
            "sample",
            "score",
            "export",
            "import_selection",
        ] {
            assert!(checks.iter().any(|c| c.operation == operation), "{operation} is not tested");
        }
    }
}
