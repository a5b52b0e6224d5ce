use std::collections::HashSet;

use super::*;
use crate::config::Fp8Block;
use crate::config::WeightDtype;
use crate::test_models::{BLOCK, deepseek_v32, glm_5_1, glm_5_3, tiny};

const BF16: Storage = Storage { dtype: WeightDtype::Bf16, fp8: None };
const FP8: Storage = Storage { dtype: WeightDtype::Bf16, fp8: Some(BLOCK) };

/// Every tensor that the checkpoint holds, MTP and scales included.
fn checkpoint(config: &ModelConfig, storage: Storage) -> (usize, u64) {
    let mut tensors = slice_tensors(config, 0..config.num_layers);
    tensors.extend(mtp_tensors(config));
    let scales = tensors.iter().filter(|tensor| tensor.scales(storage).is_some()).count();
    (tensors.len() + scales, total_bytes(&tensors, storage))
}

#[test]
fn published_checkpoints_have_these_counts_and_sizes() {
    assert_eq!(checkpoint(&glm_5_3(), BF16), (59_585, 1_506_659_919_872));
    assert_eq!(checkpoint(&glm_5_3(), FP8), (118_629, 755_617_140_416));
    assert_eq!(checkpoint(&glm_5_1(), BF16), (59_870, 1_507_728_316_928));
    assert_eq!(checkpoint(&glm_5_1(), FP8), (119_028, 756_162_687_872));
}

#[test]
fn served_weights_leave_out_the_mtp_layer() {
    let config = glm_5_3();
    let served = total_bytes(&slice_tensors(&config, 0..78), FP8);
    assert_eq!(served, 745_584_507_456);
    assert_eq!(total_bytes(&mtp_tensors(&config), FP8), 10_032_632_960);
    assert_eq!(mtp_tensors(&config).len(), 791);
}

#[test]
fn units_of_a_stage_have_these_sizes() {
    let config = glm_5_3();
    for (layer, count, bf16, fp8) in [
        (0, 17, 801_797_632, 401_208_448),
        (3, 782, 19_736_066_048, 9_872_030_144),
        (6, 787, 19_754_809_856, 9_881_601_152),
    ] {
        let tensors = layer_tensors(&config, layer);
        assert_eq!(tensors.len(), count, "layer {layer}");
        assert_eq!(total_bytes(&tensors, BF16), bf16, "layer {layer}");
        assert_eq!(total_bytes(&tensors, FP8), fp8, "layer {layer}");
    }
    assert_eq!(total_bytes(&first_stage_tensors(&config), FP8), 1_903_165_440);
    assert_eq!(total_bytes(&last_stage_tensors(&config), FP8), 1_903_165_440 + 2 * 6144);
}

#[test]
fn values_take_the_bytes_of_their_type() {
    let tensors = slice_tensors(&tiny("FFS"), 0..3);
    let values: u64 = tensors.iter().map(TensorSpec::elements).sum();
    let single: u64 = tensors
        .iter()
        .filter(|tensor| tensor.precision == Precision::Single)
        .map(TensorSpec::elements)
        .sum();
    for (dtype, bytes) in [
        (WeightDtype::F32, 4 * values),
        (WeightDtype::Bf16, 2 * values + 2 * single),
        (WeightDtype::F16, 2 * values + 2 * single),
    ] {
        assert_eq!(total_bytes(&tensors, Storage { dtype, fp8: None }), bytes, "{dtype:?}");
    }
}

