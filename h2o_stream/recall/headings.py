"""Headings of a text, numbered or in Markdown, and the parts that they begin."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

KINDS = {
    "book": "buch|livre|libro",
    "part": "teil|partie|parte",
    "chapter": "kapitel|chapitre|cap[ií]tulo|capitolo",
    "act": "akt|acte|acto|atto",
    "section": "abschnitt|secci[oó]n|sezione",
    "scene": "szene|scène|escena|scena",
}
"""Kinds of parts, the largest first, and their other names."""

KIND = "|".join(f"{kind}|{others}" for kind, others in KINDS.items())

_ONES = (
    "one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen"
    "|eighteen|nineteen|twenty"
)
ORDINALS = "first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth"
_NUMBERS = {word: str(number) for words in (_ONES, ORDINALS) for number, word in enumerate(words.split("|"), 1)}
_ROMAN = {"i": 1, "v": 5, "x": 10, "l": 50, "c": 100}
NUMBER = rf"\d+(?:\.\d+)*|[ivxlc]+|{_ONES}"

_HEADING = re.compile(
    rf"""^[ \t]*+(?:
        (?P<marks>\#{{1,6}})[ \t]++(?P<marked>[^\n]{{1,120}})
      | [*_=\-]{{0,3}}(?P<kind>{KIND})[ \t]++(?P<number>{NUMBER})(?!\w)
        (?P<title>[ \t]*(?:[.:)*_\-\u2013\u2014][^\n]{{0,80}})?|[ \t]+(?-i:[A-ZÀ-Þ"“])[^\n]{{0,80}})
      | (?P<numeral>\d{{1,3}}(?:\.\d{{1,3}})*+|[ivxlc]+(?=\.))\.?[ \t]++(?P<numbered>\S[^\n]{{0,80}})
    )$""",
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
"""A line that begins a part. Of those with nothing but a numeral, sentences are no headings."""

_MARKED = re.compile(rf"(?:(?P<kind>{KIND})[ \t]+)?(?P<number>{NUMBER})(?!\w)", re.IGNORECASE)
"""The number with which a heading in Markdown begins."""


class Heading(NamedTuple):
    """A heading: where its line begins, and its level, which is comparable among those of one style."""

    start: int
    style: str
    depth: int
    kind: str
    number: str
    title: str


def headings(text: str) -> Iterator[Heading]:
    """The headings of a text, in order. `kind` is English, or empty; `number` has digits, or is empty."""
    for match in _HEADING.finditer(text):
        if marks := match["marks"]:
            numbered = _MARKED.match(match["marked"])
            kind, number = (kind_of(numbered["kind"]), number_of(numbered["number"])) if numbered else ("", "")
            title = match["marked"][numbered.end() if numbered else 0 :]
            yield Heading(match.start(), "marks", len(marks), kind, number, _clean(title))
        elif match["kind"]:
            kind = kind_of(match["kind"])
            depth = list(KINDS).index(kind)
            yield Heading(match.start(), "kind", depth, kind, number_of(match["number"]), _clean(match["title"]))
        elif not match["numbered"].rstrip().endswith((".", "!", "?", ",", ";")):
            number = number_of(match["numeral"])
            yield Heading(match.start(), "numeral", number.count("."), "", number, _clean(match["numbered"]))


def extent(text: str, all_headings: Sequence[Heading], place: int) -> str:
    """A heading with what follows, up to the next one of its level or above; the one at this place of all of them."""
    heading, later = all_headings[place], (all_headings[number] for number in range(place + 1, len(all_headings)))
    return text[heading.start : next((one.start for one in later if _ends(one, heading)), len(text))].strip()


def _ends(later: Heading, heading: Heading) -> bool:
    if later.style != heading.style:
        return later.style == "marks" and heading.style == "numeral"  # a table of contents has ended
    if later.depth > heading.depth:
        return False
    # The items of a list look like headings of numerals, but begin with 1.
    return later.style != "numeral" or _order(later) > _order(heading)


def _order(heading: Heading) -> list[int]:
    return list(map(int, heading.number.split(".")))


def _clean(title: str) -> str:
    return title.strip(" \t.:)-\u2013\u2014*_#¶")


def kind_of(name: str | None) -> str:
    """The English name of a kind of parts; empty if it is none."""
    name = (name or "").casefold()
    return next((kind for kind, others in KINDS.items() if re.fullmatch(f"{kind}|{others}", name)), "")


def number_of(text: str) -> str:
    """A number in digits; "last" stays."""
    text = text.casefold()
    if not text.strip("ivxlc"):
        values = [_ROMAN[letter] for letter in text]
        return str(sum(-one if one < max(values[place:]) else one for place, one in enumerate(values)))
    return _NUMBERS.get(text, text)
