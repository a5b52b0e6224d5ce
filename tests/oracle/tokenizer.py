"""A small byte-level tokenizer with GLM's special tokens, for every model alike."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from variants import VOCABULARY

SPECIAL = [
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>",
    "<|assistant|>", "<|observation|>",
]
# Tokens that answers keep: they are added, not special.
KEPT = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink",
]
TEXT = [
    "A pipeline cuts the model into stages, and every stage holds a slice of the layers.",
    "The index rows of a full layer serve the shared layers that follow it.",
    "the then there other and hand end index in on stage layer",
]


def save(directory, template, eos_ids):
    """Writes the tokenizer, its config, the chat template and the generation defaults."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(KEPT),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in KEPT])
    assert tokenizer.get_vocab_size() == VOCABULARY, tokenizer.get_vocab_size()
    assert tokenizer.token_to_id(SPECIAL[0]) == 290, "the ids that configs name"
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    (directory / "chat_template.jinja").write_text(template)
    write_json(directory / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[0],
        "padding_side": "left",
        "model_max_length": 2048,
    })
    write_json(directory / "generation_config.json", {
        "do_sample": True,
        "eos_token_id": eos_ids,
        "pad_token_id": 290,
        "temperature": 1.0,
        "top_p": 0.95,
    })


def write_json(path, value):
    """Writes JSON as all files here have it."""
    path.write_text(json.dumps(value, indent=1) + "\n")
