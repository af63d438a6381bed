"""Readable text from a stream of token ids, without ever decoding a token twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """Incremental text of one reply.

    A character split over tokens appears when it is complete, so no replacement character is ever shown.
    Text that may be the start of a stop string is held back until that is settled.

    Args:
        tokenizer: a transformers tokenizer backed by the tokenizers library.
        stops: strings that end the reply and are not part of it.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stops = tuple(stops)
        self._pending = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that became certain with this token; `stopped` says whether a stop string was met."""
        self._pending += self._stream.step(self._backend, token) or ""
        cut = min((at for stop in self._stops if (at := self._pending.find(stop)) >= 0), default=-1)
        if cut >= 0:
            self.stopped = True
            text, self._pending = self._pending[:cut], ""
            return text
        hold = max((_overlap(self._pending, stop) for stop in self._stops), default=0)
        text = self._pending[: len(self._pending) - hold]
        self._pending = self._pending[len(text) :]
        return text

    def flush(self) -> str:
        """What was held back when the reply ended without a stop string."""
        text, self._pending = self._pending, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a start of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
