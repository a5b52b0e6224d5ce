"""Makes the tiny models in `tests/models` and records what transformers answers with them.

    python tests/oracle/record.py                  writes models and answers anew
    python tests/oracle/record.py --check          records into a temporary place and compares with what is committed
    python tests/oracle/record.py --search NAME    looks for a seed without near-ties

`README.md` beside this file has the form of the answers.
"""

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import checkpoint
import run
import tokenizer
from variants import VARIANTS, VOCABULARY

TESTS = Path(__file__).resolve().parent.parent
TEMPLATE = TESTS.parent / "services/gateway/tests/fixtures/chat_template.jinja"
GREEDY = 24
# Lengths around index_topk (8) and well above it; the last is text.
PROMPTS = {"short": 5, "equal": 8, "above": 9, "mid": 40, "long": 100}
TEXT = (
    "The index rows of a full layer serve the shared layers that follow it, wherever the model is cut. "
    "A stage that starts on a shared layer is handed the rows of the step that it is in. Nothing older will do."
)
# Recorded in full: every layer's residual stream takes room.
WITH_HIDDEN = "mid"

# Nothing that is decided by comparing may be closer than this, or rounding would decide it.
SELECTION_MARGIN = 3e-5
GREEDY_MARGIN = 1e-3
# What float32 itself may be off by, measured against a run in double precision.
ROUNDING = 2e-5
TOLERANCE = 1e-5


class Unfit(Exception):
    """A seed whose answers would be a matter of rounding."""


def prompts(directory, seed):
    """Token ids by name; the long one is a text, so that it can be asked for as text too."""
    generator = np.random.default_rng([seed, 1])
    made = {name: generator.integers(0, VOCABULARY, n).tolist() for name, n in PROMPTS.items()}
    encoder = tokenizer.Tokenizer.from_file(str(directory / "tokenizer.json"))
    made["long"] = encoder.encode(TEXT).ids[: PROMPTS["long"]]
    assert encoder.encode(encoder.decode(made["long"])).ids == made["long"]
    assert [len(ids) for ids in made.values()] == list(PROMPTS.values())
    return made


def written_config(variant):
    """The config as its file has it."""
    config = {k: v for k, v in variant.config.items() if k not in variant.dropped}
    return config | variant.written | {"dtype": checkpoint.CONFIG_DTYPES[variant.storage]}


def oracle_config(variant):
    """The config as transformers is given it: the same model, in float32 and without quantisation."""
    config = AutoConfig.for_model(**variant.config)
    config.dtype = "float32"
    kinds = getattr(config, "indexer_types", ["full"] * config.num_hidden_layers)
    letters = "".join(kind[0].upper() for kind in kinds)
    assert letters == variant.schedule, f"{variant.name}: {letters}, expected {variant.schedule}"
    return config


def make_model(variant, directory):
    """Writes the directory of a variant and returns its weights as float32, without what no model loads."""
    directory.mkdir(parents=True)
    config = oracle_config(variant)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    needed = checkpoint.shapes(model)
    extra = {}
    if variant.mtp_layer:
        extra |= checkpoint.mtp_shapes(needed, config)
    if variant.stray_indexer_on is not None:
        full = "model.layers.0.self_attn.indexer."
        stray = f"model.layers.{variant.stray_indexer_on}.self_attn.indexer."
        extra |= {stray + n.removeprefix(full): s for n, s in needed.items() if n.startswith(full)}
    weights = checkpoint.random_weights(needed | extra, variant.seed)
    stored, plain = checkpoint.store(weights, variant)
    if variant.fused_experts:
        stored = checkpoint.fuse_experts(stored)
    checkpoint.save(stored, directory, variant.shards)
    tokenizer.write_json(directory / "config.json", written_config(variant))
    tokenizer.save(directory, TEMPLATE.read_text(), variant.config["eos_token_id"])
    return {name: plain[name] for name in needed}


