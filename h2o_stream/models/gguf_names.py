"""Maps tensors of a GGUF file to weights of a transformers model, using transformers' own tables.

llama.cpp renames weights, and for some families permutes rows, adds offsets or transposes. transformers has a processor
per family that reverts this. Its effect on a tensor is found by passing row indices instead of weights.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor, nn

from h2o_stream.errors import ModelNotFoundError, UnsupportedModelError
from h2o_stream.models.gguf import GgufFile
from h2o_stream.models.gguf_families import FamilyProcessor, family_of
from h2o_stream.models.gguf_header import GgufTensor
from h2o_stream.models.gguf_hybrids import QUERIES_TO_GATES, rows_by_key_head
from h2o_stream.models.gguf_latent import parts_by_weight

_NOT_WEIGHTS = re.compile(r"rope_freqs\.weight|rope_factors_\w+\.weight|blk\.\d+\.attn_rot_embd|.*\.rope_freqs\.weight")
"""Tensors that transformers computes from its config; see `gguf_config`."""


@dataclass(frozen=True)
class Weight:
    """A weight of a model and its tensor in a file, with `others` that it also consists of, such as half of fused
    experts.

    With `same_rows` the rows equal those of the tensor, in the `order` [rows] int64 if there is one, and those of
    `others` follow.
    """

    name: str
    shape: torch.Size
    tensor: GgufTensor
    others: tuple[GgufTensor, ...] = ()
    same_rows: bool = False
    order: Tensor | None = None
    _source: _Source = field(repr=False, kw_only=True)

    @property
    def parts(self) -> tuple[GgufTensor, ...]:
        """All tensors that it consists of."""
        return self.tensor, *self.others

    @property
    def nbytes(self) -> int:
        """Bytes of them in the file."""
        return sum(part.nbytes for part in self.parts)

    def values(self) -> Tensor:
        """The weight in float32; may be a read-only view of the file.

        Raises:
            UnsupportedModelError: this type cannot be dequantized.
        """
        if not self.same_rows:
            values = self._source.processed(self.name, self.parts)
        else:
            parts = [self._source.values(part) for part in self.parts]
            values = torch.cat(parts).view(self.shape)
            values = values if self.order is None else values[self.order]
        if values.shape != self.shape:
            raise _shape_error(self._source.file, self.tensor, tuple(values.shape), self)
        return values


def model_weights(file: GgufFile, model: nn.Module) -> list[Weight]:
    """The weights of a model (a causal language model made from its config) that a file contains, in file order.

    Raises:
        ModelNotFoundError: a weight of the model is missing or has another shape.
        UnsupportedModelError: the file has a weight that the model lacks.
    """
    source = _Source(file, model)
    tensors_by_weight: dict[str, list[GgufTensor]] = {}
    for tensor in sorted(file.tensors.values(), key=lambda tensor: (tensor.part, tensor.offset)):
        if name := source.name(tensor):
            tensors_by_weight.setdefault(name, []).append(tensor)
        elif not _NOT_WEIGHTS.fullmatch(tensor.name) and not _is_unused(tensor.name, model.config):
            raise UnsupportedModelError(
                f"{file.path.name} has {tensor.name}, which {type(model).__name__} does not have"
            )
    needed = model.state_dict()
    tied = getattr(model, "all_tied_weights_keys", {})
    for name in needed:
        if name not in tensors_by_weight and name not in tied and _is_weight(model, name):
            raise file.damaged(f"it has no {name}")
    return [
        _weight(source, name, needed[name].shape, *tensors)
        for name, tensors in tensors_by_weight.items()
        if name in needed
    ]


def _is_unused(name: str, config: Any) -> bool:
    """Whether a tensor is of layers after the last one, or of keys and values in place of which others are used.

    The former only guess further tokens.
    """
    found, config = re.match(r"blk\.(\d+)\.(attn_(k|v|k_norm)\.)?", name), config.get_text_config()
    if found is None:
        return False
    borrowing: int = getattr(config, "num_kv_shared_layers", 0) if found[2] else 0
    return int(found[1]) >= int(config.num_hidden_layers) - borrowing


def block_tensor(file: GgufFile, tensor: GgufTensor) -> Tensor:
    """`GgufFile.blocks` for torch, which must not write to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # numpy array is not writable
        return torch.from_numpy(file.blocks(tensor))


def _is_weight(model: nn.Module, name: str) -> bool:
    owner, _, last = name.rpartition(".")
    return last in model.get_submodule(owner)._parameters


