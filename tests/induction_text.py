"""A language whose loss depends on old text: local rules, between which random passages are said again.

A text is a sequence of blocks: prose, where a word depends on the two words before it; a passage of random words; an
earlier passage once more, word by word; a key with a value; a key with the value it was given earlier. The distance to
what is said again is anything up to the length of the text.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

UNKNOWN, BEGIN, KEY, ASK = range(4)
SPECIAL = ("<unk>", "<s>", "key", "ask")
VOCABULARY = 512
WORDS = [*SPECIAL, *(f"w{number}" for number in range(len(SPECIAL), VOCABULARY))]

_PROSE = range(len(SPECIAL), 132)
"""Words of prose. Passages and values are of all words, keys of those behind `_PROSE`."""

_CLASSES = 4
_SUCCESSORS = (0.5, 0.25, 0.15, 0.1)
_BLOCKS = ("prose", "passage", "again", "key", "ask")
FREQUENCIES = (0.24, 0.2, 0.32, 0.12, 0.12)
LOCAL, NEW = 0, -1
"""Distances of tokens that do not repeat old text."""


def _rules() -> dict[tuple[int, int], list[int]]:
    random = Random(20)
    return {
        (word, kind): random.sample(_PROSE, len(_SUCCESSORS)) for word in range(VOCABULARY) for kind in range(_CLASSES)
    }


_RULES = _rules()
"""Successors of a word, by the class of the word before it."""


@dataclass
class Text:
    """A text.

    Attributes:
        tokens: its words, beginning with `BEGIN`.
        distances: for each token that earlier text determines, the tokens since it was said there; `LOCAL` for prose,
            `NEW` for words that nothing determines.
    """

    tokens: list[int] = field(default_factory=lambda: [BEGIN])
    distances: list[int] = field(default_factory=lambda: [NEW])

    def _say(self, words: list[int], *distances: int) -> None:
        """Add words with their distances, of which the last one holds for the rest."""
        self.tokens += words
        self.distances += [*distances, *distances[-1:] * len(words)][: len(words)]


def write(length: int, seed: int, frequencies: Sequence[float] = FREQUENCIES) -> Text:
    """A text of `length` tokens, with blocks of every kind in these proportions."""
    random, text = Random(seed), Text()
    passages: list[tuple[int, int]] = []
    keys: dict[int, int] = {}
    while len(text.tokens) < length:
        block, start = random.choices(_BLOCKS, frequencies)[0], len(text.tokens)
        if block == "prose":
            text._say(_prose(text.tokens, random.randint(8, 40), random), LOCAL)
        elif block == "passage":
            passages.append((start, random.randint(8, 32)))
            text._say(random.choices(range(len(SPECIAL), VOCABULARY), k=passages[-1][1]), NEW)
        elif block == "again" and passages:
            source, size = random.choice(passages)
            text._say(text.tokens[source : source + size], NEW, NEW, start - source)
        elif block == "key":
            key = random.randrange(_PROSE.stop, VOCABULARY)
            keys[key] = start
            text._say([KEY, key, random.randrange(len(SPECIAL), VOCABULARY)], NEW)
        elif block == "ask" and keys:
            key, source = random.choice(list(keys.items()))
            text._say([ASK, key, text.tokens[source + 2]], NEW, NEW, start - source)
    return Text(text.tokens[:length], text.distances[:length])


def _prose(before: list[int], length: int, random: Random) -> list[int]:
    words = [*before[-2:]] if len(before) > 1 else [BEGIN, BEGIN]
    for _ in range(length):
        words.append(random.choices(_RULES[words[-1], words[-2] % _CLASSES], _SUCCESSORS)[0])
    return words[2:]


if __name__ == "__main__":
    print(" ".join(WORDS[token] for token in write(int(sys.argv[1]), seed=1).tokens[1:]))
