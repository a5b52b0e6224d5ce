"""Compares this folder's forward pass with Hugging Face transformers on an exported checkpoint.

    python check.py DIRECTORY
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import evaluate
import vocabulary

LENGTH = 200
TOLERANCE = 1e-3


@torch.no_grad()
def main():
    directory = Path(sys.argv[1])
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    _, held_out = vocabulary.corpus()
    ids = torch.tensor([tokenizer.encode("\n".join(held_out)[: 8 * LENGTH]).ids[:LENGTH]])
    own = evaluate.load(directory, torch.device("cpu"))
    hidden, _ = own(ids, True)
    ours = own.lm_head(hidden).log_softmax(-1)
    peer = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    theirs = peer(input_ids=ids).logits.log_softmax(-1)
    difference = (ours - theirs).abs().max().item()
    print(f"{ids.shape[1]} tokens: log-probabilities differ by at most {difference:.2e}")
    sys.exit(difference > TOLERANCE)


if __name__ == "__main__":
    main()
