//! Checkpoint files that are damaged or were made to do damage: a typed error that names the file or the tensor, never a
//! panic, and never more memory than the file has bytes.
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use baton_kernels::{CpuBackend, CpuOptions};
use baton_model::{Checkpoint, CheckpointError, Slice};
use baton_plan::Fp8Block;
use baton_plan::{Contract, ContractOptions, HiddenDtype, IndexDtype, ModelConfig, Partition};
use proptest::prelude::*;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

const NAMES: [&str; 5] = ["matrix", "vector", "fused", "codes", "codes_scale_inv"];

/// A sound file with one tensor of every form that is read.
const BLOCKS: Option<Fp8Block> = Some(Fp8Block { rows: 128, cols: 128 });

fn sound() -> Vec<u8> {
    let data = vec![0_u8; 4096];
    let view = |dtype, shape: &[usize], bytes| {
        TensorView::new(dtype, shape.to_vec(), &data[..bytes]).unwrap()
    };
    let tensors = [
        ("matrix", view(Dtype::F32, &[3, 5], 60)),
        ("vector", view(Dtype::BF16, &[7], 14)),
        ("fused", view(Dtype::F16, &[2, 3, 4], 48)),
        ("codes", view(Dtype::F8_E4M3, &[4, 130], 520)),
        ("codes_scale_inv", view(Dtype::F32, &[1, 2], 8)),
    ];
    safetensors::serialize(tensors, None).unwrap()
}

/// The header of a safetensors file: its length and JSON.
fn header_end(file: &[u8]) -> usize {
    8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize
}

/// The error names the file or the tensor that it is about.
fn names_something(error: &CheckpointError, dir: &Path) -> bool {
    let message = error.to_string();
    message.contains(&dir.display().to_string()) || NAMES.iter().any(|n| message.contains(n))
}

/// Opens a directory and reads everything in it as what it could be.
fn read_all(dir: &Path) -> Result<(), TestCaseError> {
    let checkpoint = match Checkpoint::open(dir) {
        Ok(checkpoint) => checkpoint,
        Err(error) => {
            prop_assert!(names_something(&error, dir), "{error}");
            return Ok(());
        }
    };
    for name in NAMES {
        let reads = [
            checkpoint.matrix(name, 3, 5, BLOCKS).map(drop),
            checkpoint.matrix(name, 4, 130, BLOCKS).map(drop),
            checkpoint.vector(name, 7).map(drop),
            checkpoint.fused(name, [2, 3, 4], 1, 0..3).map(drop),
            checkpoint.fused(name, [0, 3, 4], 0, 0..0).map(drop),
        ];
        for error in reads.into_iter().filter_map(Result::err) {
            prop_assert!(names_something(&error, dir), "{name}: {error}");
        }
    }
    Ok(())
}

/// A directory with these bytes as its only weights.
fn single(bytes: &[u8]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    dir
}

/// Numbers that lie near something: small ones, powers of two, the ends of the range.
fn number() -> impl Strategy<Value = u64> {
    let near = (0_u32..64, -2_i64..3)
        .prop_map(|(bit, off)| (1_u64 << bit).wrapping_add(off.cast_unsigned()));
    prop_oneof![0_u64..700, near, any::<u64>()]
}

/// What a header may say of a tensor, sensible or not.
fn entry() -> impl Strategy<Value = Value> {
    let dtypes = ["F32", "BF16", "F16", "F8_E4M3", "F4", "I64", "BOOL", "F99"];
    let shape = prop::collection::vec(number(), 0..4);
    let offsets = prop::collection::vec(number(), 0..4);
    let whole = (prop::sample::select(dtypes.to_vec()), shape, offsets)
        .prop_map(|(dtype, shape, at)| json!({"dtype": dtype, "shape": shape, "data_offsets": at}));
    let foreign = prop_oneof![
        Just(json!(null)),
        Just(json!(-1)),
        Just(json!({"dtype": "F32", "shape": [-3, 5], "data_offsets": [0, 60]})),
        Just(json!({"dtype": "F32", "shape": [3.5], "data_offsets": [0, 14]})),
        Just(json!({"dtype": "F32"})),
    ];
    prop_oneof![6 => whole, 1 => foreign]
}

/// A sound file whose tensors have any type and shape.
fn other_tensors() -> impl Strategy<Value = Vec<u8>> {
    let dtypes = [("F32", 32), ("BF16", 16), ("F16", 16), ("F8_E4M3", 8), ("F4", 4), ("I64", 64)];
    let known = [&[3, 5][..], &[4, 130], &[7], &[2, 3, 4], &[1, 2]].map(<[usize]>::to_vec);
    let shape = prop_oneof![
        2 => prop::sample::select(known.to_vec()),
        1 => prop::collection::vec(0_usize..6, 0..5),
    ];
    let tensor = (prop::sample::select(dtypes.to_vec()), shape);
    prop::collection::vec(tensor, NAMES.len()).prop_map(|tensors| {
        let (mut header, mut end) = (BTreeMap::new(), 0);
        for (name, ((dtype, bits), shape)) in NAMES.into_iter().zip(tensors) {
            let start = end;
            end += (shape.iter().product::<usize>() * bits).div_ceil(8);
            header.insert(
                name,
                json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]}),
            );
        }
        let header = serde_json::to_vec(&header).unwrap();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(&header);
        bytes.resize(bytes.len() + end, 0x3c);
        bytes
    })
}

