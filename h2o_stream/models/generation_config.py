"""How a model's makers recommend to sample, and which tokens end its turns."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from h2o_stream.errors import ModelNotFoundError
from h2o_stream.models.gguf import GgufFile
from h2o_stream.models.tokenizer import read_object


@dataclass(frozen=True)
class GenerationConfig:
    """The part of transformers' class of this name that this package uses. None is no recommendation.

    Raises ModelNotFoundError if what should end a turn is no token.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self) -> None:
        ends = self.eos_token_id
        if not all(type(end) is int for end in (ends if isinstance(ends, list) else [] if ends is None else [ends])):
            raise ModelNotFoundError(f"the generation config has eos_token_id {ends!r:.60}, not tokens")


def read_generation_config(source: Path | GgufFile) -> GenerationConfig:
    """The generation config of a GGUF file or of a model's folder; without one, its config has these values.

    Raises ModelNotFoundError if a file is damaged.
    """
    if isinstance(source, GgufFile):
        return GenerationConfig(eos_token_id=end_token_ids(source))
    path = source / "generation_config.json"
    values = read_object(path if path.exists() else source / "config.json")
    return GenerationConfig(**{field.name: values.get(field.name) for field in fields(GenerationConfig)})


def end_token_ids(file: GgufFile) -> list[int] | None:
    """The end-of-sequence token ids of a GGUF file."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    token_ids = {file.metadata[key] for key in keys if isinstance(file.metadata.get(key), int)}
    return sorted(token_ids) or None
