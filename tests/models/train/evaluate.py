"""What the exported model does: exact copies and the loss on held-out text, sound and with rows that a cut lost."""

import copy
import random

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from net import CONFIG, Net, tensors

LENGTHS = (10, 25, 50)
# Split 3|3|3|3: the layers whose source lies before their stage.
STALE = (3, 4, 5, 9)


def load(directory, device):
    """The exported checkpoint, in float32."""
    net = Net(copy.deepcopy(CONFIG)).to(device).eval()
    stored = load_file(directory / "model.safetensors")
    own = tensors(net)
    assert own.keys() == stored.keys(), own.keys() ^ stored.keys()
    state = {}
    for name in net.state_dict():
        if name.startswith("lm_head"):
            state[name] = stored[name]
        elif name.endswith(".mlp.gate"):
            state[name] = stored[f"model.{name}.weight"]
        elif name.endswith(".mlp.correction"):
            state[name] = stored[f"model.{name.removesuffix('correction')}gate.e_score_correction_bias"]
        elif name.endswith((".mlp.gate_proj", ".mlp.up_proj", ".mlp.down_proj")):
            prefix, projection = name.rsplit(".", 1)
            parts = [
                stored[f"model.{prefix}.experts.{e}.{projection}.weight"] for e in range(CONFIG["n_routed_experts"])
            ]
            state[name] = torch.cat(parts, 1 if projection == "down_proj" else 0)
        else:
            state[name] = stored[f"model.{name}"]
    net.load_state_dict({name: value.float() for name, value in state.items()})
    return net


@torch.no_grad()
def copies(net, tokenizer, words, count, trials, stale=()):
    """Share of lists of `count` words that greedy decoding repeats exactly."""
    pick = random.Random(count)
    lists = [[pick.choice(words) for _ in range(count)] for _ in range(trials)]
    prompts = [tokenizer.encode(f"Repeat: {' '.join(chosen)}\nCopy:").ids for chosen in lists]
    answers = [tokenizer.encode(f" {' '.join(chosen)}\n").ids for chosen in lists]
    device = next(net.parameters()).device
    width = max(len(p) + len(a) for p, a in zip(prompts, answers))
    # Rows end where they are, so that a causal model reads nothing of what pads them.
    ids = torch.zeros(trials, width, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    at = torch.tensor([len(p) for p in prompts], device=device)
    rows = torch.arange(trials, device=device)
    for _ in range(max(map(len, answers))):
        hidden, _ = net(ids, True, stale)
        chosen = net.lm_head(hidden[rows, at - 1]).argmax(-1)
        ids[rows, at.clamp(max=width - 1)] = chosen
        at = (at + 1).clamp(max=width)
    found = ids.cpu().tolist()
    right = sum(row[len(p) : len(p) + len(a)] == a for row, p, a in zip(found, prompts, answers))
    return right / trials


@torch.no_grad()
def loss(net, tokenizer, paragraphs, rows, stale=()):
    """Mean loss per token over held-out text, 512 tokens at a time."""
    ids = np.concatenate([tokenizer.encode(text + "\n").ids for text in paragraphs])
    rows = min(rows, len(ids) // 513)
    ids = torch.tensor(ids[: rows * 513].reshape(rows, 513), device=next(net.parameters()).device)
    hidden, _ = net(ids[:, :-1], True, stale)
    return F.cross_entropy(net.lm_head(hidden).flatten(0, 1), ids[:, 1:].flatten()).item()


def report(directory, tokenizer, words, held_out, device, trials):
    """Lines that say how good the model is."""
    torch.set_float32_matmul_precision("highest")
    net = load(directory, device)
    for name, stale in (("sound", ()), ("stale rows at 3|3|3|3", STALE)):
        right = [f"{n} words {copies(net, tokenizer, words, n, trials, stale):.0%}" for n in LENGTHS]
        yield f"{name}: exact copies {', '.join(right)}; held-out loss {loss(net, tokenizer, held_out, 32, stale):.3f}"
