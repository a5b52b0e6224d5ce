"""Batches: text and copy tasks. What a batch holds follows from the seed and the step alone."""

import numpy as np
import torch

import vocabulary

SHORTEST, LONGEST = 3, 50
IGNORED = -100
# Share of the rows that are text: more would be learned by heart before the copies are exact.
TEXT = 1 / 8
# Share of the copy tasks that are put as a chat, and of the text rows.
CHAT = 0.2
CHAT_TEXT = 0.1


class Data(torch.utils.data.Dataset):
    """Item `step` is the batch of that step: token ids and targets `[rows, length + 1]`, text rows first."""

    def __init__(self, tokenizer, words, paragraphs, rows, length, seed):
        self.rows, self.length, self.seed = rows, length, seed
        self.text_rows = max(1, int(rows * TEXT))
        token = tokenizer.token_to_id
        self.end = token("<|endoftext|>")
        encode = lambda text: np.array(tokenizer.encode(text).ids, dtype=np.int64)  # noqa: E731
        self.words = [encode(" " + word) for word in words]
        self.repeat, self.copy = (encode(part) for part in ("Repeat:", "\nCopy:"))
        self.newline = encode("\n")
        self.ask = encode("[gMASK]<sop><|user|>Repeat:")
        self.reply, self.closed = encode("<|assistant|><think>"), encode("</think>")
        self.user = encode("<|user|>")
        self.chat = encode("[gMASK]<sop><|user|>")
        self.paragraphs = [encode(text) for text in paragraphs]
        ends = [np.concatenate([ids, self.newline]) for ids in self.paragraphs]
        self.text = np.concatenate(ends)

    def __len__(self):
        return 1 << 30

    def __getitem__(self, step):
        random = np.random.default_rng([self.seed, step])
        ids = np.empty((self.rows, self.length + 1), dtype=np.int64)
        targets = np.full((self.rows, self.length + 1), IGNORED, dtype=np.int64)
        for row in range(self.rows):
            if row < self.text_rows:
                self.text_row(random, ids[row], targets[row])
            else:
                self.copy_row(random, ids[row], targets[row])
        return torch.from_numpy(ids.astype(np.int32)), torch.from_numpy(targets.astype(np.int32))

    def text_row(self, random, ids, targets):
        """A stretch of the corpus; or a paragraph's first words as a question and the rest as the answer."""
        if random.random() < CHAT_TEXT:
            at = 0
            while at < len(ids):
                paragraph = self.paragraphs[random.integers(len(self.paragraphs))]
                cut = int(random.integers(2, max(3, min(16, len(paragraph) - 1))))
                parts = [self.chat, paragraph[:cut], self.reply, self.closed, paragraph[cut:], self.user]
                at = put(parts, [0, 0, 0, 1, 1, 1], ids, targets, at)
            return
        start = random.integers(len(self.text) - len(ids))
        ids[:] = self.text[start : start + len(ids)]
        targets[:] = ids

    def copy_row(self, random, ids, targets):
        """Copy tasks one after the other, at times behind a stretch of text."""
        at = 0
        if random.random() < 0.4:
            take = int(random.integers(1, len(ids) // 2))
            start = random.integers(len(self.text) - take)
            ids[:take] = self.text[start : start + take]
            at = take
        while at < len(ids):
            # Long lists are the hard ones.
            count = int(random.integers(SHORTEST, LONGEST + 1))
            if random.random() < 0.3:
                count = int(random.integers(30, LONGEST + 1))
            chosen = np.concatenate([self.words[w] for w in random.integers(len(self.words), size=count)])
            if random.random() < CHAT:
                parts = [self.ask, chosen, self.reply, self.closed, chosen, self.user]
                scored = [0, 0, 0, 1, 1, 1]
            else:
                parts = [self.repeat, chosen, self.copy, chosen, self.newline, [self.end]]
                scored = [0, 0, 0, 1, 1, 1]
            at = put(parts, scored, ids, targets, at)


def put(parts, scored, ids, targets, at):
    """Writes parts from `at` on as far as there is room; the targets of those that are scored."""
    for part, score in zip(parts, scored):
        room = min(len(part), len(ids) - at)
        ids[at : at + room] = part[:room]
        if score:
            targets[at : at + room] = part[:room]
        at += room
    return at
