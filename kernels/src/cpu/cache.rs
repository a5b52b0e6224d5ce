//! Paged caches: slot `block * block_size + offset` holds one position's values.

use crate::backend::KernelError;

/// Latent and rotated key of every slot of one layer, `[slots, latent + rope]`.
#[derive(Debug)]
pub struct LatentCache {
    pub(crate) latent: usize,
    pub(crate) width: usize,
    pub(crate) data: Vec<f32>,
}

/// Index key of every slot of one full layer, `[slots, head_dim]`.
#[derive(Debug)]
pub struct IndexCache {
    pub(crate) width: usize,
    pub(crate) data: Vec<f32>,
}

/// Zeroed room for `blocks * block_size` slots of `width` values.
pub(crate) fn slots(
    what: &'static str,
    blocks: usize,
    block_size: usize,
    width: usize,
) -> Result<Vec<f32>, KernelError> {
    let needed = blocks as u64 as u128 * block_size as u128 * width as u128 * 4;
    let out_of_memory = || KernelError::OutOfMemory {
        what,
        needed: u64::try_from(needed).unwrap_or(u64::MAX),
        available: isize::MAX as u64,
    };
    let values = usize::try_from(needed / 4).map_err(|_| out_of_memory())?;
    let mut data = Vec::new();
    data.try_reserve_exact(values).map_err(|_| out_of_memory())?;
    data.resize(values, 0.0);
    Ok(data)
}
