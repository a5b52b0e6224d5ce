//! FP8 matrices take their blocks from the config.
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use baton_kernels::MatrixData;
use baton_model::Checkpoint;
use baton_plan::Fp8Block;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

const ROWS: usize = 40;
const COLS: usize = 100;

/// A checkpoint of one FP8 matrix with a scale per block of 32 x 64.
fn checkpoint() -> (tempfile::TempDir, Checkpoint) {
    let codes: Vec<u8> = (0..ROWS * COLS).map(|i| (i % 120) as u8).collect();
    let scales: Vec<u8> = (1..=4).flat_map(|s| (s as f32).to_le_bytes()).collect();
    let tensors = [
        ("m", TensorView::new(Dtype::F8_E4M3, vec![ROWS, COLS], &codes).unwrap()),
        ("m_scale_inv", TensorView::new(Dtype::F32, vec![2, 2], &scales).unwrap()),
    ];
    let dir = tempfile::tempdir().unwrap();
    safetensors::serialize_to_file(tensors, None, &dir.path().join("model.safetensors")).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    (dir, checkpoint)
}

#[test]
fn the_blocks_are_those_of_the_config() {
    let (_dir, checkpoint) = checkpoint();
    let block = Fp8Block { rows: 32, cols: 64 };
    let matrix = checkpoint.matrix("m", ROWS, COLS, Some(block)).unwrap();
    match matrix.data {
        MatrixData::Fp8Block { codes, scales, block_rows, block_cols } => {
            assert_eq!((codes.len(), scales.len()), (ROWS * COLS, 16));
            assert_eq!((block_rows, block_cols), (32, 64));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn scales_of_other_blocks_and_codes_without_blocks_are_refused_by_name() {
    let (_dir, checkpoint) = checkpoint();
    let other = checkpoint.matrix("m", ROWS, COLS, Some(Fp8Block { rows: 128, cols: 128 }));
    assert_eq!(other.unwrap_err().to_string(), "m_scale_inv has shape [2, 2], expected [1, 1]");
    let none = checkpoint.matrix("m", ROWS, COLS, None).unwrap_err().to_string();
    assert_eq!(
        none,
        "m is stored as FP8, but config.json names no quantization_config.weight_block_size"
    );
}
