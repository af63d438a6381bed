"""What is shown of the thinking of a reply: all of it, a line, or nothing."""

from __future__ import annotations

from h2o_stream.config import ThinkMode


class Thinking:
    """The thinking of one reply, while it is generated: all of it is `shown`, or a line (`folded`) that ends with the
    hint.

    The mode ``off`` is ``fold``, for a model that thinks nevertheless.
    """

    def __init__(self, mode: ThinkMode, hint: str = "") -> None:
        self.text = ""
        self.shown, self.folded = mode == "show", mode in ("fold", "off")
        self._hint = hint
        self._tokens = 0
        self._ended = False

    @property
    def line(self) -> str:
        """The line of folded thinking: while it lasts, and after it. Empty if there is none."""
        if not self.folded or not (self.text if self._ended else self._tokens):
            return ""
        count = "1 token" if self._tokens == 1 else f"{self._tokens:,} tokens"
        return f"thought for {count}{self._hint}" if self._ended else f"thinking … {count}"

    @property
    def active(self) -> bool:
        """Whether the reply is thinking now."""
        return self._tokens > 0 and not self._ended

    def add(self, text: str) -> None:
        """Append a token, with the text that it completes."""
        self._tokens += 1
        self.text += text

    def end(self) -> bool:
        """The answer begins, or the reply ends. Returns whether there was thinking that had not ended."""
        was_active, self._ended = self.active, self._tokens > 0
        return was_active
