"""The items of the tasks: contexts of a given length, and questions about them. Pure and deterministic; no torch.

The five tasks are those of RULER (arXiv 2404.06654), with wording, keys and noise of our own. A context holds what all
questions of a conversation need: a needle, a chain or a list for each question; with one question it is RULER's item.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import pi
from random import Random
from string import ascii_lowercase, ascii_uppercase

from h2o_stream.errors import ConfigError, DataError

NUM_DISTRACTORS = 7
"""Wrong answers that the right one is compared with."""

NEEDLES_PER_QUESTION = {"niah_single": 1, "niah_multikey": 4}
"""RULER's multi-key needles: three further keys beside the one asked for."""

SINGLE = "niah_single"
"""The task whose needles can be put at a given depth."""

HOPS = 4
"""Assignments after the first one in a chain of variables."""

COMMON_WORDS = 10
FREQUENT_WORDS = 3
"""Words asked for."""

_NOISE = "The kettle is on. The lamp is lit. The door is shut. Nobody comes. The clock goes on."

_ADJECTIVES = (
    "ancient bitter broken busy clever distant eager famous gentle golden hidden hollow humble narrow "
    "patient purple quiet silver sleepy wooden"
)
_NOUNS = (
    "anchor basket bridge candle castle desert engine feather garden harbor island kitchen lantern mirror "
    "mountain orchard pocket river tunnel window"
)
"""Words of the keys."""

_CODED_LETTERS = 6
_ZIPF = pi**2 / 6 - 1
"""The sum of all 1 / rank^2 from rank 2 on."""

_NAME_LETTERS = 5
_WORD = re.compile(r"\b[a-z]{4,9}\b")


@dataclass(frozen=True)
class Question:
    """A question about a context.

    Attributes:
        text: the question itself.
        prefix: the beginning of the reply, up to the answer.
        answers: the words or numbers asked for.
        distractors: wrong answers of the same form, `NUM_DISTRACTORS`; none that answers an earlier question.
    """

    text: str
    prefix: str
    answers: tuple[str, ...]
    distractors: tuple[tuple[str, ...], ...]

    def score(self, reply: str) -> float:
        """The share of the answers that a reply contains, in any case of letters: RULER's string match."""
        text = reply.casefold()
        return sum(answer.casefold() in text for answer in self.answers) / len(self.answers)


@dataclass(frozen=True)
class Item:
    """A context, which says what it is for, and the questions about it."""

    context: str
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Haystack:
    """What contexts are made of.

    Attributes:
        words: words of a text, in order.
        vocabulary: different words, which lists are drawn from.
    """

    words: tuple[str, ...]
    vocabulary: tuple[str, ...]

    @classmethod
    def of(cls, text: str | None, vocabulary: str) -> Haystack:
        """A haystack.

        Args:
            text: the text around the needles, repeated if it is short; None for noise, a few repeated sentences.
            vocabulary: the text whose words lists are drawn from.

        Raises:
            DataError: a text has no words.
        """
        words, different = (_NOISE if text is None else text).split(), set(_WORD.findall(vocabulary))
        if not (words and different):
            raise DataError("--text has no words of 4 to 9 lowercase letters; give another one")
        return cls(tuple(words), tuple(sorted(different)))


def make_item(
    task: str,
    questions: int,
    length: int,
    haystack: Haystack,
    count: Callable[[str], int],
    seed: int,
    number: int,
    depth: float | None = None,
) -> Item:
    """Item `number` of a task and a seed, the longest whose context has at most `length` tokens as `count` counts them.

    The needle of `SINGLE` is at the depth, 0 to 1; None draws it.

    Raises:
        ConfigError: the length is too short for what the context must hold, or the haystack has too few words.
    """

    def build(size: int) -> Item:
        if depth is not None:
            return _needles(1, questions, size, haystack, Random(f"{task} {seed} {number}"), depth)
        return TASKS[task](questions, size, haystack, Random(f"{task} {seed} {number}"))

    def fits(size: int) -> bool:
        return count(build(size).context) <= length

    if not fits(0):
        needed = count(build(0).context)
        raise ConfigError(f"length is {length}, {task} needs at least {needed} tokens; raise --lengths")
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return build(low)


