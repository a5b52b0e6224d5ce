"""Scores of lm-eval's local-completions client against one stage and against four: they must be equal.

    pip install "lm-eval[api]" transformers
    cargo build --release --bin baton
    python tests/clients/lm_eval/run.py target/release/baton

The tasks are made here from the demo model's words, so nothing is downloaded. Ends with 1 when the scores differ, or when the demo
model copies fewer than 95% of the lists.
"""

import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
DEMO = HERE.parent.parent / "models/demo"
SAMPLES, WORDS = 40, 50
LEAST = 0.95
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def make(folder):
    """Writes both tasks and their data."""
    task = json.loads((DEMO / "copy_task.json").read_text())
    pick = random.Random(0)
    copies, following = [], []
    for _ in range(SAMPLES):
        words = pick.sample(task["words"], WORDS)
        prompt = task["prompt"].replace("{words}", " ".join(words))
        # The answer begins with the space between prompt and text, which lm-eval strips on neither side.
        copies.append({"prompt": prompt, "answer": " " + " ".join(words)})
        at = pick.randrange(5, WORDS)
        others = pick.sample([w for i, w in enumerate(words) if i != at], 3)
        choices = others + [words[at]]
        pick.shuffle(choices)
        shown = prompt + " " + " ".join(words[:at])
        following.append({"prompt": shown, "choices": choices, "answer": choices.index(words[at])})
    for name, rows in (("copy", copies), ("next", following)):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        text = (HERE / f"{name}.yaml").read_text()
        (folder / f"{name}.yaml").write_text(text.replace(f"{name}.jsonl", str(data)))


def scores(binary, folder, options):
    """What lm-eval finds for a pipeline with these options."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    server = subprocess.Popen(
        [binary, "up", "--model", str(DEMO), "--port", "0", *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )
    try:
        url = re.search(r"http://\S+", server.stdout.readline())[0]
        # The API answers at once and takes requests when the stages are there.
        for line in server.stderr:
            if "the pipeline is ready" in line:
                break
        found = lm_eval.simple_evaluate(
            model="local-completions",
            model_args=dict(
                model="demo", base_url=f"{url}/v1/completions", tokenizer=str(DEMO), tokenizer_backend="huggingface",
                num_concurrent=4, max_length=1024, tokenized_requests=False,
            ),
            tasks=["baton_copy", "baton_next"],
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            bootstrap_iters=0,
        )
        copy, following = (found["results"][task] for task in ("baton_copy", "baton_next"))
        return {"exact copies": float(copy["exact_match,none"]), "next word": float(following["acc,none"])}
    finally:
        server.terminate()
        server.wait(20)


def main():
    binary = str(Path(sys.argv[1]).resolve())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder)
        os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
        one = scores(binary, folder, ["--stages", "1"])
        four = scores(binary, folder, ["--split", "3,3,3,3"])
    print(f"1 stage:  {one}\n4 stages: {four}")
    sys.exit(int(one != four or one["exact copies"] < LEAST))


if __name__ == "__main__":
    main()
