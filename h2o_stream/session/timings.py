"""How much was done, and how fast."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Work:
    """Tokens fed and drawn, with the seconds of work on them: of a turn, or of any part of a run.

    Attributes:
        prompt_tokens: fed before replies, template tokens included.
        prefill_s: seconds of work on them.
        new_tokens: of replies, end-of-turn tokens included.
        decode_s: seconds of work on them.
    """

    prompt_tokens: int = 0
    prefill_s: float = 0.0
    new_tokens: int = 0
    decode_s: float = 0.0

    @property
    def prefill_tok_s(self) -> float:
        """Prompt tokens per second of work."""
        return self.prompt_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Reply tokens per second of work."""
        return self.new_tokens / self.decode_s if self.decode_s else 0.0

    def add(self, other: Work) -> None:
        """Take in other work."""
        self.prompt_tokens += other.prompt_tokens
        self.prefill_s += other.prefill_s
        self.new_tokens += other.new_tokens
        self.decode_s += other.decode_s
