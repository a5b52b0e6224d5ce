//! The tiny checkpoints, and broken copies of them.

use std::io;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// The directory of a tiny checkpoint.
#[must_use]
pub fn model_dir(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("models").join(name)
}

/// A copy of a tiny checkpoint that a test may spoil. Its path is in the command line of every process that uses it and
/// of no other.
///
/// # Errors
/// When a file cannot be copied.
pub fn copy_of(name: &str) -> io::Result<TempDir> {
    let copy = tempfile::Builder::new().prefix(name).tempdir()?;
    for entry in std::fs::read_dir(model_dir(name))? {
        let entry = entry?;
        std::fs::copy(entry.path(), copy.path().join(entry.file_name()))?;
    }
    Ok(copy)
}
