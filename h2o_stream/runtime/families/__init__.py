"""The families that are described from files, each in a module: rows of GGUF architectures and of checkpoints."""

import json
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from h2o_stream.runtime.families.architecture import Architecture, ModelType

_FAMILIES = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]

ARCHITECTURES: Mapping[str, Architecture] = {
    name: row for family in _FAMILIES for name, row in getattr(family, "ARCHITECTURES", {}).items()
}
"""By llama.cpp's name."""

MODEL_TYPES: Mapping[str, ModelType] = {
    name: row for family in _FAMILIES for name, row in getattr(family, "MODEL_TYPES", {}).items()
}
"""By transformers' name."""


@cache
def published() -> Mapping[str, Mapping[str, Any]]:
    """By transformers' name: what its class says of entries that are left out, and newer names of older entries.

    RoPE's base is null where the class has more than a base, so that a config has to say all of it.
    """
    types: dict[str, Any] = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
    return types
