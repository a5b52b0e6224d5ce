"""The tiny models: what each is there to test, its config, and how its weights are stored."""

from dataclasses import dataclass, field

# Ids from VOCABULARY on are padding rows, which no token has; GLM's released checkpoints have some too.
VOCABULARY, VOCABULARY_ROWS = 311, 320


@dataclass(frozen=True)
class Variant:
    """One directory of `tests/models`."""

    name: str
    purpose: str
    config: dict
    # Chosen with `record.py --search` so that no decision in the recorded runs is a near-tie.
    seed: int
    # Type that weights are stored in: "F32", "F16", "BF16", or "FP8" for e4m3 blocks beside BF16.
    storage: str = "F32"
    # Layers whose index rows are computed, as letters; what the config must come to.
    schedule: str = ""
    shards: int = 1
    # Experts of a layer stacked in one tensor, gate above up, instead of three tensors per expert.
    fused_experts: bool = False
    # Tensors that a loader must skip: a layer after the last, an indexer on a shared layer.
    mtp_layer: bool = False
    stray_indexer_on: int | None = None
    # Another variant with the same weights, whose answers hold here too.
    answers_of: str | None = None
    # Entries that only the written config has, and entries it drops: the spellings a loader meets.
    written: dict = field(default_factory=dict)
    dropped: tuple = ()


def glm(**overrides):
    """GLM-DSA dimensions that divide nothing evenly but what must divide."""
    config = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "vocab_size": VOCABULARY_ROWS,
        "hidden_size": 48,
        "num_hidden_layers": 10,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "qk_head_dim": 20,
        "head_dim": 12,
        "v_head_dim": 10,
        "intermediate_size": 56,
        "moe_intermediate_size": 10,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "moe_router_dtype": "float32",
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 8,
        "rope_interleave": True,
        "indexer_rope_interleave": True,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "pad_token_id": 290,
        "eos_token_id": [290, 297, 299],
    }
    return config | overrides


def kinds(letters):
    """`indexer_types` from letters."""
    return [{"F": "full", "S": "shared"}[letter] for letter in letters]


def deepseek():
    """DeepSeek-V3.2: grouped routing, yarn with both magnitude factors, an indexer in every layer."""
    config = glm(
        architectures=["DeepseekV32ForCausalLM"],
        model_type="deepseek_v32",
        num_hidden_layers=5,
        q_lora_rank=28,
        qk_rope_head_dim=16,
        qk_head_dim=28,
        head_dim=16,
        index_head_dim=24,
        n_routed_experts=16,
        num_experts_per_tok=3,
        first_k_dense_replace=2,
        n_group=4,
        topk_group=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 8.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.75,
        },
        max_position_embeddings=512,
        moe_intermediate_size=8,
        bos_token_id=294,
        eos_token_id=290,
    )
    # What transformers leaves out when it saves such a config.
    for key in ("rope_interleave", "indexer_rope_interleave", "scoring_func", "topk_method",
                "moe_layer_freq", "moe_router_dtype", "num_nextn_predict_layers"):
        del config[key]
    return config


BF16 = glm(index_topk_freq=4, index_skip_topk_offset=3, first_k_dense_replace=2)
FP8_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    # As in the released files: a module that does not exist, and some that do.
    "modules_to_not_convert": ["lm_head", "model.embed_tokens", "model.layers.0.self_attn.indexers_proj"],
}

VARIANTS = [
    Variant(
        name="share-4-3",
        purpose="the schedule of GLM-5.2 and 5.3, every config form at once; the model to serve in tests",
        config=glm(
            hidden_size=64, moe_intermediate_size=14, n_routed_experts=8, q_lora_rank=32, kv_lora_rank=24,
            qk_nope_head_dim=16, qk_head_dim=24, v_head_dim=16,
            index_topk_freq=4, index_skip_topk_offset=3, indexer_types=kinds("FFFSSSFSSS"),
        ),
        written={
            "index_topk_pattern": None,
            "index_share_for_mtp_iteration": True,
            "head_dim": 16,
            "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 7,
        },
        schedule="FFFSSSFSSS",
        seed=9,
    ),
    Variant(
        name="share-8-2",
        purpose="frequency only, the offset left to its default; runs of seven shared layers; no dense layers but one",
        config=glm(index_topk_freq=8, first_k_dense_replace=1),
        schedule="FFSSSSSSSF",
        seed=9,
    ),
    Variant(
        name="pattern",
        purpose="a pattern string, weights in F16, flat rope_theta, an indexer stored on a shared layer",
        config=glm(index_topk_pattern="FFSSSFSFSS"),
        dropped=("rope_parameters",),
        written={"rope_theta": 10000.0},
        schedule="FFSSSFSFSS",
        storage="F16",
        stray_indexer_on=3,
        seed=11,
    ),
    Variant(
        name="all-full",
        purpose="GLM-5.1: no sharing keys, some of them null; an MTP layer in the file; experts counted by another name",
        config=glm(num_hidden_layers=6, num_nextn_predict_layers=1, n_routed_experts=8),
        dropped=("n_routed_experts",),
        written={"index_topk_freq": None, "num_experts": 8},
        schedule="FFFFFF",
        mtp_layer=True,
        seed=8,
    ),
    Variant(
        name="bf16",
        purpose="weights in BF16 and the router's correction in F32, as released",
        config=BF16,
        schedule="FFFSSSFSSS",
        storage="BF16",
        seed=11,
    ),
    Variant(
        name="bf16-sharded",
        purpose="the weights of bf16 in three shards with an index",
        config=BF16,
        schedule="FFFSSSFSSS",
        storage="BF16",
        shards=3,
        answers_of="bf16",
        seed=11,
    ),
    Variant(
        name="bf16-fused-experts",
        purpose="the weights of bf16 with the experts of a layer stacked",
        config=BF16,
        schedule="FFFSSSFSSS",
        storage="BF16",
        fused_experts=True,
        answers_of="bf16",
        seed=11,
    ),
    Variant(
        name="fp8-block",
        purpose="e4m3 weights in 128x128 blocks: partial last blocks, heads of kv_b that cross blocks",
        config=glm(
            num_hidden_layers=7, hidden_size=144, q_lora_rank=136, kv_lora_rank=40,
            qk_nope_head_dim=24, qk_head_dim=32, head_dim=32, v_head_dim=20,
            intermediate_size=168, moe_intermediate_size=24, n_routed_experts=4, first_k_dense_replace=2,
            index_topk_freq=4, index_skip_topk_offset=3,
        ),
        written={"quantization_config": FP8_BLOCKS},
        schedule="FFFSSSF",
        storage="FP8",
        seed=12,
    ),
    Variant(
        name="deepseek-v32",
        purpose="DeepSeek-V3.2: half-split rotation in the indexer, yarn, expert groups",
        config=deepseek(),
        schedule="FFFFF",
        seed=5,
    ),
]
