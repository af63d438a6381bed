"""The weights of a transformers model where they are, by llama.cpp's names; see `runtime.weights.Weights`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from h2o_stream.native.description import DescriptionError, Matrix
from h2o_stream.native.torch_modules import dense_matrix, embedding_of, matrix_of, raw_tensor, text_modules
from h2o_stream.runtime.families.architecture import EMBEDDING, OUTPUT, Architecture
from h2o_stream.runtime.rotations import Floats
from h2o_stream.runtime.weights import Weights, as_used

_STACKED, _FUSED = "ffn_up_exps", "ffn_gate_up_exps"


class ModuleWeights(Weights):
    """Matrices are tensors of the model; vectors are copied only if they are not in float32.

    Args:
        model: has a list of layers.
        architecture: has the names of its modules.
    """

    def __init__(self, model: Any, architecture: Architecture) -> None:
        self._architecture, modules = architecture, dict(text_modules(model))
        self._modules = modules | {"lm_head": model.get_output_embeddings(), "": model.get_input_embeddings()}
        self._tensors: Mapping[str, Tensor] = {
            name: tensor for prefix, module in modules.items() for name, tensor in _tensors_of(module, prefix)
        }
        layers = next((name for name in modules if name.rpartition(".")[2] == "layers"), None)
        if layers is None or None in self._modules.values():
            raise DescriptionError(f"{type(model).__name__} has no list of layers, or no embedding or output layer")
        self._prefix = layers.removesuffix("layers")
        self._read: set[int] = set()

    def _name(self, name: str, layer: int | None) -> str:
        """The name of a module or of a parameter that is in none of its own."""
        if name in (EMBEDDING, OUTPUT):
            return "" if name == EMBEDDING else "lm_head"
        names = self._architecture.checkpoint_names
        found = self._architecture.module_name(name, layer)
        if name == _FUSED and name not in names:
            found = self._architecture.module_name(_STACKED, layer).replace("up_proj", "gate_up_proj")
        return found.replace("model.", self._prefix, 1) if found.startswith("model.") else found

    def matrix(self, name: str, layer: int | None, rows: int, columns: int) -> Matrix:
        """See `Weights`."""
        found = self._name(name, layer)
        if found in self._modules:
            module, where = self._modules[found], found or "the embedding"
            matrix = (matrix_of if found else embedding_of)(module, where)
            self._read.update(id(tensor) for _, tensor in _tensors_of(module, "", recurse=True))
            rows = matrix.rows if layer is None else rows
        elif found in self._tensors:
            where, weights, bias = found, self._tensors[found], self._tensors.get(f"{found}_bias")
            matrix = dense_matrix(weights.flatten(0, -2), None if bias is None else bias.flatten(), where)
            self._read |= {id(weights), id(bias)}
        else:
            raise DescriptionError(f"it has no {found or name}")
        matrix.check_shape(rows, columns, where)
        return matrix

    def vector(self, name: str, layer: int | None, kind: str = "weight") -> Floats | None:
        """See `Weights`."""
        module = self._name(name, layer)
        tensor = self._tensors.get(module, self._tensors.get(f"{module}.{kind}")) if module else None
        if tensor is None:
            return None
        self._read.add(id(tensor))
        numbers: Floats = raw_tensor(tensor, module).float().cpu().numpy().reshape(-1)
        return as_used(numbers, self._architecture, name, kind)

    def small_matrix(self, name: str, layer: int | None, rows: int, columns: int, dtype: str) -> Matrix:
        """See `Weights`."""
        found = self._name(name, layer)
        if f"{found}.weight" not in self._tensors:
            raise DescriptionError(f"it has no {found or name}")
        weights, bias = self._tensors[f"{found}.weight"], self._tensors.get(f"{found}.bias")
        self._read |= {id(weights), id(bias)}
        matrix = dense_matrix(weights, bias, found)
        matrix.check_shape(rows, columns, found)
        return matrix

    def has(self, name: str, layer: int) -> bool:
        """See `Weights`."""
        found = self._name(name, layer)
        return bool(found) and (found in self._modules or found in self._tensors)

    def check_all_read(self) -> None:
        """Raises DescriptionError if there is a weight that the description leaves out."""
        if unread := next((name for name, tensor in self._tensors.items() if id(tensor) not in self._read), None):
            raise DescriptionError(f"{unread} is left over")


def _tensors_of(module: nn.Module, prefix: str, recurse: bool = False) -> list[tuple[str, Tensor]]:
    """The parameters of a module and the buffers that are saved with it, by name."""
    parameters = module.named_parameters(prefix, recurse)
    buffers = module.named_buffers(prefix, recurse)
    passing = module._non_persistent_buffers_set
    return [*parameters, *(x for x in buffers if x[0].rpartition(".")[2] not in passing)]
