"""Matrices that GGUF files have in parts, of which they are put together, to be packed anew in 8 bits."""

from __future__ import annotations

import math

import numpy
from numpy.typing import NDArray

from h2o_stream.models.gguf import GgufFile
from h2o_stream.models.gguf_header import GgufTensor
from h2o_stream.native.description import DescriptionError
from h2o_stream.runtime.rotations import Floats

PARTS = {"attn_kv_b": ("attn_k_b", "attn_v_b")}
"""What llama.cpp calls the parts of a matrix: keys of all heads by columns, and values."""

WHOLES = {part: whole for whole, parts in PARTS.items() for part in parts}


def merged(file: GgufFile, keys: GgufTensor, values: GgufTensor) -> Floats:
    """What takes a latent vector to keys and values: [heads * (elements + value size), rank], head by head.

    Given are keys of the elements that are not rotated, [heads, rank, elements], and values [heads, value size, rank].

    Raises:
        DescriptionError: their shapes do not fit.
    """
    if len(keys.shape) != 3 or len(values.shape) != 3 or keys.shape[:2] != (values.shape[0], values.shape[2]):
        raise DescriptionError(f"{keys.name} is {keys.shape}, {values.name} {values.shape}")
    parts = numpy.concatenate((dequantized(file, keys).swapaxes(1, 2), dequantized(file, values)), 1)
    whole: Floats = parts.reshape(-1, parts.shape[-1])
    return whole


def dequantized(file: GgufFile, tensor: GgufTensor) -> Floats:
    """The numbers of a tensor; raises DescriptionError if its type cannot be read."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    blocks: NDArray[numpy.uint8] = file.blocks(tensor).reshape(-1, tensor.nbytes // math.prod(tensor.shape[:-1]))
    try:
        values: Floats = dequantize(blocks, GGMLQuantizationType(tensor.type)).reshape(tensor.shape)
    except NotImplementedError as error:
        raise DescriptionError(f"{tensor.name} is {tensor.type.name}, which cannot be read") from error
    return values
