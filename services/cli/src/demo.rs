//! The demo model that `baton up` serves when no other is named. It is part of the program, so that it is at hand in any
//! working directory, and is unpacked once.

use std::path::{Path, PathBuf};

use anyhow::Context as _;

/// What names the unpacked files: another build with another model unpacks another directory.
const VERSION: &str = env!("CARGO_PKG_VERSION");

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_bytes!(concat!("../../../tests/models/demo/", $name)).as_slice())),*]
    };
}

/// The config comes last: a directory that has one is whole.
static FILES: [(&str, &[u8]); 7] = files![
    "chat_template.jinja",
    "copy_task.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
];

/// The directory of the demo model, unpacked when it is not there yet.
///
/// # Errors
/// When it cannot be written.
pub(crate) fn directory() -> anyhow::Result<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(std::env::home_dir()?.join(".cache")))
        .filter(|path| path.is_absolute())
        .unwrap_or_else(std::env::temp_dir);
    let directory = cache.join("baton").join(VERSION).join("demo");
    unpack(&directory)
        .with_context(|| format!("unpack the demo model to {}", directory.display()))?;
    Ok(directory)
}

fn unpack(directory: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(directory)?;
    for (name, bytes) in FILES {
        let path = directory.join(name);
        if std::fs::read(&path).is_ok_and(|found| found == bytes) {
            continue;
        }
        // Another start may unpack at the same time: each file appears whole or not at all.
        let partial = directory.join(format!("{name}.{}", std::process::id()));
        std::fs::write(&partial, bytes)?;
        std::fs::rename(&partial, &path)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test fails by panicking.

    use super::*;

    #[test]
    fn it_is_unpacked_whole_and_repaired_when_damaged() {
        let dir = tempfile::tempdir().unwrap();
        let demo = dir.path().join("a/demo");
        unpack(&demo).unwrap();
        let config = baton_plan::ModelConfig::load(&demo).unwrap();
        assert_eq!((config.num_layers, config.index_topk), (12, 32));
        baton_model::Checkpoint::open(&demo).unwrap().check_names(&config, 0..12).unwrap();
        std::fs::write(demo.join("model.safetensors"), "damaged").unwrap();
        unpack(&demo).unwrap();
        baton_model::Checkpoint::open(&demo).unwrap();
        let left = std::fs::read_dir(&demo).unwrap().count();
        assert_eq!(left, FILES.len(), "no partial file stays behind");
    }
}
