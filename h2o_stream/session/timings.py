"""Tokens processed and the time they took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Timings:
    """Tokens and compute time of a turn or of any part of a run.

    Attributes:
        prompt_tokens: tokens prefilled, template tokens included.
        prefill_s: seconds spent in prefill.
        new_tokens: tokens generated, end-of-turn tokens included.
        decode_s: seconds spent in decoding.
    """

    prompt_tokens: int = 0
    prefill_s: float = 0.0
    new_tokens: int = 0
    decode_s: float = 0.0

    @property
    def prefill_tok_s(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Generated tokens per second."""
        return self.new_tokens / self.decode_s if self.decode_s else 0.0

    def add(self, other: Timings) -> None:
        """Add another measurement to this one."""
        self.prompt_tokens += other.prompt_tokens
        self.prefill_s += other.prefill_s
        self.new_tokens += other.new_tokens
        self.decode_s += other.decode_s
