"""Finds what a message asks for as a whole: a chapter, a file, a class, all of a text. Knows no models, no caches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from h2o_stream.recall.headings import KIND, NUMBER, ORDINALS, Heading, extent, headings, kind_of, number_of
from h2o_stream.recall.passage import Role, SaidTurn, Whole
from h2o_stream.recall.passages import split

MAX_WHOLE = 32768
"""Tokens of a text that is read again as a whole: a minute of reading (embedded model)."""

MAX_PIECES, MIN_REPLY = 8, 48
"""Pieces in which it is read, and tokens of the whole reply for each of them."""

_MAX_REQUEST = 200
"""Characters of a message above which it may bring the text that it is about."""

_PART = re.compile(
    rf"\b(?P<kind>{KIND})\s+(?P<number>{NUMBER})(?!\w)(?!\s+(?:am|was|have|had|wrote|like|will|can|do|did)\b)"
    rf"|\b(?P<ordinal>{ORDINALS}|last)\s+(?P<counted>{KIND})\b",
    re.IGNORECASE,
)
"""A part that is named by its number: "chapter 13", "the last section"; not "the part I wrote"."""

_CODE = "class|def|function|func|fn|struct|interface|enum|trait|module|table"

_MODIFIERS = "export|default|public|private|protected|internal|static|async|abstract|final|pub|create|temporary"

_DEFINITION = re.compile(
    rf"\b(?:{_CODE}|method|procedure)\s+[`'\"]?(?!(?:to|that|which|of|for|in|with|and|is|the)\b)(?P<after>[a-z_]\w+)"
    rf"|\bthe\s+[`'\"]?(?P<before>[a-z_]\w+)[`'\"]?\s+(?:{_CODE})\b",
    re.IGNORECASE,
)
"""Code that is named: "class Invoice", "the `add` function"."""

_WHOLE = re.compile(
    r"\b(?:summar(?:y|i[sz]e)|translat|rewrite|rephrase|proofread|outline|paraphrase|recap|main (?:points?|idea)"
    r"|zusammenfass|fasse?\b.*\bzusammen|übersetz|résum|tradui|resum(?:e|ir|en)\b|traduc|riassum|traduci)"
    r"|总结|翻译|要約",
    re.IGNORECASE,
)
"""Requests that need all of a text."""

_ABOUT = re.compile(
    r"\bwhat(?:'s| is| was| happens| happened| does| did)(?: (?:going on )?in)? §"
    r"(?: (?:about|say|tell(?: us)?|describe|deal with))?\W*\Z|\btell (?:me|us) (?:more )?about §\W*\Z"
    r"|\bworum geht(?:'s| es) in §",
    re.IGNORECASE,
)
"""Questions about all of something, whose name is §."""

_TEXT = re.compile(
    r"\b(?:the|this|that|my|der|den|die|das|dem|le|la|el|il)\s+(?:\w+\s+){0,2}?"
    r"(?:text|book|novel|report|document|paper|article|file|paste|transcript|manual|handbook"
    r"|buch|roman|bericht|artikel|datei|texte|livre|rapport|texto|libro|informe|testo)\b",
    re.IGNORECASE,
)
"""The text that was given last."""

_IT = re.compile(
    r"\b(?:the|this|that|my|your)\s+(?:story|tale|essay|poem)\b"
    r"|\b(?:it|this|that|all of (?:it|this|that)|everything)\W*(?:please\W*)?\Z"
    r"|\A\W*(?:please\W+)?(?:summari[sz]e|(?:give me |write )?a summary)\W*(?:please\W*)?\Z",
    re.IGNORECASE,
)
"""What was said last at some length."""

_CHAT = re.compile(
    r"\b(?:(?:our|this|the) (?:conversation|chat|discussion)|everything so far|(?:what|everything) we (?:\w+ )?"
    r"(?:talked|discussed|said|did)|unser\w* (?:gespräch|unterhaltung)|notre conversation|nuestra conversación)\b",
    re.IGNORECASE,
)
"""All that was said."""

_WITHIN = "in|of|from|about|and|im|aus|und|dans|du|et|en|del|y|nel|e"
"""Before the name of a part that something is asked about."""

_LONG, _LENGTHY = 1500, 400
"""Characters from which on a message is a text, and from which on something is said at some length."""

_ALIKE = 50
"""Parts with the same name that are looked at: a text may have nothing else."""

_FILE = re.compile(r"\A([^\n]{1,250}):\n\n")
"""How a text begins that was read from a file."""


class _Named(NamedTuple):
    """Something that a message names.

    Attributes:
        name: name in the message; empty if it is the first line of the text.
        find: finds it in a text.
        newest: whether what was said last goes first, replies too; otherwise replies come after all that users said.
    """

    name: str
    find: Callable[[str], str]
    newest: bool = False


def find_whole(message: str, turns: Callable[[], Sequence[SaidTurn]]) -> Whole | None:
    """What a message names as a whole; None if it names nothing of this kind.

    `turns` is called only if it may.
    """
    if len(message) > _MAX_REQUEST:
        return None
    asks = _WHOLE.search(message) is not None
    if asks and (chat := _CHAT.search(message)) and (past := turns()):
        return Whole(
            chat[0], past[-1][0], text="\n\n".join(f"User: {said}\n\nAssistant: {reply}" for _, said, reply in past)
        )
    for named in _named(message, asks):
        if found := _find(named, turns()):
            name = named.name or found[2].partition("\n")[0].strip("#*_: \t")
            if asks or named.newest or _is_about(message, name):
                return Whole(name, *found)
            within = re.search(rf"\b(?:{_WITHIN})\s+(?:the\s+)?{re.escape(name)}", message, re.IGNORECASE)
            return Whole(name, *found, message.replace(name, " ")) if within else None
    part = _PART.search(message) if asks else None
    return Whole(part[0]) if part else None


def _is_about(message: str, name: str) -> bool:
    return _ABOUT.search(message.replace(name, "§")) is not None


def _named(message: str, asks: bool) -> Iterator[_Named]:
    if code := _DEFINITION.search(message):
        symbol = code["after"] or code["before"]
        yield _Named(code[0].removeprefix("the "), lambda text: _definition(text, symbol), newest=True)
    if part := _PART.search(message):
        kind, number = kind_of(part["kind"] or part["counted"]), number_of(part["number"] or part["ordinal"])
        yield _Named(part[0], lambda text: _part(text, kind, number))
        if kind in ("chapter", "section"):
            yield _Named(part[0], lambda text: _part(text, "", number))
        return
    if asks:
        yield _Named("", lambda text: _titled(text, message))
        yield _Named("", lambda text: _file(text, message))
    if (shown := _TEXT.search(message)) and (asks or _is_about(message, shown[0])):
        yield _Named(shown[0], lambda text: text if len(text) >= _LONG else "")
    elif asks and (it := _IT.search(message)):
        yield _Named(it[0].strip(), lambda text: text if len(text) >= _LENGTHY else "", newest=True)


def _find(named: _Named, turns: Sequence[SaidTurn]) -> tuple[int, Role, str] | None:
    users: list[tuple[int, Role, str]] = [(turn, "user", message) for turn, message, _ in reversed(turns)]
    models: list[tuple[int, Role, str]] = [(turn, "assistant", reply) for turn, _, reply in reversed(turns)]
    texts = [text for pair in zip(models, users, strict=True) for text in pair] if named.newest else users + models
    return next(((turn, role, part) for turn, role, text in texts if (part := named.find(text))), None)


def _part(text: str, kind: str, number: str) -> str:
    """The longest part of a text with this kind and number: tables of contents have the same headings."""
    parts = list(headings(text))
    alike = [one for one in parts if one.kind == kind and one.number]
    if number == "last" and alike:
        depth = min(one.depth for one in alike)
        number = [one for one in alike if one.depth == depth][-1].number
    return _longest(text, parts, lambda one: one.kind == kind and one.number == number)


def _titled(text: str, message: str) -> str:
    """The longest part of a text whose title a message has."""
    folded = message.casefold()
    return _longest(text, list(headings(text)), lambda one: len(one.title) >= 8 and one.title.casefold() in folded)


def _longest(text: str, parts: Sequence[Heading], is_meant: Callable[[Heading], bool]) -> str:
    """The longest of the first parts that are meant, and have more than a line."""
    places = (place for place, one in enumerate(parts) if is_meant(one))
    texts = (extent(text, parts, place) for place in islice(places, _ALIKE))
    return max((part for part in texts if "\n" in part), key=len, default="")


def _file(text: str, message: str) -> str:
    """A text that was read from a file which a message names."""
    named = _FILE.match(text)
    return text if named and named[1].casefold() in message.casefold() else ""


def _definition(text: str, name: str) -> str:
    """The longest code that defines a name: its line and those that are indented below it, with what closes them; not
    a line without any.
    """
    begins = re.finditer(
        rf"^(?P<indent>[ \t]*)(?:(?:{_MODIFIERS})[ \t]+)*(?:{_CODE})[ \t]+{name}\b", text, re.IGNORECASE | re.MULTILINE
    )
    indents = {begin.start(): len(begin["indent"]) for begin in begins}
    spans, opened = list[range](), list[int]()  # definitions inside of each other, the innermost last
    start = end = 0  # of a line, and of the last one that is not blank
    for line in text.split("\n") if indents else ():
        code, rest = line.strip(), line.lstrip()
        if code and not code.startswith((")", "}", "]", "{")):
            while opened and indents[opened[-1]] >= len(line) - len(rest):
                spans.append(range(opened.pop(), end))
        if start in indents:
            opened.append(start)
        end = start + len(line.rstrip()) if code else end
        start += len(line) + 1
    spans += [range(begin, end) for begin in opened]
    with_code = [each for each in spans if text.find("\n", each.start, each.stop) >= 0]
    longest = max(with_code, key=lambda each: (len(each), -each.start), default=range(0))
    return text[longest.start : longest.stop]


def cut_pieces(text: str, size: float, count_tokens: Callable[[str], int]) -> list[str]:
    """A text in pieces of about `size` tokens, each of whole passages."""
    pieces, used = [range(0)], 0
    for part in split(text):
        count = count_tokens(text[part.start : part.stop])
        if used and used + count / 2 > size:
            pieces, used = [*pieces, range(part.start, part.start)], 0
        pieces[-1], used = range(pieces[-1].start, part.stop), used + count
    return [text[piece.start : piece.stop] for piece in pieces]
