"""A model in memory with its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from h2o_stream.config import model_sampling
from h2o_stream.models.gguf import gguf_parts, gguf_stem
from h2o_stream.models.other_tools import OLLAMA


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory.

    Attributes:
        name: what the user typed.
        model: a causal language model of transformers in evaluation mode, or a `RuntimeModel`.
        stops: strings that end a reply, for models without an end-of-turn token.
        file: the GGUF file or the folder that it was read from, or None.
        system: the system prompt that comes with it; None leaves it to the chat template.
        own_sampling: sampling settings that come with it.
        why_transformers: why a model of transformers was loaded; nothing for a `RuntimeModel`, or if nobody asked.
    """

    name: str
    model: Any
    tokenizer: Any
    stops: tuple[str, ...] = ()
    file: Path | None = None
    why_transformers: str = ""
    system: str | None = None
    own_sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def sampling(self) -> dict[str, float]:
        """Sampling settings where neither the user nor its generation config says anything."""
        return {**model_sampling(self.name), **self.own_sampling}

    @property
    def file_bytes(self) -> int:
        """Size of the files that the weights come from; 0 if they are unknown, or gone."""
        if self.file is None:
            return 0
        with suppress(OSError):
            files = self.file.glob("*.safetensors") if self.file.is_dir() else gguf_parts(self.file)
            return sum(path.stat().st_size for path in files)
        return 0


def short_name(name: str) -> str:
    """What others call a model that the user named so: a file's stem, a folder's name, ollama's name or the Hub's."""
    if name.startswith(OLLAMA):
        return name.removeprefix(OLLAMA)
    _, colon, file = name.partition(":")
    path = Path(file if colon and file.endswith(".gguf") else name)
    if path.suffix == ".gguf":
        return gguf_stem(path)
    return path.resolve().name if path.is_dir() or path.is_file() else name
