"""Finds the tokens of passages in a turn."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from h2o_stream.base.token_texts import TokenTextStream
from h2o_stream.recall.passage import Passage, Role
from h2o_stream.recall.passages import split

_HEAD = 32
"""So many characters are enough to find where a text that was cut off begins."""


def locate(tokenizer: Any, tokens: Sequence[int], start: int, turn: int, prompt: str, reply: str) -> list[Passage]:
    """The passages of a turn, with the tokens of each.

    The turn's tokens, of which the first has the index `start` in the stream, include those of the template. Other text
    may be in front of the prompt, and the turn may have been cut off anywhere.

    Where the tokenizer changes texts, the tokens are estimated by length. A passage that was not fed has an empty range
    at the end of the turn.
    """
    decoded = decode(tokenizer, tokens)
    prompt_passages, reply_passages = split(prompt), split(reply)
    prompt_at, reply_at = _places(decoded.text, _core(prompt, prompt_passages), _core(reply, reply_passages))
    located = list[Passage]()
    parts: tuple[tuple[Role, str, list[range], int], ...] = (
        ("user", prompt, prompt_passages, prompt_at),
        ("assistant", reply, reply_passages, reply_at),
    )
    for role, text, passages, at in parts:
        for passage in passages:
            first = at + passage.start - passages[0].start
            part = decoded.tokens(range(first, first + len(passage)))
            located.append(
                Passage(turn, role, text[passage.start : passage.stop], start + part.start, start + part.stop)
            )
    return located


@dataclass(frozen=True)
class DecodedTokens:
    """The text of some tokens.

    Attributes:
        text: text of all tokens, without control tokens.
        starts: the number of characters before each token.
        ends: the number of characters up to the end of each token, with the one that it is a part of.
    """

    text: str
    starts: list[int]
    ends: list[int]

    def tokens(self, part: range) -> range:
        """The tokens of a range of characters."""
        start = bisect_right(self.ends, part.start)
        return range(start, max(start, bisect_left(self.starts, part.stop)))


def decode(tokenizer: Any, tokens: Sequence[int]) -> DecodedTokens:
    """The text of tokens, and the place of each in it."""
    backend = tokenizer.backend_tokenizer
    stream = TokenTextStream(backend)
    control = {number for number, token in backend.get_added_tokens_decoder().items() if token.special}
    pieces, starts, ends, length = list[str](), list[int](), list[int](), 0
    for token in tokens:
        piece = stream.push(token)
        pieces.append(piece)
        starts.append(length)
        length += len(piece)
        ends.append(length if piece or token in control else length + 1)
    return DecodedTokens("".join(pieces), starts, ends)


def _core(text: str, passages: Sequence[range]) -> str:
    """A text without the space around it, which templates remove."""
    return text[passages[0].start : passages[-1].stop] if passages else ""


def _places(text: str, prompt: str, reply: str) -> tuple[int, int]:
    """Where the prompt and the reply begin in the text of a turn. The text in front may quote both."""
    reply_at = _place(text, reply, len(text))
    prompt_at = _place(text, prompt, len(text) if reply_at is None else reply_at)
    if prompt_at is None and reply_at is not None:
        prompt_at = _place(text, prompt, len(text))
        if prompt_at is not None:  # the prompt contains the words of a reply that was not fed
            return prompt_at, len(text)
    if prompt_at is None:
        prompt_at = max(0, (len(text) - len(reply) if reply_at is None else reply_at) - len(prompt))
    if reply_at is None:
        reply_at = min(max(prompt_at + len(prompt), len(text) - len(reply)), len(text))
    return prompt_at, reply_at


def _place(text: str, part: str, stop: int) -> int | None:
    """The last place before `stop` where `part` is; or where it begins, if the text ends before it does."""
    if not part:
        return None
    # Reversed because only `find` is linear for all texts, `rfind` is not.
    place = text[:stop][::-1].find(part[::-1])
    if place >= 0:
        return stop - place - len(part)
    if stop < len(text):
        return None
    tail = len(text)
    for _ in range(8):
        tail = text.rfind(part[:_HEAD], 0, tail)
        if tail < 0:
            break
        if part.startswith(text[tail:]):
            return tail
        tail += min(_HEAD, len(part)) - 1
    length = next((n for n in range(min(_HEAD, len(part)), 0, -1) if text.endswith(part[:n])), 0)
    return len(text) - length if length else None
