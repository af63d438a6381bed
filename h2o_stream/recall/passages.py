"""Splits texts into passages and sentences. Knows nothing of the index."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

MAX_WORDS = 60
"""Longest passage: about as many words as one thought takes, and a third of a window of 256."""

MIN_WORDS = 8
"""A shorter one that is no statement, such as a heading or an item of a list, is joined with what follows it."""

UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    "\u2e80-\u2fdf\u3005-\u3007\u3040-\u318f\u31a0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua960-\ua97f\uac00-\ud7ff"
    "\uf900-\ufaff\uff66-\uffdc\U0001b000-\U0001b16f\U00020000-\U0003ffff"  # Chinese, Japanese, Korean
)
"""Scripts without spaces between words, as a part of a character class. In Korean, endings stick to words."""

_WORD = re.compile(rf"[{UNSPACED}]{{1,2}}|[^\s{UNSPACED}]{{1,24}}")
"""A word, or as much text as a word."""

_BLANK_LINES = re.compile(r"\n\s*\n")

_OPENING, _CLOSING = "\"'(“‘", r"\"'”’»)\]*_」』）"  # noqa: RUF001 (no mistake: they are used in texts)
_FULL_STOPS = "。！｡．।॥۔։።។៕။"  # noqa: RUF001
_MARKS = f"{_FULL_STOPS}？؟፧"  # noqa: RUF001
"""What ends a sentence in scripts that put no space after it, or have no capital letters."""

_END = re.compile(
    rf"""
    (?P<mark> (?<![.!?…]) [.!?…]++ ) [{_CLOSING}]*+ (?P<gap> \s*+ )
    | (?<![{_MARKS}]) [{_MARKS}]++ [{_CLOSING}]*+ \s*+
    | (?P<line> (?<!\s) [^\S\n]*+ \n \s*+ )
    """,
    re.VERBOSE,
)
"""Where a sentence may end, with the space that follows. Each part starts only where it cannot be a continuation, so
that a megabyte of full stops is read once."""

_PIECE = 2**16
"""Characters of a text that are searched at once: no other thread goes on meanwhile."""

_WITHIN = re.compile(rf"[^\s.!?…{_MARKS}]{{2}}")
"""Where no sentence ends, nor goes on what may end one."""

_STATEMENT_END = re.compile(rf"[.!…{_FULL_STOPS}][{_CLOSING}]*\Z")
"""The end of a text that is complete; questions wait for their answer."""

_ABBREVIATION = re.compile(
    r"""(?: \b (?: (?! I\. ) [A-ZÀ-ÞА-Я]
        | (?i: Mrs? | Ms | Dr | Prof | St | Sr | Jr | Mme | Gen | Col | Lt | Sgt | Capt | Rev | Gov | Sen | Rep
            | e\.g | i\.e | cf | vs | viz | Figs? | Eqs? | approx | ca | z\.B | d\.h | bzw | Nr ) )
      | (?: ^ | \n ) \s* \d{1,3} ) \. \Z""",
    re.VERBOSE,
)
"""A full stop that ends no sentence: after an initial, an abbreviation, or the number of an item."""

_BEFORE_NUMBER = re.compile(r"\b(?:Nos?|pp?|vol|ch|sec|art)\.\Z", re.IGNORECASE)
"""An abbreviation, if a number follows."""

_LONGEST_ABBREVIATION = 12

_CUT_SHARE = 0.9
"""Tokens are not spread evenly over a text: a cut keeps this much less."""

_WRAPPED_LINE = 40
"""A line of at least so many characters may continue on the next one; a shorter one is an item or a heading."""


def split(text: str) -> list[range]:
    """The passages of a text, as ranges of characters without the space around them.

    A passage is a paragraph, with a heading or a question before it, or a part of a long one that ends with a sentence.
    Together they have all characters but space. Takes linear time.
    """
    passages, short = list[range](), None
    for paragraph in _paragraphs(text):
        for part in _parts(text, paragraph):
            joined = part if short is None else range(short.start, part.stop)
            short = joined if _is_open(text, joined) else None
            if short is None:
                passages.append(joined)
    return passages if short is None else [*passages, short]


def sentences(text: str) -> list[range]:
    """The sentences of a text, as ranges of characters without the space around them.

    Lines that are items, rows, code or headings are sentences too. Takes linear time.
    """
    return _sentences(text, range(len(text)))


def sentence_texts(text: str) -> list[str]:
    """The sentences of a text themselves."""
    return [text[part.start : part.stop] for part in sentences(text)]


def excerpt(text: str, sentence: str, limit: int, count_tokens: Callable[[str], int]) -> tuple[str, int]:
    """A sentence of a text, with as many of those around it as `limit` tokens have room for, and its tokens."""
    parts = sentences(text)
    place = next(i for i, part in enumerate(parts) if text[part.start : part.stop] == sentence)
    longest, size = sentence, count_tokens(sentence)
    for first, last in _growing(place, len(parts)):
        longer = text[parts[first].start : parts[last].stop]
        length = count_tokens(longer)
        if length > limit:
            break
        longest, size = longer, length
    return longest, size


def cut(text: str, terms: Sequence[str], share: float) -> str:
    """About this share of a text, around the first of the terms in it, in whole words."""
    places = [place for term in terms if (place := text.lower().find(term)) >= 0]
    length = int(len(text) * share * _CUT_SHARE)
    start = max(min(min(places, default=0) - length // 2, len(text) - length), 0)
    kept = text[start : start + length]
    return " ".join((kept.split(maxsplit=1)[-1] if start else kept).split(" ")[:-1]) or kept


def _growing(place: int, count: int) -> Iterator[tuple[int, int]]:
    """Ranges of sentences, each with one more than the one before: the next one, then the previous one."""
    first = last = place
    while first > 0 or last < count - 1:
        if last < count - 1:
            last += 1
            yield first, last
        if first > 0:
            first -= 1
            yield first, last


def _paragraphs(text: str) -> Iterator[range]:
    start = 0
    for blank in _BLANK_LINES.finditer(text):
        yield from _strip(text, start, blank.start())
        start = blank.end()
    yield from _strip(text, start, len(text))


def _strip(text: str, start: int, stop: int) -> list[range]:
    """The range without the space around it; none if nothing else is left."""
    part = text[start:stop]
    stripped = part.lstrip()
    start += len(part) - len(stripped)
    return [range(start, start + len(stripped.rstrip()))] if stripped else []


def is_statement(text: str) -> bool:
    """Whether a text ends with the end of a statement."""
    return _STATEMENT_END.search(text) is not None


def _is_open(text: str, part: range) -> bool:
    """Whether a part is short and belongs to what follows: a heading, an item or its number, a question."""
    if _count_words(text, part, MIN_WORDS) == MIN_WORDS:
        return False
    ending = text[max(part.start, part.stop - _LONGEST_ABBREVIATION) : part.stop]
    return not is_statement(ending) or bool(_ABBREVIATION.search(ending))


def _parts(text: str, paragraph: range) -> list[range]:
    """A paragraph, or its sentences joined to parts of at most `MAX_WORDS`; the last may be a little longer."""
    if _count_words(text, paragraph, MAX_WORDS + MIN_WORDS) < MAX_WORDS + MIN_WORDS:
        return [paragraph]
    parts, words = list[range](), 0
    for sentence in _sentences(text, paragraph):
        for piece in _pieces(text, sentence):
            count = _count_words(text, piece)
            if parts and words + count <= MAX_WORDS:
                parts[-1], words = range(parts[-1].start, piece.stop), words + count
            else:
                parts.append(piece)
                words = count
    if len(parts) > 1 and words < MIN_WORDS:
        parts[-2:] = [range(parts[-2].start, parts[-1].stop)]
    return parts


def _pieces(text: str, sentence: range) -> Iterator[range]:
    """A sentence, or pieces of it with `MAX_WORDS`, cut at the ends of lines if there are any."""
    start, cut, count = sentence.start, sentence.start, 0
    for word in _WORD.finditer(text, sentence.start, sentence.stop):
        if count == MAX_WORDS:
            line = text.rfind("\n", start + (cut - start) // 2, cut)
            stop = cut if line < 0 else line
            yield from _strip(text, start, stop)
            start, count = stop, 0 if line < 0 else _count_words(text, range(stop, cut))
        cut, count = word.end(), count + 1
    yield from _strip(text, start, sentence.stop)


def _count_words(text: str, part: range, limit: int = 1 << 62) -> int:
    count = 0
    for _ in _WORD.finditer(text, part.start, part.stop):
        count += 1
        if count == limit:
            break
    return count


def _sentences(text: str, part: range) -> list[range]:
    sentences, start = list[range](), part.start
    for end in _ends(text, part):
        if end.end() < part.stop and _ends_sentence(text, end, start):
            sentences += _strip(text, start, end.end())
            start = end.end()
    return sentences + _strip(text, start, part.stop)


def _ends(text: str, part: range) -> Iterator[re.Match[str]]:
    """Where sentences may end."""
    place = part.start
    while place < part.stop:
        within = _WITHIN.search(text, place + _PIECE, part.stop)
        stop = within.start() + 1 if within else part.stop
        for end in _END.finditer(text, place, stop):
            whole = _END.match(text, end.start(), part.stop) if end.end() == stop else end
            assert whole is not None, "it begins there"
            yield whole
            stop = max(stop, whole.end())
        place = stop


def _ends_sentence(text: str, end: re.Match[str], start: int) -> bool:
    """Whether a sentence that began at `start` ends here. More text follows."""
    following = text[end.end()]
    if end["line"] is not None:
        if end["line"].count("\n") > 1:
            return True
        line_start = max(start, text.rfind("\n", start, end.start()) + 1)
        wrapped = end.start() - line_start >= _WRAPPED_LINE
        return not (following.islower() or (wrapped and (following.isalnum() or following in _OPENING)))
    if end["mark"] is None:
        return True
    if not end["gap"] or following.islower():
        return end["gap"].count("\n") > 1
    before = text[max(start, end.end("mark") - _LONGEST_ABBREVIATION) : end.end("mark")]
    return not (_ABBREVIATION.search(before) or (following.isdigit() and _BEFORE_NUMBER.search(before)))
