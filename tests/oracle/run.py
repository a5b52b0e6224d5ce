"""Runs a model in transformers, takes down what passes through it, and says how close its decisions were."""

from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache


@dataclass
class Pass:
    """One forward pass over `T` new tokens. Shapes are without a batch axis."""

    logits: torch.Tensor = None  # [T, vocabulary]
    hidden: list = field(default_factory=list)  # per layer [T, hidden], the residual stream after it
    rows: list = field(default_factory=list)  # per layer [T, min(index_topk, context)], as chosen


class Margins(TorchFunctionMode):
    """Watches every `topk`: the smallest gap between the last value taken and the first one left."""

    def __init__(self):
        super().__init__()
        self.smallest = float("inf")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.topk, torch.Tensor.topk):
            values, k = args[0], kwargs["k"] if "k" in kwargs else args[1]
            if k < values.shape[-1]:
                best = values.float().sort(dim=-1, descending=True).values
                gaps = best[..., k - 1] - best[..., k]
                # What lies after the query is masked: there a row is chosen whole and its order is free.
                real = best[..., k] > -1e30
                if real.any():
                    self.smallest = min(self.smallest, gaps[real].min().item())
        return func(*args, **kwargs)


@contextmanager
def recording(model, into):
    """Hooks that fill `into`: the layers' outputs and the index rows that each layer used."""
    hooks = []

    def layer_output(module, args, output):
        hidden, rows = output if isinstance(output, tuple) else (output, None)
        into.hidden.append(hidden[0].float())
        if rows is not None:
            into.rows.append(rows[0])

    def indexer_output(module, args, output):
        into.rows.append(output[0])

    for layer in model.model.layers:
        hooks.append(layer.register_forward_hook(layer_output))
        if not hasattr(layer.self_attn, "skip_topk"):
            hooks.append(layer.self_attn.indexer.register_forward_hook(indexer_output))
    try:
        yield into
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def forward(model, tokens, cache=None):
    """One pass over `tokens`, after whatever `cache` holds."""
    with recording(model, Pass()) as seen:
        output = model(input_ids=torch.tensor([tokens]), cache=cache, use_cache=cache is not None)
    seen.logits = output.logits[0].float()
    return seen


def decode(model, tokens, count):
    """Greedy continuation, token by token. Returns the tokens, their logits `[count, vocabulary]` and the passes."""
    cache = DynamicCache(config=model.config)
    passes = [forward(model, tokens, cache)]
    chosen = []
    while True:
        chosen.append(int(passes[-1].logits[-1].argmax()))
        if len(chosen) == count:
            return chosen, torch.stack([p.logits[-1] for p in passes]), passes
        passes.append(forward(model, chosen[-1:], cache))


def index_rows(seen, first, topk):
    """Rows `[layers, T, topk]` in the form that baton has: ascending positions, then -1."""
    layers = []
    for chosen in seen.rows:
        out = torch.full((chosen.shape[0], topk), -1, dtype=torch.int32)
        for t, row in enumerate(chosen):
            valid = row[row <= first + t].sort().values
            out[t, : len(valid)] = valid
        layers.append(out)
    return torch.stack(layers)


def log_softmax(logits):
    """In double precision, rounded once."""
    return logits.double().log_softmax(-1).float()


@contextmanager
def foreign_rows(model, layer):
    """Gives `layer`, a shared one, the first positions of each context instead of the rows before it."""

    def replace(module, args, kwargs):
        rows = kwargs["prev_topk_indices"]
        kwargs["prev_topk_indices"] = torch.arange(rows.shape[-1], dtype=rows.dtype).expand_as(rows)
        return args, kwargs

    hook = model.model.layers[layer].register_forward_pre_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
