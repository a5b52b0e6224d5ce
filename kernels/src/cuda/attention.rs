//! Latent attention on the device.

use super::device::{Device, launch};
use super::memory::Memory;
use super::placed::Placed;
use super::selection::Selection;
use super::tensor::{Element, Tensor};
use super::weight::{Weight, mismatch};
use crate::backend::{KernelError, MatrixView};

/// The latent widths that the plain kernel keeps in registers.
const LARGEST_LATENT: usize = 512;

/// `kv_b_proj` per head: `uk` `[heads][nope][latent]`, `uv` `[heads][value][latent]`, in the compute type.
#[derive(Debug)]
pub struct Absorbed {
    pub(crate) heads: usize,
    pub(crate) nope: usize,
    pub(crate) value: usize,
    pub(crate) latent: usize,
    pub(crate) uk: Memory,
    pub(crate) uv: Memory,
}

/// Paged latents of one layer: `[slots][latent + rope]` in the compute type.
#[derive(Debug)]
pub struct LatentCache {
    pub(crate) latent: usize,
    pub(crate) rope: usize,
    pub(crate) data: Memory,
}

impl Absorbed {
    pub(crate) fn new(
        device: &Device,
        element: Element,
        kv_b: MatrixView<'_>,
        heads: usize,
        nope: usize,
        value: usize,
    ) -> Result<Self, KernelError> {
        let (rows, latent) = (heads * (nope + value), kv_b.cols);
        if kv_b.rows != rows {
            return Err(mismatch("kv_b_proj", format!("{rows} rows"), format!("{}", kv_b.rows)));
        }
        if latent > LARGEST_LATENT {
            return Err(mismatch(
                "kv_lora_rank",
                format!("at most {LARGEST_LATENT}"),
                latent.to_string(),
            ));
        }
        let stored = Weight::upload(device, kv_b)?;
        let uk = Memory::own(device, "kv_b_proj, keys", heads * nope * latent * element.size())?;
        let uv = Memory::own(device, "kv_b_proj, values", heads * value * latent * element.size())?;
        launch!(device, element.pick("split_kv_b_f32", "split_kv_b_bf16"), rows, 128, 0;
            stored.matrix(), uk.at(0), uv.at(0), nope as i32, value as i32);
        // `stored` is freed when this returns: the split has to be over.
        device.synchronise();
        device.take_failure()?;
        Ok(Self { heads, nope, value, latent, uk, uv })
    }
}

/// Attention of every row over its selected slots.
pub(crate) fn attend(
    device: &Device,
    cache: &LatentCache,
    placed: &Placed,
    queries: &Tensor,
    absorbed: &Absorbed,
    selection: &Selection,
    scale: f32,
) -> Tensor {
    let Absorbed { heads, nope, value, latent, .. } = *absorbed;
    let (rows, rope) = (placed.rows, cache.rope);
    let element = queries.element;
    let inner = Tensor::new(device, rows, heads * (latent + rope), Element::F32);
    launch!(device, element.pick("absorb_queries_f32", "absorb_queries_bf16"), (rows, heads), 128, nope * 4;
        queries.at(), absorbed.uk.at(0), inner.at(), heads as i32, nope as i32, rope as i32, latent as i32);
    let attended = Tensor::new(device, rows, heads * latent, Element::F32);
    let shared = (latent + rope + 4 * (latent + 2)) * 4;
    launch!(device, element.pick("attend_f32", "attend_bf16"), (rows, heads), 128, shared;
        cache.data.at(0), inner.at(), selection.slots(), selection.counts(), attended.at(), heads as i32, latent as i32,
        rope as i32, selection.topk as i32, scale);
    let out = Tensor::new(device, rows, heads * value, element);
    launch!(device, element.pick("absorb_values_f32", "absorb_values_bf16"), (rows, heads), 128, 0;
        attended.at(), absorbed.uv.at(0), out.at(), heads as i32, value as i32, latent as i32);
    out
}
