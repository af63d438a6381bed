"""The tensors of a GGUF file as those of a folder of packed weights, see `packed_file`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy
from numpy.typing import NDArray

from h2o_stream.models.gguf_header import GgufTensor
from h2o_stream.native.description import DescriptionError
from h2o_stream.runtime.gguf_parameters import NOT_WEIGHTS
from h2o_stream.runtime.gguf_weights import GgufWeights, is_dense
from h2o_stream.runtime.packed_file import Entry
from h2o_stream.runtime.parameters import tensor_name
from h2o_stream.runtime.safetensors_files import SAFETENSORS_NAMES
from h2o_stream.runtime.weights import packed_name


def gguf_entries(source: GgufWeights) -> Iterator[Entry]:
    """All tensors of a file that are weights in transformers.

    Raises:
        DescriptionError: one has no name in transformers, or cannot be packed.
    """
    for tensor in source.file.tensors.values():
        layer, inner, kind = tensor_name(tensor.name)
        if NOT_WEIGHTS.fullmatch(tensor.name) or not source.reads(tensor.name):
            continue
        module = packed_name(source.architecture, inner, layer)
        if not module:
            raise DescriptionError(f"{tensor.name} has no name in transformers")
        if not is_dense(tensor):
            if form := source.form(tensor):
                yield Entry.packed(module, form.kind, form.tiles, partial(source.repack, tensor))
        elif source.architecture.stored_as_in_gguf:
            if tensor.type.name != "F32":
                raise DescriptionError(f"{tensor.name} is {tensor.type.name}")
            fill = partial(numpy.copyto, src=source.file.blocks(tensor))
            yield Entry(f"{module}.{kind or 'weight'}", "F32", tensor.shape, tensor.nbytes, fill)
        else:
            shape = (math.prod(tensor.shape),) if kind == "bias" else tensor.shape  # biases of all experts are one
            if inner == "ffn_gate_inp_shexp" or ".moe_statics." in module:
                shape = (1, math.prod(shape))
            name = source.architecture.parameter_name(inner, layer, kind)
            width = 4 if source.dtype == "float32" else 2
            fill = partial(_write_numbers, source, tensor)
            yield Entry(name, SAFETENSORS_NAMES[source.dtype], shape, width * math.prod(shape), fill)


def _write_numbers(source: GgufWeights, tensor: GgufTensor, out: NDArray[numpy.uint8]) -> None:
    numbers = source.numbers(tensor, as_saved=True)
    if source.dtype == "bfloat16":
        out[:] = (numbers.view(numpy.uint32) >> 16).astype(numpy.uint16).view(numpy.uint8)
    else:
        out[:] = numbers.view(numpy.uint8)