def _weight(source: _Source, name: str, shape: torch.Size, tensor: GgufTensor, *others: GgufTensor) -> Weight:
    weight = Weight(name, shape, tensor, others, _source=source)
    size = sum(math.prod(part.shape) for part in (tensor, *others))
    if size != shape.numel():
        raise _shape_error(source.file, tensor, tensor.shape, weight)
    if (math.prod(tensor.shape[:-1]), tensor.shape[-1]) == shape != tensor.shape:  # experts below each other
        return replace(weight, same_rows=True)
    if not others and tensor.name.endswith("_exps.bias") and shape == (size,):
        return replace(weight, same_rows=True)
    if others and all(len(part.shape) == 2 for part in (tensor, *others)) and len(shape) == 2:
        first, *rest = sorted((tensor, *others), key=lambda part: part.name)  # the gate, then up
        if name.endswith(QUERIES_TO_GATES):
            by_key_head = torch.from_numpy(rows_by_key_head(source.config))
            return replace(weight, tensor=rest[0], others=(first,), same_rows=True, order=by_key_head)
        return replace(weight, tensor=first, others=tuple(rest), same_rows=True)
    if others or tensor.shape != shape:
        return weight
    rows = source.row_indices(tensor)
    if rows.shape != (shape[0], 2) or np.any(rows[:, 1] != rows[:, 0] + 1):
        return weight
    order, unchanged = rows[:, 0] // 2, np.arange(shape[0])
    if np.array_equal(order, unchanged):
        return replace(weight, same_rows=True)
    if np.array_equal(np.sort(order), unchanged):
        return replace(weight, same_rows=True, order=torch.from_numpy(order))
    return weight


def _shape_error(file: GgufFile, tensor: GgufTensor, shape: tuple[int, ...], weight: Weight) -> ModelNotFoundError:
    return file.damaged(f"{tensor.name} is {shape}, {weight.name} of the model is {tuple(weight.shape)}")


def _name_source(model: Any) -> SimpleNamespace:
    """The interface that transformers needs to map names, for a model and its base model.

    Given a whole model, transformers would visit every module and rebuild the table for each.
    """

    def source(module: Any, children: Sequence[tuple[str, Any]]) -> SimpleNamespace:
        return SimpleNamespace(config=model.config, state_dict=module.state_dict, named_children=lambda: children)

    base = getattr(model, model.base_model_prefix, None)
    return source(model, [] if base is None else [(model.base_model_prefix, source(base, []))])


class _Source:
    """A file with transformers' name table and processor for it."""

    def __init__(self, file: GgufFile, model: Any) -> None:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

        self.file = file
        config, family = model.config.get_text_config().to_dict(), family_of(file)
        self.config: dict[str, Any] = config
        processor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)
        self._processor = FamilyProcessor(family, config) if family else processor(config=config)
        try:
            names = get_gguf_hf_weights_map(_name_source(model), self._processor, model_type=file.architecture)
        except NotImplementedError as error:
            raise UnsupportedModelError(f"{file.path.name} cannot be served: {str(error).splitlines()[0]}") from error
        self._names: dict[str, str] = names | parts_by_weight(names)

    def name(self, tensor: GgufTensor) -> str | None:
        """The weight that a tensor is, or is part of."""
        return self._names.get(tensor.name) or self._names.get(tensor.name.removesuffix(".weight"))

    def values(self, tensor: GgufTensor) -> Tensor:
        """The elements of a tensor as stored in the file, float32."""
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(tensor.type.name)
        if dtype:
            return block_tensor(self.file, tensor).view(dtype).view(tensor.shape).float()
        rows = self.file.blocks(tensor).reshape(-1, tensor.nbytes // math.prod(tensor.shape[:-1]))
        try:
            return torch.from_numpy(dequantize(rows, GGMLQuantizationType(tensor.type))).view(tensor.shape)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{self.file.path.name} cannot be served: {tensor.name} is {tensor.type.name}, which cannot be read"
            ) from error

    def processed(self, name: str, tensors: tuple[GgufTensor, ...]) -> Tensor:
        """A weight of the model, converted by the processor."""
        collected: dict[str, Tensor] = {}
        for tensor in tensors:
            values = self._process(self.values(tensor).numpy(), tensor.name, collected)
            if values is not None:
                collected[name] = torch.from_numpy(np.ascontiguousarray(values, np.float32))
        return collected[name]

    def row_indices(self, tensor: GgufTensor) -> np.ndarray[Any, Any]:
        """Pass a matrix [rows, 2] of consecutive numbers through the processor."""
        numbers = np.arange(2 * tensor.shape[0]).reshape(-1, 2)
        try:
            with np.errstate(all="ignore"):
                result = self._process(numbers, tensor.name, {})
        except ValueError:  # the processor depends on the number of columns
            result = None
        return np.zeros((0, 2)) if result is None else result

    def _process(
        self, values: np.ndarray[Any, Any], name: str, collected: dict[str, Tensor]
    ) -> np.ndarray[Any, Any] | None:
        """Process a tensor; returns None if the result went into `collected`."""
        result = self._processor.process(
            weights=values, name=name, tensor_key_mapping=self._names, parsed_parameters={"tensors": collected}
        )
        return None if result.name is None else result.weights
