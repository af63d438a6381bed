"""Reads the parts of a model that are the same everywhere, and records which modules it has read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from h2o_stream.native import layouts
from h2o_stream.native.description import DescriptionError, Matrix, Norm
from h2o_stream.native.modules import norm_of
from h2o_stream.native.torch_modules import matrix_of


class ModuleReader:
    """Reads norms and matrices of a causal language model of transformers by name."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._config = model.config.get_text_config()
        self._hidden: int = self._config.hidden_size
        self._read: set[int] = set()

    def _mark_read(self, *modules: Any) -> None:
        self._read.update(map(id, modules))

    def _mark_container(self, module: Any, name: str, *known: str) -> None:
        """Record a module of which only the children and the parameters `known` are read."""
        if parameter := next((key for key in (*module._parameters, *module._buffers) if key not in known), None):
            raise DescriptionError(f"{name} has the parameter {parameter} in its {type(module).__name__}")
        self._mark_read(module)

    def _factor(self, name: str) -> float:
        value = getattr(self._config, name, None)
        return 1.0 if value is None else float(value)

    def _norm(self, parent: Any, key: str, size: int, name: str) -> Norm:
        module = getattr(parent, key)
        self._mark_read(module)
        return Norm() if isinstance(module, nn.Identity) else norm_of(module, size, f"{key} of {name}")

    def _matrix(self, parent: Any, key: str, name: str) -> Matrix:
        module = getattr(parent, key)
        self._mark_read(*module.modules())
        return matrix_of(module, f"{key} of {name}")


def check_flags(name: str, get: Callable[[str], Any]) -> None:
    """Check that flags that change the computation have their neutral values."""
    for flag, neutral in layouts.NEUTRAL_FLAGS.items():
        value = get(flag)
        if value is not None and value not in neutral:
            raise DescriptionError(f"{name} has {flag} = {value}")


def has_modules(module: Any, names: Iterable[str]) -> bool:
    """Whether a module has children of all these names."""
    return all(isinstance(getattr(module, name, None), nn.Module) for name in names)
