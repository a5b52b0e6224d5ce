"""Trains the demo model on one GPU, in pieces. See README.md.

    python train.py --minutes 8 --out A              the first piece
    python train.py --minutes 8 --out B --resume A   the next one, until --total-minutes are over
"""

import argparse
import contextlib
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import evaluate
import vocabulary
from data import IGNORED, Data
from net import CONFIG, Moe, Net, tensors

DENSE_UNTIL = 0.45
WARM_UP = 0.01
RATE, LAST_RATE = 2e-3, 2e-5
DECAY = 0.1
SEED = 1
PARTS = 2


def rate(progress):
    """Learning rate: a short rise, then a cosine."""
    if progress < WARM_UP:
        return RATE * max(progress / WARM_UP, 0.01)
    angle = math.pi * min((progress - WARM_UP) / (1 - WARM_UP), 1)
    return LAST_RATE + (RATE - LAST_RATE) * 0.5 * (1 + math.cos(angle))


def save_state(net, optimiser, state, out):
    """Master weights and moments, in files that stay below 16 MiB."""
    found = {f"w.{n}": t.detach().cpu().contiguous() for n, t in net.state_dict().items()}
    for name, weight in net.named_parameters():
        moments = optimiser.state[weight]
        found[f"m.{name}"] = moments["exp_avg"].to(torch.bfloat16).cpu()
        found[f"v.{name}"] = moments["exp_avg_sq"].to(torch.bfloat16).cpu()
    groups, sizes = [{} for _ in range(2 * PARTS)], [0] * (2 * PARTS)
    for name in sorted(found, key=lambda n: -found[n].nbytes):
        at = sizes.index(min(sizes))
        groups[at][name] = found[name]
        sizes[at] += found[name].nbytes
    for at, group in enumerate(groups):
        save_file(group, out / f"state-{at}.safetensors")
    (out / "state.json").write_text(json.dumps(state) + "\n")


def load_state(net, optimiser, folder):
    """The inverse of `save_state`."""
    found = {}
    for file in sorted(folder.glob("state-*.safetensors")):
        found |= load_file(file)
    net.load_state_dict({n.removeprefix("w."): t for n, t in found.items() if n.startswith("w.")})
    for name, weight in net.named_parameters():
        optimiser.state[weight] = {
            "step": torch.tensor(1000.0, device=weight.device),
            "exp_avg": found[f"m.{name}"].to(weight),
            "exp_avg_sq": found[f"v.{name}"].to(weight),
        }
    return json.loads((folder / "state.json").read_text())


def export(net, tokenizer, words, out):
    """A checkpoint directory, weights in bf16."""
    out.mkdir(parents=True, exist_ok=True)
    eos = vocabulary.save(tokenizer, words, out)
    stored = {
        name: value if name.endswith("e_score_correction_bias") else value.to(torch.bfloat16)
        for name, value in tensors(net).items()
    }
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    config = CONFIG | {"eos_token_id": eos, "pad_token_id": eos[0]}
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the state, the log and the checkpoint")
    parser.add_argument("--resume", type=Path, help="folder of the piece before")
    parser.add_argument("--minutes", type=float, default=8.4, help="length of this piece")
    parser.add_argument("--total-minutes", type=float, default=8.4, help="length of the whole training")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--trials", type=int, default=100, help="copy tasks per length in the evaluation")
    parser.add_argument("--steps", type=int, help="stop after so many steps, whatever the time")
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    arguments.out.mkdir(parents=True, exist_ok=True)
    log = (arguments.out / "log.txt").open("a")

    def say(line):
        print(line, flush=True)
        print(line, file=log, flush=True)

    paragraphs, held_out = vocabulary.corpus()
    tokenizer = vocabulary.train(paragraphs)
    words = vocabulary.words(tokenizer, paragraphs)
    data = Data(tokenizer, words, paragraphs, arguments.rows, arguments.length, SEED)
    net = Net().to(device)
    decayed = [w for w in net.parameters() if w.dim() == 2]
    others = [w for w in net.parameters() if w.dim() != 2]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=device.type == "cuda")
    state = {"step": 0, "seconds": 0.0}
    if arguments.resume:
        state = load_state(net, optimiser, arguments.resume)
    say(f"{sum(w.numel() for w in net.parameters()):,} parameters, {len(data.text):,} tokens of text, {state}")

    split = data.text_rows
    cast = torch.autocast(device.type, dtype=torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()

    def losses(ids, targets, sparse):
        with cast:
            hidden, kl = net(ids, sparse)
            logits = net.lm_head(hidden).float()
        each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
        each = each.view(targets.shape)
        counted = targets != IGNORED
        text = each[:split].sum() / counted[:split].sum()
        copy = each[split:].sum() / counted[split:].sum().clamp(min=1)
        return text, copy, kl

    run = losses if arguments.no_compile or device.type != "cuda" else torch.compile(losses)
    loader = iter(torch.utils.data.DataLoader(
        data, batch_size=None, sampler=range(state["step"], 1 << 24), num_workers=arguments.workers,
        pin_memory=device.type == "cuda", prefetch_factor=8 if arguments.workers else None,
    ))
    net.train()
    begun = spoken = time.time()
    seconds, first, sums = state["seconds"], state["step"], torch.zeros(3, device=device)
    counted = 0
    while True:
        elapsed = time.time() - begun
        progress = (seconds + elapsed) / (60 * arguments.total_minutes)
        if elapsed > 60 * arguments.minutes or progress >= 1:
            break
        if arguments.steps is not None and state["step"] - first >= arguments.steps:
            break
        ids, targets = (t.to(device, non_blocking=True).long() for t in next(loader))
        for group in optimiser.param_groups:
            group["lr"] = rate(progress)
        text, copy, kl = run(ids[:, :-1], targets[:, 1:], progress >= DENSE_UNTIL)
        optimiser.zero_grad(set_to_none=True)
        (text + copy + kl).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        for module in net.modules():
            if isinstance(module, Moe):
                module.balance(1e-3 if progress < 0.9 else 0.0)
        state["step"] += 1
        sums += torch.stack([text, copy, kl]).detach()
        counted += 1
        if time.time() - spoken > 10 or state["step"] == first + 1:
            means = (sums / counted).tolist()
            speed = counted * arguments.rows * arguments.length / (time.time() - spoken)
            say(
                f"step {state['step']} {100 * progress:.1f}% text {means[0]:.3f} copy {means[1]:.4f} "
                f"kl {means[2]:.3f} {speed:,.0f} tokens/s"
            )
            spoken, counted = time.time(), 0
            sums.zero_()
    state["seconds"] = seconds + time.time() - begun
    save_state(net, optimiser, state, arguments.out)
    export(net, tokenizer, words, arguments.out / "demo")
    say(f"saved at step {state['step']}, {state['seconds']:.0f} s")
    for line in evaluate.report(arguments.out / "demo", tokenizer, words, held_out, device, arguments.trials):
        say(line)


if __name__ == "__main__":
    main()