def load_model(variant, directory, plain):
    """The model in transformers, float32 and eager: from the directory itself, or for FP8 from its float32 values."""
    with tempfile.TemporaryDirectory() as place:
        if variant.storage == "FP8":
            shutil.copy(directory / "generation_config.json", place)
            directory = Path(place)
            checkpoint.save(plain, directory, 1)
        model, loading = AutoModelForCausalLM.from_pretrained(
            directory,
            config=oracle_config(variant),
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
    assert not loading["missing_keys"], loading["missing_keys"]
    return model.eval()


def check_sharing(model, variant, seen):
    """Shared layers have no indexer, use the rows of the full layer before them, and refuse to run without."""
    source = None
    for i, kind in enumerate(variant.schedule):
        layer = model.model.layers[i]
        if kind == "F":
            source = i
            assert layer.self_attn.indexer is not None
            continue
        assert layer.self_attn.indexer is None
        assert torch.equal(seen.rows[i], seen.rows[source]), f"{variant.name}: layer {i}"
        try:
            layer(seen.hidden[i - 1][None], attention_mask=None, position_embeddings=(torch.ones(1, 1, 1),) * 2)
        except (ValueError, RuntimeError):
            continue
        raise AssertionError(f"{variant.name}: layer {i} ran without index rows")


def check_rows_matter(model, variant, tokens, logits):
    """Wrong rows at any shared layer must change the answer by far more than the tests allow."""
    smallest = float("inf")
    for i, kind in enumerate(variant.schedule):
        if kind == "S":
            with run.foreign_rows(model, i):
                wrong = run.forward(model, tokens).logits
            gap = (run.log_softmax(wrong) - run.log_softmax(logits)).abs().max().item()
            smallest = min(smallest, gap)
    if smallest < 0.05:
        raise Unfit(f"wrong index rows change log-probabilities by {smallest} only")
    return smallest


def record(variant, model, asked):
    """Answers to all prompts: a JSON value and tensors."""
    entries, tensors = [], {}
    margins = {"selection": float("inf"), "greedy": float("inf"), "rounding": 0.0}
    watch = run.Margins()
    eos = set(np.atleast_1d(variant.config["eos_token_id"]).tolist())
    for name, tokens in asked.items():
        with watch:
            seen = run.forward(model, tokens)
            greedy, step_logits, passes = run.decode(model, tokens, GREEDY)
            whole = run.forward(model, tokens + greedy)
        check_sharing(model, variant, seen)
        if set(greedy) & eos:
            raise Unfit("a greedy token ends the text")
        best = step_logits.topk(2).values
        margins["greedy"] = min(margins["greedy"], (best[:, 0] - best[:, 1]).min().item())
        check_decode(variant, tokens, whole, step_logits, passes)
        scores = run.log_softmax(seen.logits)
        step_scores = run.log_softmax(step_logits)
        entries.append({
            "name": name,
            "tokens": tokens,
            "logprobs": [None] + [scores[t, tokens[t + 1]].item() for t in range(len(tokens) - 1)],
            "greedy": greedy,
            "greedy_logprobs": [step_scores[t, g].item() for t, g in enumerate(greedy)],
        })
        tensors[f"{name}.index"] = run.index_rows(seen, 0, model.config.index_topk)
        if name == WITH_HIDDEN:
            embedded = model.model.embed_tokens(torch.tensor(tokens)).detach()
            tensors[f"{name}.hidden"] = torch.stack([embedded, *seen.hidden])
            tensors[f"{name}.logits"] = seen.logits
        else:
            tensors[f"{name}.last_logits"] = seen.logits[-1]
    margins["selection"] = watch.smallest
    fit = margins["selection"] >= SELECTION_MARGIN and margins["greedy"] >= GREEDY_MARGIN
    if not fit:
        raise Unfit(f"near-ties: {margins}")
    last = asked["long"]
    single = run.forward(model, last).logits
    if "S" in variant.schedule:
        margins["foreign_rows"] = check_rows_matter(model, variant, last, single)
    double = run.forward(model.double(), last).logits
    model.float()
    margins["rounding"] = (double - single).abs().max().item()
    if margins["rounding"] > ROUNDING:
        raise Unfit(f"float32 is off by {margins['rounding']}")
    answers = {
        "model": variant.name,
        "purpose": variant.purpose,
        "made_with": {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__},
        "seed": variant.seed,
        "schedule": variant.schedule,
        "margins": margins,
        "prompts": entries,
    }
    return answers, tensors


def check_decode(variant, tokens, whole, step_logits, passes):
    """Token by token and all at once must agree, in logits and in the rows of every layer."""
    first = len(tokens)
    at_once = whole.logits[first - 1 : -1]
    off = (at_once - step_logits).abs().max().item()
    if off > ROUNDING:
        raise Unfit(f"decoding token by token is off by {off}")
    topk = whole.rows[0].shape[-1]
    rows = run.index_rows(whole, 0, topk)
    for step, seen in enumerate(passes[1:]):
        position = first + step
        single = run.index_rows(seen, position, topk)
        assert torch.equal(single[:, 0], rows[:, position]), f"{variant.name}: rows at {position}"


def produce(variant, models, answers):
    """Directory and answers of one variant."""
    plain = make_model(variant, models / variant.name)
    if variant.answers_of:
        return check_same_weights(variant, models, plain)
    model = load_model(variant, models / variant.name, plain)
    value, tensors = record(variant, model, prompts(models / variant.name, variant.seed))
    answers.mkdir(parents=True, exist_ok=True)
    tokenizer.write_json(answers / f"{variant.name}.json", value)
    save_file({n: t.contiguous() for n, t in tensors.items()}, answers / f"{variant.name}.safetensors")
    print(f"{variant.name}: seed {variant.seed}, {value['margins']}", flush=True)


def check_same_weights(variant, models, plain):
    """A variant that borrows answers must answer the same."""
    other = next(v for v in VARIANTS if v.name == variant.answers_of)
    first = load_model(other, models / other.name, plain)
    second = load_model(variant, models / variant.name, plain)
    tokens = list(range(40))
    assert torch.equal(run.forward(first, tokens).logits, run.forward(second, tokens).logits)
    print(f"{variant.name}: answers of {other.name}", flush=True)


def search(name):
    """Tries seeds one after the other."""
    for seed in range(1, 500):
        variant = dataclasses.replace(next(v for v in VARIANTS if v.name == name), seed=seed)
        with tempfile.TemporaryDirectory() as place:
            try:
                produce(variant, Path(place) / "models", Path(place) / "answers")
                return
            except Unfit as reason:
                print(f"seed {seed}: {reason}", flush=True)


def differences(fresh, committed):
    """What differs between two trees, each with `models` and `answers`."""
    for path in sorted(p for root in (fresh, committed) for p in root.rglob("*") if p.is_file()):
        root = fresh if path.is_relative_to(fresh) else committed
        relative = path.relative_to(root)
        one, two = fresh / relative, committed / relative
        if not (one.exists() and two.exists()):
            yield f"{relative}: only in one of the two"
        elif root is committed:
            continue
        elif path.suffix == ".safetensors":
            yield from tensor_differences(relative, load_file(one), load_file(two))
        elif path.suffix == ".json":
            values = (json.loads(p.read_text()) for p in (one, two))
            yield from json_differences(str(relative), *values)
        elif one.read_bytes() != two.read_bytes():
            yield f"{relative}: the bytes differ"


def tensor_differences(path, one, two):
    """Tensors that are missing, of another form, or too far apart."""
    for name in sorted(one.keys() | two.keys()):
        a, b = one.get(name), two.get(name)
        if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
            yield f"{path}: {name} is missing or of another form"
        elif (a.double() - b.double()).abs().max().item() > TOLERANCE:
            yield f"{path}: {name} is off by {(a.double() - b.double()).abs().max().item()}"


def json_differences(path, one, two):
    """Values that differ; numbers with a fraction may do so a little, and measured margins are free."""
    if path.endswith(("margins", "made_with")):
        return
    if isinstance(one, float) and isinstance(two, float):
        if abs(one - two) > TOLERANCE:
            yield f"{path}: {one} and {two}"
    elif isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
        for key in one:
            yield from json_differences(f"{path} {key}", one[key], two[key])
    elif isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        for i, (a, b) in enumerate(zip(one, two)):
            yield from json_differences(f"{path} {i}", a, b)
    elif one != two:
        yield f"{path}: {one!r} and {two!r}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with what is committed")
    parser.add_argument("--search", metavar="NAME", help="look for a seed for this variant")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if arguments.search:
        return search(arguments.search)
    with tempfile.TemporaryDirectory() as place:
        fresh = Path(place)
        for variant in VARIANTS:
            produce(variant, fresh / "models", fresh / "oracle/answers")
        if arguments.check:
            return compare(fresh)
        replace(fresh)


def compare(fresh):
    """Fails when what is committed cannot be recorded again."""
    found = [
        difference
        for part in ("models", "oracle/answers")
        for difference in differences(fresh / part, TESTS / part)
    ]
    print("\n".join(found) or "models and answers are as committed")
    return 1 if found else 0


def replace(fresh):
    """Puts what was made in its place."""
    for part in ("models", "oracle/answers"):
        for old in sorted((TESTS / part).rglob("*"), reverse=True):
            old.rmdir() if old.is_dir() else old.unlink()
        for new in sorted((fresh / part).rglob("*")):
            target = TESTS / part / new.relative_to(fresh / part)
            if new.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(new, target)


if __name__ == "__main__":
    sys.exit(main())