def _needles(
    per_question: int, questions: int, size: int, haystack: Haystack, draw: Random, depth: float | None = None
) -> Item:
    """Numbers with names, hidden in a text: the keys are adjective and noun, the values have seven digits."""
    pairs = [f"{adjective} {noun}" for adjective in _ADJECTIVES.split() for noun in _NOUNS.split()]
    keys = draw.sample(pairs, per_question * questions)
    values = _distinct(len(keys) + NUM_DISTRACTORS, lambda: str(draw.randrange(10**6, 10**7)))
    needles = [f"The secret number of the {key} is {value}." for key, value in zip(keys, values, strict=False)]
    depths = sorted(draw.random() if depth is None else depth for _ in needles)
    text = _hide(needles, depths, size, haystack, draw)
    asked, other = [], values
    for number in draw.sample(range(len(keys)), questions):
        other = [value for value in other if value != values[number]]
        prefix = f"The secret number of the {keys[number]} is"
        asked.append(
            Question(
                f"What is the secret number of the {keys[number]}? The text above says it.",
                prefix,
                (values[number],),
                tuple((value,) for value in other[:NUM_DISTRACTORS]),
            )
        )
    intro = "There are secret numbers hidden in the following text. Remember them, I will ask for them later."
    return Item(f"{intro}\n\n{text}", tuple(asked))


def _variables(questions: int, size: int, haystack: Haystack, draw: Random) -> Item:
    """Chains of variables, each assigned to the next one, hidden in a text."""
    chains, values = questions + NUM_DISTRACTORS, _distinct(questions, lambda: str(draw.randrange(10_000, 100_000)))
    names = _distinct(chains * (HOPS + 1), partial(_letters, draw, ascii_uppercase, _NAME_LETTERS))
    chained = [tuple(names[start : start + HOPS + 1]) for start in range(0, len(names), HOPS + 1)]
    needles = []
    for value, variables in zip(values, chained, strict=False):
        sources = (value, *(f"VAR {variable}" for variable in variables))
        statements = (f"VAR {name} = {source}." for name, source in zip(variables, sources, strict=False))
        needles += list(zip(sorted(draw.random() for _ in variables), statements, strict=True))
    needles.sort()
    text = _hide([statement for _, statement in needles], [depth for depth, _ in needles], size, haystack, draw)
    asked = [
        Question(
            f"Which variables have the value {value}, directly or through other variables? There are {HOPS + 1}.",
            f"The {HOPS + 1} variables with the value {value} are",
            variables,
            tuple(chained[number : number + NUM_DISTRACTORS]),
        )
        for number, (value, variables) in enumerate(zip(values, chained, strict=False), 1)
    ]
    intro = "Assignments of variables are hidden in the following text. Remember them, I will ask for them later."
    return Item(f"{intro}\n\n{text}", tuple(asked))


