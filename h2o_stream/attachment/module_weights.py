"""The weights of a transformers model where they are, by llama.cpp's names; see `runtime.weights.Weights`."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.description import DescriptionError, Matrix
from h2o_stream.native.torch_modules import dense_matrix, embedding_of, matrix_of, raw_tensor, text_modules
from h2o_stream.runtime.families.architecture import EMBEDDING, OUTPUT, Architecture, parameter_names
from h2o_stream.runtime.rotations import Floats
from h2o_stream.runtime.weights import Weights, as_used

_EXPERTS = {f"ffn_{name}_exps": f"{name}_proj" for name in ("gate_up", "gate", "up", "down")}
"""Matrices of all experts, in what transformers, and `models.packed_experts`, make of those of each."""

_HALVES = ("ffn_gate_up_exps", "ffn_up_exps", "ffn_gate_exps")
"""Names of gates and of what they are for: a row has one, or none; a model has the first, or the others."""

_COLUMNS = {MatrixKind.FLOAT32: MatrixKind.FLOAT32_COLUMNS, MatrixKind.BFLOAT16: MatrixKind.BFLOAT16_COLUMNS}


class ModuleWeights(Weights):
    """Matrices are tensors of the model; vectors are copied only if they are not in float32.

    Raises:
        DescriptionError: the model has no list of layers, no embedding, or no output layer.
    """

    def __init__(self, model: Any, architecture: Architecture) -> None:
        self._model, self._architecture = model, architecture
        modules = dict(text_modules(model))
        self._tensors = dict[str, Tensor]()
        for prefix, module in modules.items():
            self._tensors.update(module.named_parameters(prefix, recurse=False))
            self._tensors.update(module.named_buffers(prefix, recurse=False))
        self._read = {id(x._buffers[name]) for x in modules.values() for name in x._non_persistent_buffers_set}
        self._modules = modules | {EMBEDDING: model.get_input_embeddings(), OUTPUT: model.get_output_embeddings()}
        layers = next((name for name in modules if name.rpartition(".")[2] == "layers"), None)
        if layers is None or None in self._modules.values():
            raise DescriptionError(f"{type(model).__name__} has no list of layers, or no output layer")
        self._prefix = layers.removesuffix("layers")

    def matrix(self, name: str, layer: int | None, rows: int, columns: int) -> Matrix:
        """See `Weights`."""
        full_name = self._name(name, layer)
        module, weights = self._modules.get(full_name) if full_name else None, self._tensors.get(full_name)
        if module is not None:
            matrix = (embedding_of if hasattr(module, "num_embeddings") else matrix_of)(module, full_name)
            self._read.update(map(id, chain(module.parameters(), module.buffers())))
            rows = matrix.rows if layer is None else rows
        elif weights is not None:
            matrix = self._stacked(full_name, weights)
        else:
            raise DescriptionError(f"it has no {full_name or name}")
        matrix.check_shape(rows, columns, full_name)
        return matrix

    def _stacked(self, name: str, weights: Tensor) -> Matrix:
        """The matrices of all experts, [experts, rows, columns], or columns before rows in some families."""
        bias, family = self._tensors.get(f"{name}_bias"), self._architecture
        self._read |= {id(weights), id(bias)}
        bias = None if bias is None else bias.flatten()
        if not (family.transposed_experts or family.interleaved_experts):
            return dense_matrix(weights.flatten(0, -2), bias, name)
        count, columns, rows = weights.shape
        matrix = dense_matrix(raw_tensor(weights, name).view(count * rows, columns), bias, name)
        return replace(matrix, kind=_COLUMNS[matrix.kind])

    def small_matrix(self, name: str, layer: int | None, rows: int, columns: int, dtype: str) -> Matrix:
        """See `Weights`."""
        full_name = self._name(name, layer)
        weights, bias = (self._tensors.get(f"{full_name}.{kind}") for kind in ("weight", "bias"))
        if weights is None:
            raise DescriptionError(f"it has no {full_name or name}")
        self._read |= {id(weights), id(bias)}
        matrix = dense_matrix(weights, bias, full_name)
        matrix.check_shape(rows, columns, full_name)
        return matrix

    def vector(self, name: str, layer: int | None, kind: str = "weight") -> Floats | None:
        """See `Weights`."""
        full_name = self._name(name, layer, kind)
        stored, bare = parameter_names(full_name, kind)
        tensor = self._tensors.get(stored, self._tensors.get(bare))
        if tensor is None:
            return None
        self._read.add(id(tensor))
        values: Floats = raw_tensor(tensor, full_name).float().cpu().numpy().reshape(-1)
        return as_used(values, self._architecture, name, kind)

    def has(self, name: str, layer: int) -> bool:
        """See `Weights`."""
        return self._name(name, layer) != ""

    def check_all_read(self) -> None:
        """Raises DescriptionError if there is a weight that the description leaves out."""
        if unread := next((name for name, tensor in self._tensors.items() if id(tensor) not in self._read), None):
            raise DescriptionError(f"{unread} is left over")

    def _name(self, name: str, layer: int | None, kind: str = "weight") -> str:
        """The name of a module, or of a parameter that is in none of its own; nothing if there is none."""
        if name in (EMBEDDING, OUTPUT):
            return name
        named = self._architecture.checkpoint_names
        in_row = next((half for half in _HALVES if half in named), "ffn_up_exps") if name in _HALVES else name
        saved = self._architecture.module_name(in_row, layer)
        if not saved:
            return ""
        return self._found(name, saved, kind) or self._found(name, self._renamed(saved, kind), kind)

    def _found(self, name: str, saved: str, kind: str) -> str:
        """The name here of what transformers calls so; nothing if there is none."""
        local = self._local(saved)
        if name in _EXPERTS:
            local = f"{local.rpartition('.')[0]}.{_EXPERTS[name]}"
        there = any(each in self._tensors or each in self._modules for each in (local, f"{local}.{kind}"))
        return local if there else ""

    def _local(self, name: str) -> str:
        """A name below the module that has the layers, wherever that is."""
        for root in (self._architecture.layers.removesuffix("layers"), "model."):
            if name.startswith(root):
                return self._prefix + name.removeprefix(root)
        return name

    def _renamed(self, saved: str, kind: str) -> str:
        """What transformers calls a weight that checkpoints have under this name."""
        key = f"{saved.replace('.experts.', '.experts.0.')}.{kind}"
        renamed: str = rename_source_key(key, *self._transforms)[0]
        return renamed.replace(".experts.0.", ".experts.").removesuffix(f".{kind}")

    @cached_property
    def _transforms(self) -> tuple[list[Any], list[Any]]:
        """How transformers renames the weights of checkpoints, and joins them."""
        transforms = get_model_conversion_mapping(self._model)
        kinds = WeightRenaming, WeightConverter
        first, second = ([each for each in transforms if isinstance(each, kind)] for kind in kinds)
        return first, second
