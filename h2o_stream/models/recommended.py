"""Models that are better than the embedded one and run on this machine at reading speed."""

from __future__ import annotations

from dataclasses import dataclass

from h2o_stream.base.memory import format_bytes, free_bytes
from h2o_stream.native.threads import bandwidth

_FILES = {
    "Qwen/Qwen2.5-0.5B-Instruct-GGUF:qwen2.5-0.5b-instruct-q4_k_m.gguf": 0.49e9,
    "Qwen/Qwen2.5-1.5B-Instruct-GGUF:qwen2.5-1.5b-instruct-q4_k_m.gguf": 1.12e9,
    "Qwen/Qwen3-4B-GGUF:Qwen3-4B-Q4_K_M.gguf": 2.5e9,
    "Qwen/Qwen3-8B-GGUF:Qwen3-8B-Q4_K_M.gguf": 5.03e9,
    "Qwen/Qwen3-14B-GGUF:Qwen3-14B-Q4_K_M.gguf": 9e9,
}
"""Files of the Hub under Apache-2.0, and their bytes."""

_BOUND_SHARE = 0.7
"""Speed of a step relative to reading its weights once from memory."""

_READING_SPEED = 6.0
"""Tokens per second of somebody who reads 270 words a minute."""

_FREE_SHARE = 0.7
_READ_BYTES, _ROUNDS = 64 << 20, 3


@dataclass(frozen=True)
class Recommended:
    """A model that fits into free memory.

    Attributes:
        tokens_per_s: speed of a reply on this machine, estimated from its memory bandwidth.
    """

    name: str
    nbytes: int
    tokens_per_s: float


def recommended() -> list[Recommended]:
    """The models that fit, smallest first; takes some 50 ms."""
    bytes_per_s, free = bandwidth(None, _READ_BYTES, _ROUNDS), free_bytes()
    return [
        Recommended(name, int(size), _BOUND_SHARE * bytes_per_s / size)
        for name, size in _FILES.items()
        if size < _FREE_SHARE * free
    ]


def best(models: list[Recommended]) -> Recommended | None:
    """The largest that writes as fast as people read, or else the smallest."""
    fast = [model for model in models if model.tokens_per_s >= _READING_SPEED]
    return fast[-1] if fast else next(iter(models), None)


def better_models() -> str:
    """What to tell somebody who meets the embedded model for the first time."""
    model = best(recommended())
    text = "This model has 135 million parameters, and is often wrong. "
    if model:
        text += f"Better, at about {model.tokens_per_s:.2g} tokens/s here: h2o-chat -m {model.name} "
        text += f"({format_bytes(model.nbytes)} to download). "
    return text + "h2o-chat --models lists others, those of ollama and LM Studio too."
