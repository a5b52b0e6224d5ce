"""Random weights by name, and their files."""

import json
import math
import zlib

import numpy as np
import torch
from safetensors.torch import save_file

FP8_BLOCK = 128
FP8_LARGEST = 448.0
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "FP8": torch.bfloat16}
CONFIG_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "FP8": "bfloat16"}
EXPERTS = ".mlp.experts."
# Large enough that every part of a layer changes the answer, small enough that rounding does not grow with depth.
GAIN = 1.0


def shapes(model):
    """Names and shapes of a checkpoint, one tensor per expert projection, from an instance of the model."""
    found = {}
    for name, tensor in model.state_dict().items():
        layer, fused, projection = name.partition(EXPERTS)
        if not fused:
            found[name] = tuple(tensor.shape)
            continue
        count, rows, cols = tensor.shape
        for expert in range(count):
            prefix = f"{layer}{EXPERTS}{expert}."
            if projection == "gate_up_proj":
                found[prefix + "gate_proj.weight"] = (rows // 2, cols)
                found[prefix + "up_proj.weight"] = (rows // 2, cols)
            else:
                found[prefix + "down_proj.weight"] = (rows, cols)
    return found


def mtp_shapes(found, config):
    """The layer stored after the last: a full MoE layer like any other, and what joins it to the model."""
    last, mtp = (f"model.layers.{config.num_hidden_layers - 1 + i}." for i in range(2))
    hidden = config.hidden_size
    copied = {mtp + n.removeprefix(last): s for n, s in found.items() if n.startswith(last)}
    joints = {n: (hidden,) for n in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
    joints["eh_proj.weight"] = (hidden, 2 * hidden)
    return copied | {mtp + n: s for n, s in joints.items()}


def random_weights(found, seed):
    """Every parameter random, norms and corrections too; each tensor's values follow from its name and the seed."""
    weights = {}
    for name, shape in found.items():
        generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
        values = generator.standard_normal(shape, dtype=np.float32)
        if name.endswith("e_score_correction_bias"):
            # Around 7, as released, where bf16 is too coarse to route with.
            values = 6.9 + 0.15 * values
        elif name.endswith("norm.bias"):
            values = 0.3 * values
        elif len(shape) == 1:
            values = 1.0 + 0.3 * values
        elif name == "model.embed_tokens.weight":
            pass
        else:
            values *= GAIN / math.sqrt(shape[1])
        weights[name] = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    return weights


def is_quantised(name):
    """Whether released FP8 checkpoints keep this tensor in FP8."""
    kept = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "weights_proj", "eh_proj")
    return name.endswith(".weight") and not any(part in name for part in kept)


def quantise(weight, generator):
    """Blocks of e4m3 and their scales, and what they stand for."""
    rows, cols = weight.shape
    grid = (math.ceil(rows / FP8_BLOCK), math.ceil(cols / FP8_BLOCK))
    scales = torch.empty(grid, dtype=torch.float32)
    stored = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for r in range(grid[0]):
        for c in range(grid[1]):
            block = np.s_[r * FP8_BLOCK : (r + 1) * FP8_BLOCK, c * FP8_BLOCK : (c + 1) * FP8_BLOCK]
            # Blocks of unlike size, so that a scale taken from the wrong block shows.
            values = weight[block] * float(2.0 ** generator.uniform(-1.0, 1.0))
            scales[r, c] = values.abs().max() / FP8_LARGEST
            stored[block] = (values / scales[r, c]).to(torch.float8_e4m3fn)
    whole = scales.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :cols]
    return stored, scales, stored.float() * whole


def store(weights, variant):
    """The tensors as the files hold them, and as float32 for who cannot read those."""
    stored, plain = {}, {}
    dtype = DTYPES[variant.storage]
    for name, weight in weights.items():
        if variant.storage == "FP8" and is_quantised(name):
            generator = np.random.default_rng([variant.seed, zlib.crc32(name.encode()), 8])
            stored[name], scales, plain[name] = quantise(weight, generator)
            stored[name.removesuffix("weight") + "weight_scale_inv"] = scales
        else:
            single = name.endswith("e_score_correction_bias")
            stored[name] = weight if single else weight.to(dtype)
            plain[name] = stored[name].float()
    return stored, plain


def fuse_experts(tensors):
    """Stacks the experts of each layer: `gate_up_proj` with the gate's rows first, and `down_proj`."""
    fused, experts = {}, {}
    for name, tensor in tensors.items():
        layer, found, rest = name.partition(EXPERTS)
        if not found:
            fused[name] = tensor
            continue
        expert, projection, _ = rest.split(".")
        experts.setdefault(layer + EXPERTS, {}).setdefault(projection, {})[int(expert)] = tensor
    for prefix, projections in experts.items():
        stack = {p: torch.stack([by_id[e] for e in sorted(by_id)]) for p, by_id in projections.items()}
        fused[prefix + "gate_up_proj"] = torch.cat([stack["gate_proj"], stack["up_proj"]], dim=1)
        fused[prefix + "down_proj"] = stack["down_proj"]
    return fused


def save(tensors, directory, shards):
    """One file, or several of about the same size with an index; a layer may lie across two."""
    names = sorted(tensors, key=by_layer)
    contiguous = {name: tensors[name].contiguous() for name in names}
    if shards == 1:
        save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})
        return
    total = sum(tensor.nbytes for tensor in contiguous.values())
    files, weight_map, seen = [{} for _ in range(shards)], {}, 0
    for name in names:
        index = min(seen * shards // total, shards - 1)
        files[index][name] = contiguous[name]
        weight_map[name] = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        seen += contiguous[name].nbytes
    for index, part in enumerate(files):
        path = directory / f"model-{index + 1:05}-of-{shards:05}.safetensors"
        save_file(part, path, metadata={"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def by_layer(name):
    """Embedding, layers in their order, then the rest."""
    parts = name.split(".")
    if parts[1] == "layers":
        return (1, int(parts[2]), name)
    return (0 if "embed" in name else 2, 0, name)
