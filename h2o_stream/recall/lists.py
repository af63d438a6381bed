"""Requests for several things: "List all eight codes", "What are the codes of the garage and the attic?"."""

from __future__ import annotations

import re

import numpy

from h2o_stream.recall.terms import Floats, words

_QUANTITIES = frozenset(
    words(
        "all every each both two three four five six seven eight nine ten "
        "alle jede jeder jedes beide zwei drei vier fünf sechs sieben acht neun zehn "
        "tous toutes chaque deux trois quatre cinq six sept huit neuf dix "
        "todos todas cada dos tres cuatro cinco seis siete ocho nueve diez "
        "tutti tutte ogni due tre quattro cinque sei sette otto nove dieci "
        "所有 每个"
    )
)
"""Words that say how many things are asked for, not which."""

_BETWEEN = re.compile(
    r"[,;、，،؛]|(?<=\s)(?:and|or|und|oder|et|ou|y|o|e|и|или)(?=\s)|和|或",  # noqa: RUF001
    re.IGNORECASE,
)
"""What stands between the things that a text lists."""

_SHARED = 0.85
"""How much of the word that is common to all of them each has to cover: another form of it does."""


def without_quantities(asked: dict[str, float]) -> dict[str, float]:
    """The terms of a request that say what is asked for."""
    return {word: weight for word, weight in asked.items() if word not in _QUANTITIES}


def asks_for_all(request: str) -> bool:
    """Whether a text asks for all things of a kind, or for a number of them."""
    return not _QUANTITIES.isdisjoint(words(request))


def answers(request: str, asked: list[str], weights: Floats, covered: Floats, threshold: float) -> list[int]:
    """The passages that answer one part each of a request that lists several things; none if it does not.

    A passage answers a part if it covers that part up to the threshold, and a word of the first part, such as "codes"
    in "the codes of the garage, the attic and the chapel": the same word for all, the one with which most parts, two or
    more, have answers.

    Args:
        request: the text.
        asked: terms of the request, [T].
        weights: weights of the terms, above 0, [T].
        covered: how much of each weight each passage covers, best passages first, [M, T].
        threshold: the lowest share of a part's weight, 0 to 1.

    Returns:
        Rows of `covered`, in the order of the parts.
    """
    texts = (set(words(text)) for text in _BETWEEN.split(request))
    terms = (tuple(number for number, word in enumerate(asked) if word in text) for text in texts)
    parts = [list(part) for part in dict.fromkeys(terms) if part]
    if len(parts) < 2:
        return []
    shares = numpy.array([covered[:, part].sum(1) / weights[part].sum() for part in parts])
    shares[shares < threshold] = 0
    best: list[int] = []
    for common in parts[0]:
        having = shares * (covered[:, common] >= _SHARED * weights[common])
        rows = list(dict.fromkeys(row.argmax().item() for row in having if row.any()))
        best = max(best, rows, key=len)
    return best if len(best) > 1 else []