#[test]
fn scale_grids_round_up_and_only_linear_weights_have_them() {
    let tensors = layer_tensors(&glm_5_3(), 6);
    let grid = |module: &str| {
        let name = format!("model.layers.6.{module}.weight");
        let tensor = tensors.iter().find(|tensor| tensor.name == name).expect("a tensor");
        let scales = tensor.scales(FP8)?;
        assert_eq!(scales.name, format!("{name}_scale_inv"));
        assert_eq!(scales.precision, Precision::Single);
        Some(scales.shape())
    };
    for (module, shape) in [
        ("self_attn.q_a_proj", [16, 48]),
        ("self_attn.q_b_proj", [128, 16]),
        ("self_attn.kv_a_proj_with_mqa", [5, 48]),
        ("self_attn.kv_b_proj", [224, 4]),
        ("self_attn.o_proj", [48, 128]),
        ("self_attn.indexer.wq_b", [32, 16]),
        ("self_attn.indexer.wk", [1, 48]),
        ("mlp.experts.255.gate_proj", [16, 48]),
        ("mlp.shared_experts.down_proj", [48, 16]),
    ] {
        assert_eq!(grid(module), Some(shape.to_vec()), "{module}");
    }
    for module in [
        "input_layernorm",
        "self_attn.kv_a_layernorm",
        "self_attn.indexer.weights_proj",
        "self_attn.indexer.k_norm",
        "mlp.gate",
    ] {
        assert_eq!(grid(module), None, "{module}");
    }
    assert!(tensors.iter().all(|tensor| tensor.scales(BF16).is_none()));
}

#[test]
fn blocks_need_not_be_square() {
    let tensor = TensorSpec {
        name: "x.weight".into(),
        rows: 65,
        cols: Some(33),
        precision: Precision::Quantisable,
    };
    let block = Fp8Block { rows: 64, cols: 32 };
    let storage = Storage { dtype: WeightDtype::Bf16, fp8: Some(block) };
    assert_eq!(tensor.scales(storage).map(|scales| scales.shape()), Some(vec![2, 2]));
    assert_eq!(tensor.bytes(storage), 65 * 33 + 4 * 4);
}

#[test]
fn shapes_follow_the_dimensions_of_the_model() {
    let tensors = slice_tensors(&deepseek_v32(), 0..61);
    let shape =
        |name: &str| tensors.iter().find(|tensor| tensor.name == name).map(TensorSpec::shape);
    for (name, expected) in [
        ("model.layers.60.self_attn.q_b_proj.weight", vec![24_576, 1536]),
        ("model.layers.60.self_attn.kv_b_proj.weight", vec![32_768, 512]),
        ("model.layers.60.self_attn.o_proj.weight", vec![7168, 16_384]),
        ("model.layers.60.self_attn.indexer.wq_b.weight", vec![8192, 1536]),
        ("model.layers.60.self_attn.indexer.weights_proj.weight", vec![64, 7168]),
        ("model.layers.60.self_attn.indexer.k_norm.bias", vec![128]),
        ("model.layers.60.mlp.gate.e_score_correction_bias", vec![256]),
        ("model.layers.0.mlp.down_proj.weight", vec![7168, 18_432]),
        ("model.embed_tokens.weight", vec![129_280, 7168]),
        ("model.norm.weight", vec![7168]),
    ] {
        assert_eq!(shape(name), Some(expected), "{name}");
    }
}

#[test]
fn shared_experts_are_one_mlp_of_their_joint_width() {
    let gate = |shared: usize| {
        let config = ModelConfig { num_shared_experts: shared, ..tiny("FF") };
        let tensors = layer_tensors(&config, 1);
        tensors.iter().find(|t| t.name.ends_with("shared_experts.gate_proj.weight")).map(|t| t.rows)
    };
    assert_eq!(gate(3), Some(60));
    assert_eq!(gate(0), None);
}

#[test]
fn slices_hold_every_tensor_once() {
    let config = tiny("FFFSSSFSSS");
    let whole = slice_tensors(&config, 0..10);
    let names: HashSet<String> = whole.iter().map(|tensor| tensor.name.clone()).collect();
    assert_eq!(names.len(), whole.len(), "a name occurs twice");
    for cut in 1..10 {
        let mut cut_up = slice_tensors(&config, 0..cut);
        cut_up.extend(slice_tensors(&config, cut..10));
        assert_eq!(cut_up, whole, "cut at {cut}");
    }
    assert!(names.contains("model.layers.6.self_attn.indexer.wk.weight"));
    assert!(!names.contains("model.layers.7.self_attn.indexer.wk.weight"));
}
