//! Activations on the device.

use half::{bf16, f16};

use super::device::Device;
use super::memory::Memory;
use crate::backend::Dtype;

/// Activations `[rows, width]`, row-major, f32 or bf16.
#[derive(Debug)]
pub struct Tensor {
    pub(crate) rows: usize,
    pub(crate) width: usize,
    pub(crate) element: Element,
    pub(crate) memory: Memory,
}

/// Compute type of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// As the CPU computes.
    F32,
    /// What GLM checkpoints are made for.
    Bf16,
}

impl Element {
    pub(crate) fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }

    /// The name of a kernel's form for this type.
    pub(crate) fn pick(self, f32: &'static str, bf16: &'static str) -> &'static str {
        match self {
            Self::F32 => f32,
            Self::Bf16 => bf16,
        }
    }
}

impl Tensor {
    /// A tensor with whatever was in its memory.
    pub(crate) fn new(device: &Device, rows: usize, width: usize, element: Element) -> Self {
        let memory = Memory::part(device, "a step's tensor", rows * width * element.size());
        Self { rows, width, element, memory }
    }

    pub(crate) fn at(&self) -> u64 {
        self.memory.at(0)
    }

    pub(crate) fn values(&self) -> usize {
        self.rows * self.width
    }

    /// The values on the host, little-endian.
    pub(crate) fn export(&self, device: &Device, dtype: Dtype) -> Vec<u8> {
        let mut bytes = vec![0; self.values() * self.element.size()];
        self.memory.read(device, &mut bytes);
        match (self.element, dtype) {
            (Element::F32, Dtype::F32) | (Element::Bf16, Dtype::Bf16) => bytes,
            (element, dtype) => {
                let values: Vec<f32> = match element {
                    Element::F32 => words(&bytes).map(f32::from_le_bytes).collect(),
                    Element::Bf16 => {
                        words(&bytes).map(|b| bf16::from_le_bytes(b).to_f32()).collect()
                    }
                };
                match dtype {
                    Dtype::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
                    Dtype::Bf16 => {
                        values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect()
                    }
                    Dtype::F16 => {
                        values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect()
                    }
                }
            }
        }
    }

    /// Values from the host.
    pub(crate) fn import(
        device: &Device,
        bytes: &[u8],
        rows: usize,
        width: usize,
        dtype: Dtype,
        element: Element,
    ) -> Self {
        let out = Self::new(device, rows, width, element);
        match (dtype, element) {
            (Dtype::F32, Element::F32) | (Dtype::Bf16, Element::Bf16) => {
                out.memory.write(device, 0, bytes);
            }
            (dtype, element) => {
                let values: Vec<f32> = match dtype {
                    Dtype::F32 => words(bytes).map(f32::from_le_bytes).collect(),
                    Dtype::Bf16 => words(bytes).map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
                    Dtype::F16 => words(bytes).map(|b| f16::from_le_bytes(b).to_f32()).collect(),
                };
                let cast: Vec<u8> = match element {
                    Element::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
                    Element::Bf16 => {
                        values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect()
                    }
                };
                out.memory.write(device, 0, &cast);
            }
        }
        out
    }
}

fn words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> {
    bytes.as_chunks::<N>().0.iter().copied()
}
