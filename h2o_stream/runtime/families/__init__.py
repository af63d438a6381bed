"""The families that are described from files, each in a module: rows of GGUF architectures and of checkpoints."""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

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
