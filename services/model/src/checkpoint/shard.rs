//! One safetensors file, mapped into memory.

use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::tensor::Metadata;
use safetensors::{Dtype, SafeTensors};

use super::error::CheckpointError;

/// Bytes before the JSON header: its length.
const LENGTH_BYTES: usize = 8;

#[derive(Debug)]
pub(super) struct Shard {
    path: PathBuf,
    map: Mmap,
    metadata: Metadata,
    /// Where the tensors begin.
    data: usize,
}

/// A tensor as it lies in the file.
#[derive(Debug)]
pub(super) struct StoredTensor<'a> {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: &'a [u8],
}

#[allow(unsafe_code)]
fn map(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: the map is read-only and lives as long as `Shard`. Another process that shortens the file while it is mapped
    // would make reads fail with SIGBUS; checkpoints are not rewritten in place while they are served.
    unsafe { Mmap::map(file) }
}

impl Shard {
    pub(super) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let read = |source| CheckpointError::Read { path: path.to_owned(), source };
        let malformed =
            |reason: String| CheckpointError::Malformed { path: path.to_owned(), reason };
        let file = File::open(path).map_err(read)?;
        let map = map(&file).map_err(read)?;
        let (header, metadata) =
            SafeTensors::read_metadata(&map).map_err(|e| malformed(format!("{e:?}")))?;
        let data = LENGTH_BYTES + header;
        let end = metadata.tensors().values().map(|t| t.data_offsets.1).max().unwrap_or(0);
        if data + end > map.len() {
            return Err(malformed(format!(
                "its header announces {} bytes, the file has {}",
                data + end,
                map.len()
            )));
        }
        Ok(Self { path: path.to_owned(), map, metadata, data })
    }

    /// Length and JSON, as stored.
    pub(super) fn header(&self) -> &[u8] {
        &self.map[..self.data]
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.metadata.offset_keys()
    }

    pub(super) fn tensor(&self, name: &str) -> Result<StoredTensor<'_>, CheckpointError> {
        let info = self.metadata.info(name).ok_or_else(|| CheckpointError::Malformed {
            path: self.path.clone(),
            reason: format!("the index says that it holds {name}, its header does not"),
        })?;
        let (start, end) = info.data_offsets;
        Ok(StoredTensor {
            dtype: info.dtype,
            shape: info.shape.clone(),
            bytes: &self.map[self.data + start..self.data + end],
        })
    }
}
