"""The text of a reply: each token is decoded only once; and the texts that mark thinking in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from types import MappingProxyType
from typing import Any

from h2o_stream.base.token_texts import TokenTextStream


@dataclass(frozen=True)
class Markers:
    """The texts that begin and end thinking in a model's replies, such as ``<think>``.

    Skipped ones come before the answer and belong neither to it nor to the thinking, nor does one that ends it.
    """

    opening: str
    closing: str
    skipped: tuple[str, ...] = ()
    ending: str = ""

    @property
    def all(self) -> tuple[str, ...]:
        """All of these texts."""
        return self.opening, self.closing, *self.skipped, *((self.ending,) if self.ending else ())

    def ended(self, message: str) -> str:
        """What ends thinking where it would go on, so that the answer follows."""
        closing = f"{self.closing}{''.join(self.skipped)}"
        return f"{message}{closing}" if self.skipped else f"{message}\n{closing}\n\n"

    def unclosed(self, text: str) -> str:
        """The end of a text from an opening on that is not closed; empty if there is none."""
        start = text.rfind(self.opening)
        return text[start:] if start > text.rfind(self.closing) else ""


class TextStream:
    """The text of one reply, token by token.

    A character that spans several tokens is emitted when it is complete, never as a replacement character. Text that
    may be the start of a stop string is held back until this is decided.

    Attributes:
        stopped: whether a stop string was found.

    Args:
        tokenizer: a transformers tokenizer backed by the tokenizers library.
        stops: strings that end the reply and are not part of it.
        visible: the text of control tokens that are part of the text all the same, by id.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str] = (), visible: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        self._stream = TokenTextStream(tokenizer.backend_tokenizer)
        self._stops, self._visible = tuple(stops), visible
        self._pending = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that can be shown after this token."""
        self._pending += self._visible.get(token) or self._stream.push(token)
        cut = min((at for stop in self._stops if (at := self._pending.find(stop)) >= 0), default=-1)
        if cut >= 0:
            self.stopped = True
            text, self._pending = self._pending[:cut], ""
            return text
        hold = max((overlap(self._pending, stop) for stop in self._stops), default=0)
        text = self._pending[: len(self._pending) - hold]
        self._pending = self._pending[len(text) :]
        return text

    def flush(self) -> str:
        """The text held back when the reply ended without a stop string."""
        text, self._pending = self._pending, ""
        return text


def shared_length(a: Sequence[object], b: Sequence[object]) -> int:
    """How many tokens, or letters, two sequences begin with in common."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