#[test]
fn a_sound_file_is_read() {
    let dir = single(&sound());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert!(checkpoint.matrix("matrix", 3, 5, BLOCKS).is_ok());
    assert!(checkpoint.matrix("codes", 4, 130, BLOCKS).is_ok());
    assert_eq!(checkpoint.vector("vector", 7).unwrap(), [0.0; 7]);
    assert!(checkpoint.fused("fused", [2, 3, 4], 1, 0..3).is_ok());
    read_all(dir.path()).unwrap();
}

proptest! {
    #[test]
    fn any_bytes_are_told_apart_from_a_checkpoint(
        bytes in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        let dir = single(&bytes);
        let error = Checkpoint::open(dir.path()).map(drop).unwrap_err();
        prop_assert!(names_something(&error, dir.path()), "{error}");
    }

    #[test]
    fn any_length_of_the_header_is_survived(length in number(), keep in 0_usize..2000) {
        let mut bytes = sound();
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        bytes.truncate(keep.max(8));
        read_all(single(&bytes).path())?;
    }

    #[test]
    fn any_cut_is_an_error(at in any::<prop::sample::Index>()) {
        let bytes = sound();
        let dir = single(&bytes[..at.index(bytes.len())]);
        prop_assert!(Checkpoint::open(dir.path()).is_err());
    }

    #[test]
    fn any_change_of_the_header_is_survived(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut bytes = sound();
        let end = header_end(&bytes);
        for (at, byte) in changes {
            bytes[at.index(end)] = byte;
        }
        read_all(single(&bytes).path())?;
    }

    #[test]
    fn any_claim_of_the_header_is_survived(
        entries in prop::collection::vec(entry(), NAMES.len()),
        data in 0_usize..700,
    ) {
        let header: BTreeMap<&str, Value> = NAMES.into_iter().zip(entries).collect();
        let header = serde_json::to_vec(&header).unwrap();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(&header);
        bytes.resize(bytes.len() + data, 0);
        read_all(single(&bytes).path())?;
    }

    #[test]
    fn any_tensor_is_read_or_refused(bytes in other_tensors()) {
        read_all(single(&bytes).path())?;
    }

    #[test]
    fn any_index_stays_in_its_directory(
        files in prop::collection::vec(
            prop_oneof![
                Just("part.safetensors".to_owned()),
                Just("absent.safetensors".to_owned()),
                Just("model.safetensors.index.json".to_owned()),
                Just("../outside.safetensors".to_owned()),
                Just("/dev/zero".to_owned()),
                Just("..".to_owned()),
                Just(".".to_owned()),
                Just(String::new()),
                "\\PC{0,12}",
            ],
            NAMES.len(),
        ),
    ) {
        let outer = tempfile::tempdir().unwrap();
        fs::write(outer.path().join("outside.safetensors"), sound()).unwrap();
        let dir = outer.path().join("checkpoint");
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("part.safetensors"), sound()).unwrap();
        let map: BTreeMap<&str, &String> = NAMES.into_iter().zip(&files).collect();
        let index = json!({"weight_map": map}).to_string();
        fs::write(dir.join("model.safetensors.index.json"), index).unwrap();
        read_all(&dir)?;
        if let Ok(checkpoint) = Checkpoint::open(&dir) {
            let inside = files[0] == "part.safetensors";
            prop_assert_eq!(checkpoint.matrix("matrix", 3, 5, BLOCKS).is_ok(), inside, "{:?}", files);
        }
    }
}

/// Loads both halves of the tiny model from this directory.
fn load(dir: &Path, config: &ModelConfig) -> Result<(), String> {
    let partition = Partition::from_counts(&[4, 6], config.num_layers).unwrap();
    let options = ContractOptions {
        hidden_dtype: HiddenDtype::F32,
        index_dtype: IndexDtype::I32,
        row_capacity: 8,
        block_size: 4,
    };
    for contract in Contract::new(config, &partition, &options).unwrap().stages {
        let checkpoint = Checkpoint::open(dir).map_err(|e| e.to_string())?;
        let backend = CpuBackend::new(CpuOptions { threads: Some(1) }).unwrap();
        Slice::load(backend, config, &checkpoint, contract, 4, &mut |_| {})
            .map_err(|e| e.to_string())?;
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn a_model_with_a_damaged_header_is_refused_or_loaded(
        changes in prop::collection::vec((any::<prop::sample::Index>(), b' '..b'~'), 1..3),
    ) {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/models/share-4-3");
        let config = ModelConfig::load(&source).unwrap();
        let mut bytes = fs::read(source.join("model.safetensors")).unwrap();
        let end = header_end(&bytes);
        for (at, byte) in changes {
            bytes[8 + at.index(end - 8)] = byte;
        }
        let dir = single(&bytes);
        if let Err(message) = load(dir.path(), &config) {
            prop_assert!(!message.is_empty());
        }
    }
}

#[test]
fn a_directory_in_place_of_a_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path: PathBuf = dir.path().join("model.safetensors");
    fs::create_dir(&path).unwrap();
    let error = Checkpoint::open(dir.path()).map(drop).unwrap_err().to_string();
    assert!(error.contains(&path.display().to_string()), "{error}");
}
