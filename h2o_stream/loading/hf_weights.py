"""The weights of a GGUF file by transformers' names: packed ones as the runtime has them, others read one by one."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from functools import cached_property
from math import prod
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from h2o_stream.base.memory import format_bytes, free_bytes
from h2o_stream.base.progress import Progress, ProgressCallback, ignore
from h2o_stream.errors import OutOfMemoryError, UnsupportedModelError
from h2o_stream.gpu.repacking import TYPES
from h2o_stream.models.fitting import MAX_SHARE
from h2o_stream.models.gguf_header import GgufTensor
from h2o_stream.models.huge_pages import HugePageBuffer
from h2o_stream.models.packed_experts import split_experts
from h2o_stream.models.quantize import packable, packed_kinds
from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.description import DescriptionError
from h2o_stream.native.gguf_types import TensorType
from h2o_stream.native.packing import GGUF_KINDS, ROWS, columns_fit, pack, tiles_shape
from h2o_stream.runtime.families.architecture import parameter_names
from h2o_stream.runtime.gguf_parameters import NOT_WEIGHTS
from h2o_stream.runtime.gguf_weights import GgufWeights
from h2o_stream.runtime.merged import WHOLES, merged
from h2o_stream.runtime.parameters import tensor_name
from h2o_stream.runtime.rotations import Floats
from h2o_stream.runtime.sources import ModelFile


class HfWeights:
    """The weights of a file for a model of transformers.

    Args:
        source: describes the file.
        skeleton: the model on the meta device, made from its config; experts that stay packed are split.
        quantize: ``auto`` if weights in block formats stay packed, ``blocks`` if experts that a GPU reads in them do;
            ``int8`` or ``int4`` packs all that can be.

    Raises:
        UnsupportedModelError: the file has a weight that the model lacks.
    """

    def __init__(self, source: ModelFile, skeleton: Any, quantize: str) -> None:
        self._file, self._architecture, self._parameters = source.file, source.architecture, source.parameters
        self._reader = GgufWeights(self._file, self._architecture, self._parameters, "float32", ignore)
        self._skeleton = skeleton
        if quantize in ("auto", "blocks"):
            self._split_experts(on_gpu=quantize == "blocks")
        self._shapes = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
        order = [*self._architecture.checkpoint_names]
        self._tensors: dict[str, list[GgufTensor]] = {}
        for tensor in sorted(self._file.tensors.values(), key=lambda tensor: (tensor.part, tensor.offset)):
            if self._reader.reads(tensor.name) and not NOT_WEIGHTS.fullmatch(tensor.name):
                self._tensors.setdefault(self._name(tensor), []).append(tensor)
        for tensors in self._tensors.values():
            tensors.sort(key=lambda tensor: order.index(tensor_name(tensor.name)[1]))
        self.kinds: dict[str, MatrixKind] = {}
        if quantize == "auto":
            kinds = ((name.removesuffix(".weight"), self._packed_kind(name)) for name in self._tensors)
            self.kinds = {name: kind for name, kind in kinds if kind}
        elif quantize not in ("none", "blocks"):
            self.kinds = packed_kinds(skeleton, quantize)

    def _split_experts(self, on_gpu: bool) -> None:
        """Replace experts by split ones if all of their matrices can be packed; on a GPU, without gates in turns."""
        experts = [x for name, x in self._file.tensors.items() if "_exps." in name and len(x.shape) == 3]
        kinds = [(GGUF_KINDS.get(tensor.type.name), tensor.shape[-1]) for tensor in experts]
        fused = any("ffn_gate_up_exps." in tensor.name for tensor in experts)
        if on_gpu and (fused or self._architecture.interleaved_experts or any(x.type not in TYPES for x in experts)):
            return
        if kinds and all(kind is not None and columns_fit(kind, columns) for kind, columns in kinds):
            split_experts(self._skeleton, fused=fused)

    def _name(self, tensor: GgufTensor) -> str:
        """The weight that a tensor is, or is part of."""
        layer, inner, kind = tensor_name(tensor.name)
        module = self._architecture.module_name(inner, layer)
        stacked = re.sub(r"experts\.(?:gate|up)_proj$", "experts.gate_up_proj", module)  # of all experts
        for name in (*parameter_names(module, kind or "weight"), *parameter_names(stacked, kind or "weight")):
            if name in self._shapes:
                return name
        model = type(self._skeleton).__name__
        raise UnsupportedModelError(f"{self._file.path.name} has {tensor.name}, which {model} does not have")

    def _packed_kind(self, name: str) -> MatrixKind | None:
        """The packed format of a weight; None if it is not in a block format or its module cannot be packed."""
        module, (first, *others) = name.removesuffix(".weight"), self._tensors[name]
        kind = GGUF_KINDS.get(first.type.name)
        if kind is None or module == name or not packable(self._skeleton.get_submodule(module)):
            return None
        alike = all(GGUF_KINDS.get(other.type.name) == kind and first.shape[0] % ROWS == 0 for other in others)
        name_in_layer = tensor_name(first.name)[1]
        kind = (
            kind if alike and name_in_layer not in WHOLES and not self._is_reordered(name_in_layer) else MatrixKind.INT8
        )
        return kind if columns_fit(kind, self._shapes[name][1]) else None

    def _is_reordered(self, name: str) -> bool:
        """Whether a weight is packed anew, as its numbers are in another order."""
        return self._grouped(name) or self._has_interleaved_columns(name)

    def _grouped(self, name: str) -> bool:
        """Whether rows of one key head are together."""
        return name == "attn_qkv" and self._architecture.fused_by_key_head

    def _has_interleaved_columns(self, name: str) -> bool:
        """Whether value heads in its columns are interleaved by key head."""
        mixer = self._parameters.mixer
        return bool(
            name == "ssm_out" and self._architecture.interleaved_heads and mixer and mixer.heads != mixer.key_heads
        )

    def values(self, name: str) -> Tensor:
        """A weight in float32.

        Raises:
            ModelNotFoundError: it has another shape.
            UnsupportedModelError: its type cannot be dequantized.
        """
        tensors, shape = self._tensors[name], self._shapes[name]
        try:
            numbers = self._numbers(name, tensors)
        except DescriptionError as error:
            raise UnsupportedModelError(f"{self._file.path.name} cannot be served: {error}") from error
        if numbers.size != prod(shape):
            raise self._file.damaged(f"{tensors[0].name} is {tensors[0].shape}, {name} of the model is {tuple(shape)}")
        self.release(name)
        return borrowed(numpy.ascontiguousarray(numbers, numpy.float32)).view(shape)

    def release(self, name: str) -> None:
        """Release the memory pages of a weight."""
        for tensor in self._tensors[name]:
            self._file.release(tensor)

    def _numbers(self, name: str, tensors: list[GgufTensor]) -> Floats:
        inner = tensor_name(tensors[0].name)[1]
        if inner in WHOLES:
            return merged(self._file, *tensors)
        parts = [self._reader.numbers(tensor, as_saved=True).reshape(tensor.shape) for tensor in tensors]
        interleaved = self._architecture.interleaved_experts and len(self._shapes[name]) > 1
        if interleaved and "_exps." in tensors[0].name and ".weight" not in name:
            joined = numpy.stack(parts, 2).reshape(parts[0].shape[0], -1, *parts[0].shape[2:])
            return joined.swapaxes(1, 2) if joined.ndim > 2 else joined
        if inner == "ssm_a":  # `numbers` gives what its logarithm stands for
            return numpy.log(-parts[0])
        if self._has_interleaved_columns(inner):
            mixer = self._parameters.mixer
            assert mixer
            turns = parts[0].reshape(len(parts[0]), -1, mixer.key_heads, mixer.value_size)
            return turns.swapaxes(1, 2)
        joined = parts[0] if len(parts) == 1 else numpy.concatenate(parts, -2)
        return joined[self._by_key_head] if self._grouped(inner) else joined

    @cached_property
    def _by_key_head(self) -> NDArray[numpy.int64]:
        """The order of rows of queries, keys, values and gates in which those of each key head follow one another."""
        mixer = self._parameters.mixer
        assert mixer
        values, parts, first = mixer.heads // mixer.key_heads * mixer.value_size, [], 0
        for size in (mixer.key_size, mixer.key_size, values, values):
            parts.append(first + numpy.arange(mixer.key_heads * size).reshape(mixer.key_heads, size))
            first += mixer.key_heads * size
        return numpy.concatenate(parts, 1).ravel()

    def _tiles(self, name: str, kind: MatrixKind, weights: GgufWeights) -> Tensor | None:
        """What `weights` has of a packed weight; None if that is something else."""
        tensors, (rows, columns) = self._tensors[name], self._shapes[name]
        layer, inner, _ = tensor_name(tensors[0].name)
        if inner in WHOLES:
            return borrowed(weights.matrix(WHOLES[inner], layer, rows, columns).weights)
        if self._is_reordered(inner) or kind != GGUF_KINDS[tensors[0].type.name]:
            return None
        names = ((tensor_name(tensor.name)[1], prod(tensor.shape[:-1])) for tensor in tensors)
        parts = [borrowed(weights.matrix(part, layer, count, columns).weights) for part, count in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def blocks(self, name: str) -> tuple[NDArray[numpy.uint8], TensorType] | None:
        """The blocks [rows, bytes] of a weight and their type, as in the file; None if it has to be made anew."""
        tensors, shape = self._tensors.get(name, []), self._shapes.get(name, ())
        sizes = [(prod(tensor.shape[:-1]), tensor.shape[-1]) for tensor in tensors]  # experts follow one another
        if sizes != [shape] or tensors[0].type.name not in GGUF_KINDS:
            return None
        inner = tensor_name(tensors[0].name)[1]
        if inner in WHOLES or self._is_reordered(inner):
            return None
        blocks, order = self._file.blocks(tensors[0]).reshape(shape[0], -1), self._reader.row_order(inner)
        return blocks if order is None else blocks[order], tensors[0].type

    def packed(
        self, weights: GgufWeights | None, dtype: torch.dtype, progress: ProgressCallback = ignore
    ) -> dict[str, Tensor]:
        """All weights for `from_pretrained`: those of `kinds` packed, one by one, and others in `dtype`.

        Packed are those of `weights`, which are of the same file, where they are the same; without them all anew.

        Raises:
            OutOfMemoryError: there is not enough free memory.
            DescriptionError: what was kept of them is damaged.
        """
        kinds = {name: self.kinds.get(name.removesuffix(".weight")) for name in self._tensors}
        shapes = {name: tiles_shape(kind, *self._shapes[name]) for name, kind in kinds.items() if kind}
        if weights is not None and weights.kept is None:
            self._check_fits(kinds, dtype)
        pages, made = HugePageBuffer(() if weights else shapes.values()), dict[str, Tensor]()
        for number, (name, kind) in enumerate(kinds.items()):
            if kind is None:
                made[name] = self.values(name).to(dtype)
                continue
            tiles = self._tiles(name, kind, weights) if weights else None
            if tiles is None:
                tiles = pack(self.values(name).contiguous(), kind, None if weights else pages.take(shapes[name]))
            made[f"{name.removesuffix('.weight')}.tiles"] = tiles
            progress(Progress("packing", number + 1, len(kinds)))
        return made

    def _check_fits(self, kinds: Mapping[str, MatrixKind | None], dtype: torch.dtype) -> None:
        shapes = ((kind, self._shapes[name]) for name, kind in kinds.items())
        size = sum(prod(tiles_shape(kind, *shape)) if kind else dtype.itemsize * prod(shape) for kind, shape in shapes)
        if size > MAX_SHARE * (free := free_bytes()):
            raise OutOfMemoryError(
                f"{self._file.path.name} needs {format_bytes(size)} of memory, {format_bytes(free)} are free; "
                "take a smaller --model"
            )

    def lazy(self, dtype: torch.dtype) -> dict[str, Any]:
        """All weights for `from_pretrained`, in `dtype` and read one by one."""
        return {name: _LazyWeight(self, name, dtype) for name in self._tensors}


class _LazyWeight:
    """A weight that is read on access, like a slice of safetensors."""

    def __init__(self, weights: HfWeights, name: str, dtype: torch.dtype) -> None:
        self._weights, self._name, self._dtype = weights, name, dtype

    def __getitem__(self, index: Any) -> Tensor:
        return self._weights.values(self._name).to(self._dtype, copy=True)


def borrowed(array: NDArray[Any]) -> Tensor:
    """A tensor with the memory of an array, which must not be written to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it may be mapped from a file
        return torch.from_numpy(array)