def _common_words(questions: int, size: int, haystack: Haystack, draw: Random) -> Item:
    """Lists of numbered words, of which ten occur ten times as often as the others; twice or more in short lists.

    RULER's 30 and 3 times in lists of 600 words and more, 10 times and once in shorter ones.
    """
    most = len(haystack.vocabulary) // questions - COMMON_WORDS
    if most < COMMON_WORDS:
        raise ConfigError(f"cwe needs {questions * 2 * COMMON_WORDS} different words; give --text more than it has")
    rare, common = (3, 30) if size >= 60 * COMMON_WORDS else (1, min(max(size // 20, 2), 10))
    while (size - COMMON_WORDS * common) // rare > most:
        rare, common = rare + 1, 10 * (rare + 1)
    num_rare = max((size - COMMON_WORDS * common) // rare, COMMON_WORDS)
    words, lists, asked = draw.sample(haystack.vocabulary, len(haystack.vocabulary)), list[str](), list[Question]()
    for number, title in enumerate(ascii_uppercase[:questions]):
        own = words[number::questions]
        frequent, others = own[:COMMON_WORDS], own[COMMON_WORDS : COMMON_WORDS + num_rare]
        entries = frequent * common + others * rare
        draw.shuffle(entries)
        lists.append(f"List {title}: " + " ".join(f"{n}. {word}" for n, word in enumerate(entries, 1)))
        order = {word: place for place, word in enumerate(dict.fromkeys(entries))}
        wrong = [sorted(draw.sample(others, COMMON_WORDS), key=order.__getitem__) for _ in range(NUM_DISTRACTORS)]
        asked.append(
            Question(
                f"Which {COMMON_WORDS} words are the most common ones in list {title}?",
                f"The {COMMON_WORDS} most common words in list {title} are",
                tuple(sorted(frequent, key=order.__getitem__)),
                tuple(map(tuple, wrong)),
            )
        )
    intro = "Some words occur more often than others in the following. Remember them, I will ask for them later."
    return Item("\n\n".join((intro, *lists)), tuple(asked))


def _frequent_words(questions: int, size: int, haystack: Haystack, draw: Random) -> Item:
    """Texts of coded words whose frequencies follow Zipf's law with exponent 2.

    RULER's most frequent word, a row of dots that does not count, is left out.
    """
    total, texts, asked = max(size, 40), list[str](), list[Question]()
    counts = [round(total / (rank * rank * _ZIPF)) for rank in range(2, total)]
    counts = [number for number in counts if number]
    for title, text_seed in zip(ascii_uppercase, [draw.random() for _ in range(questions)], strict=False):
        own = Random(text_seed)
        words = _distinct(len(counts), partial(_letters, own, ascii_lowercase, _CODED_LETTERS))
        entries = [word for word, number in zip(words, counts, strict=True) for _ in range(number)]
        own.shuffle(entries)
        texts.append(f"Text {title}: " + " ".join(entries))
        wrong = [own.sample(words[FREQUENT_WORDS:], FREQUENT_WORDS) for _ in range(NUM_DISTRACTORS)]
        asked.append(
            Question(
                f"Which {FREQUENT_WORDS} words are the most frequent ones in text {title}?",
                f"The {FREQUENT_WORDS} most frequent words in text {title} are",
                tuple(words[:FREQUENT_WORDS]),
                tuple(map(tuple, wrong)),
            )
        )
    intro = "Some coded words occur more often than others in the following. Remember them, I will ask for them later."
    return Item("\n\n".join((intro, *texts)), tuple(asked))


TASKS: dict[str, Callable[[int, int, Haystack, Random], Item]] = {
    "niah_single": partial(_needles, NEEDLES_PER_QUESTION["niah_single"]),
    "niah_multikey": partial(_needles, NEEDLES_PER_QUESTION["niah_multikey"]),
    "vt": _variables,
    "cwe": _common_words,
    "fwe": _frequent_words,
}
"""Makers of items, from the number of questions, a size (words), the haystack and a random generator."""


def _hide(needles: Sequence[str], depths: Sequence[float], size: int, haystack: Haystack, draw: Random) -> str:
    """So many words of the haystack, with needles at the ends of sentences next to their depths, 0 to 1, in order."""
    start = draw.randrange(len(haystack.words))
    words = [haystack.words[(start + place) % len(haystack.words)] for place in range(size)]
    pieces, begin = list[str](), 0
    for needle, depth in zip(needles, depths, strict=True):
        end = max(int(depth * size), begin)
        while begin < end < size and not words[end - 1].endswith((".", "!", "?", ":")):
            end += 1
        pieces += [*words[begin:end], needle]
        begin = end
    return " ".join([*pieces, *words[begin:]])


def _distinct(count: int, make: Callable[[], str]) -> list[str]:
    """So many different strings."""
    strings: dict[str, None] = {}
    while len(strings) < count:
        strings[make()] = None
    return list(strings)


def _letters(draw: Random, alphabet: str, count: int) -> str:
    return "".join(draw.choices(alphabet, k=count))
