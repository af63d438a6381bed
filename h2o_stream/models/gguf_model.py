"""Loads the weights of a GGUF file: block formats become packed tiles, everything else floating-point tensors."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from h2o_stream.errors import OutOfMemoryError
from h2o_stream.memory import format_bytes, free_bytes
from h2o_stream.models.fitting import MAX_SHARE
from h2o_stream.models.gguf import GgufFile
from h2o_stream.models.gguf_names import Weight, model_weights
from h2o_stream.models.huge_pages import HugePageBuffer
from h2o_stream.models.packed_experts import split_experts
from h2o_stream.models.quantize import PackedConfig, packable
from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.packing import GGUF_KINDS, ROWS, columns_fit, pack, repack, tiles_shape
from h2o_stream.progress import Progress, ProgressCallback


def packed_state_dict(
    file: GgufFile, skeleton: Any, dtype: torch.dtype, progress: ProgressCallback
) -> tuple[dict[str, Tensor], PackedConfig]:
    """The weights of a GGUF file for `from_pretrained`: matrices in block formats as tiles, all others in `dtype`.

    The skeleton is the model on the meta device. The file is read once and in order; `progress` gets the bytes read.

    Raises:
        OutOfMemoryError: there is not enough free memory.
    """
    _split_packed_experts(file, skeleton)
    plans = [(weight, _packed_kind(weight, skeleton)) for weight in model_weights(file, skeleton)]
    shapes = [  # in bytes
        (*weight.shape, dtype.itemsize) if kind is None else tiles_shape(kind, *weight.shape) for weight, kind in plans
    ]
    size, free = sum(map(prod, shapes)), free_bytes()
    if size > MAX_SHARE * free:
        raise OutOfMemoryError(
            f"{file.path.name} needs {format_bytes(size)} of memory, {format_bytes(free)} are free; "
            "take a smaller --model"
        )
    pages, weights, done = HugePageBuffer(shapes), dict[str, Tensor](), 0
    modules: dict[str, str] = {}
    total = sum(weight.nbytes for weight, _ in plans)
    for weight, kind in plans:
        progress(Progress("reading", done, total))
        if kind is None:
            values = weight.values()
            weights[weight.name] = pages.take(values.shape, dtype).copy_(values)
        else:
            module = weight.name.removesuffix(".weight")
            weights[f"{module}.tiles"], modules[module] = _load_tiles(file, weight, kind, pages), kind.name
        _release(file, weight)
        done += weight.nbytes
    progress(Progress("reading", total, total))
    return weights, PackedConfig(modules=modules)


def _release(file: GgufFile, weight: Weight) -> None:
    for part in weight.parts:
        file.release(part)


def _split_packed_experts(file: GgufFile, skeleton: Any) -> None:
    """Replace experts by split ones if all of their matrices in a file can be packed."""
    kinds = [
        (GGUF_KINDS.get(tensor.type.name), tensor.shape[-1])
        for tensor in file.tensors.values()
        if len(tensor.shape) == 3 and "_exps." in tensor.name
    ]
    if kinds and all(kind is not None and columns_fit(kind, columns) for kind, columns in kinds):
        split_experts(skeleton, fused=any("ffn_gate_up_exps." in name for name in file.tensors))


def _packed_kind(weight: Weight, skeleton: Any) -> MatrixKind | None:
    """Packed format of a weight; None if it is not in a block format or its module cannot be packed."""
    kind = GGUF_KINDS.get(weight.tensor.type.name)
    module = skeleton.get_submodule(weight.name.rpartition(".")[0])
    if kind is None or not packable(module):
        return None
    alike = all(GGUF_KINDS.get(part.type.name) == kind and part.shape[0] % ROWS == 0 for part in weight.parts)
    in_order = weight.order is None and alike
    kind = kind if weight.same_rows and (in_order or not weight.others) else MatrixKind.INT8
    return kind if columns_fit(kind, weight.shape[1]) else None


def _load_tiles(file: GgufFile, weight: Weight, kind: MatrixKind, pages: HugePageBuffer) -> Tensor:
    rows, columns = weight.shape
    tiles = pages.take(tiles_shape(kind, rows, columns))
    is_ordered = weight.order is None or not weight.others
    if weight.same_rows and is_ordered and kind == GGUF_KINDS[weight.tensor.type.name]:
        first = 0
        for part in weight.parts:
            count = prod(part.shape[:-1])
            into = tiles[first : first + -(-count // ROWS)]
            repack(file.blocks(part), part.type, kind, count, columns, weight.order, into)
            first += count // ROWS
    else:
        pack(weight.values().contiguous(), kind, tiles)
    return tiles


class _LazyWeight:
    """A weight that is read on access, like a slice of safetensors."""

    def __init__(self, file: GgufFile, weight: Weight, dtype: torch.dtype) -> None:
        self._file, self._weight, self._dtype = file, weight, dtype

    def __getitem__(self, index: Any) -> Tensor:
        values = self._weight.values().to(self._dtype, copy=True)
        _release(self._file, self._weight)
        return values


def lazy_state_dict(file: GgufFile, skeleton: Any, dtype: torch.dtype) -> dict[str, Any]:
    """The weights of a GGUF file for `from_pretrained`, all in `dtype` and read one by one. Skeleton as above."""
    return {weight.name: _LazyWeight(file, weight, dtype) for weight in model_weights(file, skeleton)}
