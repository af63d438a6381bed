"""A model in memory with its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory.

    Attributes:
        name: what the user typed.
        model: a causal language model of transformers in evaluation mode, or a `RuntimeModel`.
        tokenizer: with a chat template.
        stops: strings that end a reply, for models without an end-of-turn token.
        file: the GGUF file that it was read from, or None.
        check: compares the file with transformers' model meanwhile, see `runtime.checking`; None if that is not needed.
        why_transformers: why a model of transformers was loaded; nothing for a `RuntimeModel`, or if nobody asked.
    """

    name: str
    model: Any
    tokenizer: Any
    stops: tuple[str, ...] = ()
    file: Path | None = None
    check: Any = None
    why_transformers: str = ""
