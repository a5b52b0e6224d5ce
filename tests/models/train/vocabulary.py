"""The demo model's tokenizer: byte-level BPE trained on the corpus, with GLM's special tokens at the end."""

import json
import lzma
import re
import sys
from collections import Counter
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "oracle"))
from tokenizer import KEPT, SPECIAL  # noqa: E402

SIZE = 1024
EOS = ("<|endoftext|>", "<|user|>", "<|observation|>")
# The task that shows a wrong index row: the answer is far back in the prompt, and nothing but attention finds it.
COPY = {"prompt": "Repeat: {words}\nCopy:", "answer": " {words}\n"}
WORDS = 400
# One paragraph of this many is never trained on.
HELD_OUT = 50


def corpus():
    """Paragraphs to train on, and paragraphs held out."""
    text = lzma.decompress((HERE / "corpus/text.xz").read_bytes()).decode()
    lines = [line for line in text.split("\n") if line]
    held_out = lines[::HELD_OUT]
    return [line for at, line in enumerate(lines) if at % HELD_OUT], held_out


def train(paragraphs):
    """A tokenizer of `SIZE` entries."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - len(SPECIAL) - len(KEPT),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(paragraphs, trainer)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in KEPT])
    assert tokenizer.get_vocab_size() == SIZE, tokenizer.get_vocab_size()
    return tokenizer


def words(tokenizer, paragraphs):
    """The most frequent words of at least three letters that are one or two tokens long after a space."""
    found = Counter(word for line in paragraphs for word in re.findall(r"(?<= )[a-z]{3,9}(?= )", line))
    short = (w for w, _ in found.most_common() if len(tokenizer.encode(" " + w).ids) <= 2)
    return sorted(w for w, _ in zip(short, range(WORDS)))


def save(tokenizer, chosen, directory):
    """Tokenizer, chat template, generation defaults and the copy task's words."""
    def write(name, value):
        (directory / name).write_text(json.dumps(value, indent=1) + "\n")

    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    template = (HERE.parent / "share-4-3/chat_template.jinja").read_text()
    (directory / "chat_template.jinja").write_text(template)
    eos = [tokenizer.token_to_id(token) for token in EOS]
    write("tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS[0],
        "pad_token": EOS[0],
        "padding_side": "left",
        "model_max_length": 1024,
    })
    write("generation_config.json", {
        "do_sample": True,
        "eos_token_id": eos,
        "pad_token_id": eos[0],
        "temperature": 0.7,
        "top_p": 0.9,
    })
    write("copy_task.json", COPY | {"words": chosen})
    return eos
