//! A Hugging Face checkpoint directory: which tensor is in which file, and its bytes.
//!
//! Only the shards of the slice are opened, and of those only the header and the tensors asked for are touched.

mod error;
mod names;
mod shard;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use baton_kernels::{MatrixData, MatrixView};
use baton_plan::Fp8Block;
use half::{bf16, f16};
use safetensors::Dtype;

pub use error::CheckpointError;
use shard::{Shard, StoredTensor};

const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";
const SCALE_SUFFIX: &str = "_scale_inv";

/// An opened checkpoint directory.
#[derive(Debug)]
pub struct Checkpoint {
    files: Vec<(PathBuf, OnceLock<Shard>)>,
    /// Tensor name -> file.
    tensors: BTreeMap<String, usize>,
    digest: String,
    tensor_bytes: AtomicU64,
    header_bytes: AtomicU64,
}

impl Checkpoint {
    /// Reads the index (`model.safetensors.index.json`), or the header of a single `model.safetensors`.
    ///
    /// # Errors
    /// When neither is there or it cannot be read.
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        let index = dir.join(INDEX_FILE);
        if index.exists() { Self::sharded(dir, &index) } else { Self::single(dir) }
    }

    fn single(dir: &Path) -> Result<Self, CheckpointError> {
        let path = dir.join(SINGLE_FILE);
        if !path.exists() {
            return Err(CheckpointError::NoWeights { dir: dir.to_owned() });
        }
        let shard = Shard::open(&path)?;
        let tensors = shard.names().into_iter().map(|name| (name, 0)).collect();
        let digest = digest(shard.header());
        let header_bytes = AtomicU64::new(shard.header().len() as u64);
        let files = vec![(path, OnceLock::from(shard))];
        Ok(Self { files, tensors, digest, tensor_bytes: AtomicU64::new(0), header_bytes })
    }

    fn sharded(dir: &Path, index: &Path) -> Result<Self, CheckpointError> {
        #[derive(serde::Deserialize)]
        struct Index {
            weight_map: BTreeMap<String, String>,
        }
        let text = std::fs::read(index)
            .map_err(|source| CheckpointError::Read { path: index.to_owned(), source })?;
        let parsed: Index = serde_json::from_slice(&text).map_err(|e| {
            CheckpointError::Malformed { path: index.to_owned(), reason: e.to_string() }
        })?;
        let mut names: Vec<&String> = parsed.weight_map.values().collect();
        names.sort();
        names.dedup();
        for name in &names {
            // A file name from a file: it must stay in the directory.
            if Path::new(name).components().count() != 1 || name.starts_with("..") {
                return Err(CheckpointError::Malformed {
                    path: index.to_owned(),
                    reason: format!("{name:?} is not the name of a file in the same directory"),
                });
            }
        }
        let tensors = parsed
            .weight_map
            .iter()
            .map(|(tensor, file)| {
                let at = names.partition_point(|name| *name < file);
                (tensor.clone(), at)
            })
            .collect();
        Ok(Self {
            files: names.iter().map(|name| (dir.join(name), OnceLock::new())).collect(),
            tensors,
            digest: digest(&text),
            tensor_bytes: AtomicU64::new(0),
            header_bytes: AtomicU64::new(0),
        })
    }

    /// Hex digest of the index, or of the single file's header.
    #[must_use]
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Bytes of tensors that were handed out.
    #[must_use]
    pub fn tensor_bytes_read(&self) -> u64 {
        self.tensor_bytes.load(Ordering::Relaxed)
    }

    /// Bytes read in all: tensors and the headers of the files they are in.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        self.tensor_bytes_read() + self.header_bytes.load(Ordering::Relaxed)
    }

    /// Whether there is a tensor of this name.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    fn tensor(&self, name: &str) -> Result<StoredTensor<'_>, CheckpointError> {
        let file = *self
            .tensors
            .get(name)
            .ok_or_else(|| CheckpointError::Missing { names: vec![name.to_owned()], count: 1 })?;
        let (path, cell) = &self.files[file];
        let shard = match cell.get() {
            Some(shard) => shard,
            None => {
                let shard = Shard::open(path)?;
                self.header_bytes.fetch_add(shard.header().len() as u64, Ordering::Relaxed);
                cell.get_or_init(|| shard)
            }
        };
        let tensor = shard.tensor(name)?;
        self.tensor_bytes.fetch_add(tensor.bytes.len() as u64, Ordering::Relaxed);
        Ok(tensor)
    }

    /// A matrix of the given shape, in its stored form.
    ///
    /// # Errors
    /// When it is missing, or has another shape or a type that is not served.
    pub fn matrix(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
        fp8: Option<Fp8Block>,
    ) -> Result<MatrixView<'_>, CheckpointError> {
        let stored = self.tensor(name)?;
        expect_shape(name, &stored.shape, &[rows, cols])?;
        let data = match stored.dtype {
            Dtype::F32 => MatrixData::F32(stored.bytes),
            Dtype::BF16 => MatrixData::Bf16(stored.bytes),
            Dtype::F16 => MatrixData::F16(stored.bytes),
            Dtype::F8_E4M3 => self.fp8(name, rows, cols, fp8, stored.bytes)?,
            other => return Err(CheckpointError::unserved(name, other)),
        };
        Ok(MatrixView { rows, cols, data })
    }

    fn fp8<'a>(
        &'a self,
        name: &str,
        rows: usize,
        cols: usize,
        block: Option<Fp8Block>,
        codes: &'a [u8],
    ) -> Result<MatrixData<'a>, CheckpointError> {
        let block = block.ok_or_else(|| CheckpointError::NoBlocks { name: name.to_owned() })?;
        let scale_name = format!("{name}{SCALE_SUFFIX}");
        let scales = self.tensor(&scale_name)?;
        let grid = [rows.div_ceil(block.rows), cols.div_ceil(block.cols)];
        expect_shape(&scale_name, &scales.shape, &grid)?;
        if scales.dtype != Dtype::F32 {
            return Err(CheckpointError::unserved(&scale_name, scales.dtype));
        }
        Ok(MatrixData::Fp8Block {
            codes,
            scales: scales.bytes,
            block_rows: block.rows,
            block_cols: block.cols,
        })
    }

    /// A vector of the given length, as f32.
    ///
    /// # Errors
    /// When it is missing, or has another length or a type that is not served.
    pub fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, CheckpointError> {
        let stored = self.tensor(name)?;
        expect_shape(name, &stored.shape, &[len])?;
        let pairs = || stored.bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
        Ok(match stored.dtype {
            Dtype::F32 => stored
                .bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
            Dtype::BF16 => pairs().map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
            Dtype::F16 => pairs().map(|b| f16::from_le_bytes(b).to_f32()).collect(),
            other => return Err(CheckpointError::unserved(name, other)),
        })
    }

    /// One expert's slab of a fused tensor `[experts, rows, cols]`: rows `range` of it.
    ///
    /// # Errors
    /// When it is missing, or has another shape or type.
    pub fn fused(
        &self,
        name: &str,
        shape: [usize; 3],
        expert: usize,
        range: std::ops::Range<usize>,
    ) -> Result<MatrixView<'_>, CheckpointError> {
        let stored = self.tensor(name)?;
        // The whole tensor is counted once, with the first slab.
        if (expert, range.start) != (0, 0) {
            self.tensor_bytes.fetch_sub(stored.bytes.len() as u64, Ordering::Relaxed);
        }
        expect_shape(name, &stored.shape, &shape)?;
        let [experts, rows, cols] = shape;
        let size = stored.bytes.len() / (experts * rows * cols).max(1);
        let start = (expert * rows + range.start) * cols * size;
        let bytes = &stored.bytes[start..start + range.len() * cols * size];
        let data = match stored.dtype {
            Dtype::F32 => MatrixData::F32(bytes),
            Dtype::BF16 => MatrixData::Bf16(bytes),
            Dtype::F16 => MatrixData::F16(bytes),
            other => return Err(CheckpointError::unserved(name, other)),
        };
        Ok(MatrixView { rows: range.len(), cols, data })
    }
}

fn digest(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex()[..32].to_owned()
}

fn expect_shape(name: &str, found: &[usize], expected: &[usize]) -> Result<(), CheckpointError> {
    if found == expected {
        return Ok(());
    }
    Err(CheckpointError::Shape {
        name: name.to_owned(),
        found: found.to_vec(),
        expected: expected.to_vec(),
    })
}
