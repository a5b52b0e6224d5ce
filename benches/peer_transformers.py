"""Measures Hugging Face transformers on the CPU with a checkpoint, as the peer that baton's speed is compared with.

    pip install -r tests/oracle/requirements.txt
    python benches/peer_transformers.py DIR            prints JSON: every setting, and the best of each measure

`cargo bench -p baton-benches --bench cpu -- --peer PYTHON` writes the checkpoint and runs this beside baton.

Prefill is one pass over `--context` tokens into an empty cache. Decode starts `--steps` tokens earlier and ends at `--context`: greedy,
one token per sequence and pass, batch of 1 and of 8. Every figure is the median of `--repeat` runs after one that is not counted.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

ATTENTION = ("eager", "sdpa")
# A third one, batched_mm, was the slowest in every measure.
EXPERTS = ("eager", "grouped_mm")
BATCHES = (1, 8)

@torch.inference_mode()
def prefill(model, tokens):
    """Seconds of one pass over `tokens` `[batch, length]`, the filled cache, and the most likely next tokens."""
    cache = DynamicCache(config=model.config)
    start = time.perf_counter()
    logits = model(input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=1).logits
    chosen = logits.argmax(-1)
    return time.perf_counter() - start, cache, chosen


@torch.inference_mode()
def decode(model, cache, tokens, steps):
    """Seconds of `steps` passes of one token per sequence each."""
    start = time.perf_counter()
    for _ in range(steps):
        tokens = model(input_ids=tokens, cache=cache, use_cache=True).logits.argmax(-1)
    return time.perf_counter() - start


def measure(model, arguments):
    """Tokens per second of every measure, as medians."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.vocab_size
    prompts = torch.randint(0, vocabulary, (max(BATCHES), arguments.context), generator=generator)
    seconds = {"prefill": []} | {f"decode_batch_{batch}": [] for batch in BATCHES}
    for _ in range(arguments.repeat + 1):
        seconds["prefill"].append(prefill(model, prompts[:1])[0])
        for batch in BATCHES:
            before = prompts[:batch, : arguments.context - arguments.steps]
            _, cache, chosen = prefill(model, before)
            seconds[f"decode_batch_{batch}"].append(decode(model, cache, chosen, arguments.steps))
    tokens = {"prefill": arguments.context}
    tokens |= {f"decode_batch_{batch}": batch * arguments.steps for batch in BATCHES}
    return {name: tokens[name] / statistics.median(runs[1:]) for name, runs in seconds.items()}


def best(settings, name):
    """The highest figure of one measure, and the setting that gave it."""
    highest = max(settings, key=lambda setting: setting[name])
    return {"value": highest[name]} | {key: highest[key] for key in ("attention", "experts", "threads")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="a checkpoint")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=64, help="decode steps per run")
    parser.add_argument("--repeat", type=int, default=3, help="runs that count")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, nargs="+", default=[cores])
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    settings = []
    for attention, experts in itertools.product(ATTENTION, EXPERTS):
        model = AutoModelForCausalLM.from_pretrained(
            arguments.directory,
            dtype=torch.float32,
            attn_implementation=attention,
            experts_implementation=experts,
        ).eval()
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            speed = measure(model, arguments)
            settings.append({"attention": attention, "experts": experts, "threads": threads} | speed)
            print(json.dumps(settings[-1]), file=sys.stderr, flush=True)
    measures = [name for name in settings[0] if name.startswith(("prefill", "decode"))]
    report = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cores": cores,
        "context": arguments.context,
        "decode_steps": arguments.steps,
        "unit": "tokens per second",
        "best": {name: best(settings, name) for name in measures},
        "settings": settings,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
