"""GGUF files of any shape with random weights, to time llama.cpp.

Tensors have the types that llama.cpp's quantizer chooses. Scaled RoPE and sliding windows, which do not change the
speed, are left out.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy
from gguf import GGML_QUANT_SIZES, GGUFWriter, LlamaFileType, TokenType
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

from h2o_lab.random_models.weights import DEVIATION
from h2o_stream.errors import ConfigError, DataError, file_errors

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Of GGUF, by the model type of transformers."""

_TYPES = {
    "int4": (LlamaFileType.MOSTLY_Q4_K_M, Type.Q4_K, Type.Q6_K),
    "int8": (LlamaFileType.MOSTLY_Q8_0, Type.Q8_0, Type.Q8_0),
    "float16": (LlamaFileType.MOSTLY_F16, Type.F16, Type.F16),
    "bfloat16": (LlamaFileType.MOSTLY_BF16, Type.BF16, Type.BF16),
    "float32": (LlamaFileType.ALL_F32, Type.F32, Type.F32),
}
"""Type of the file, of most matrices, and of the matrices that need more bits."""

_FALLBACKS = {Type.Q4_K: Type.Q5_0, Type.Q6_K: Type.Q8_0, Type.Q5_0: Type.F16, Type.Q8_0: Type.F16}
"""llama.cpp's types for rows that are not a whole number of blocks."""

_SCALES = {Type.Q4_K: {0: 1.0, 2: 7.5}, Type.Q6_K: {208: 1.0}}
"""Byte offsets of the half-precision scales in a block, and their relative sizes."""

_SAMPLE = 2**20
"""Random weights; larger matrices repeat them."""


@dataclass(frozen=True)
class _Tensor:
    """A matrix [rows, columns] or a vector."""

    name: str
    shape: tuple[int, ...]
    type: Type

    @property
    def byte_shape(self) -> tuple[int, ...]:
        numbers, size = GGML_QUANT_SIZES[self.type]
        return (*self.shape[:-1], self.shape[-1] // numbers * size)

    @property
    def nbytes(self) -> int:
        return math.prod(self.byte_shape)


def check_architecture(config: Any) -> None:
    """Check that a model can be written.

    Raises:
        ConfigError: GGUF has no architecture for it, or it has biases that the architecture does not have.
    """
    biased = getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False)
    if biased or config.model_type not in _ARCHITECTURES:
        name = f"{config.model_type} with biases" if biased else config.model_type
        served = ", ".join(_ARCHITECTURES)
        raise ConfigError(f"no random GGUF file of {name} can be made, only of {served}; leave --peers llama.cpp out")


def write_random_gguf(config: Any, precision: str, path: Path) -> Iterator[tuple[int, int]]:
    """Write a file for a config of transformers. Yields before each tensor: bytes of weights so far, and in all.

    The precision is ``int4`` (Q4_K_M), ``int8`` (Q8_0), or a floating dtype.

    Raises:
        ConfigError: see `check_architecture`.
        DataError: the disk is too small, or the file cannot be written.
    """
    check_architecture(config)
    tensors = _tensors(config, precision)
    total, free = sum(tensor.nbytes for tensor in tensors), shutil.disk_usage(path.parent).free
    if free < total:
        raise DataError(
            f"a random GGUF file takes {total / 1e9:.1f} GB, {path.parent} has {free / 1e9:.1f}; let TMPDIR name "
            "another folder"
        )
    writer, done = _writer(config, precision, tensors, path), 0
    with file_errors(path), closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            yield done, total
            writer.write_tensor_data(_random(tensor))
            done += tensor.nbytes


def _tensors(config: Any, precision: str) -> list[_Tensor]:
    _, default, best = _TYPES[precision]
    hidden, inner, count, size = config.hidden_size, config.intermediate_size, config.num_hidden_layers, _head(config)
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size
    tied = config.tie_word_embeddings
    tensors = [_matrix("token_embd", config.vocab_size, hidden, best if tied else default)]
    tensors += [] if tied else [_matrix("output", config.vocab_size, hidden, best)]
    tensors += [_vector("output_norm.weight", hidden)]
    vectors = {"attn_norm.weight": hidden, "ffn_norm.weight": hidden}
    if config.model_type == "qwen2":
        vectors |= {"attn_q.bias": queries, "attn_k.bias": keys, "attn_v.bias": keys}
    if config.model_type == "qwen3":
        vectors |= {"attn_q_norm.weight": size, "attn_k_norm.weight": size}
    for layer in range(count):
        mixed = best if _gets_more_bits(layer, count) else default
        tensors += [_vector(f"blk.{layer}.{name}", length) for name, length in vectors.items()]
        tensors += [
            _matrix(f"blk.{layer}.attn_q", queries, hidden, default),
            _matrix(f"blk.{layer}.attn_k", keys, hidden, default),
            _matrix(f"blk.{layer}.attn_v", keys, hidden, mixed),
            _matrix(f"blk.{layer}.attn_output", hidden, queries, default),
            _matrix(f"blk.{layer}.ffn_gate", inner, hidden, default),
            _matrix(f"blk.{layer}.ffn_up", inner, hidden, default),
            _matrix(f"blk.{layer}.ffn_down", hidden, inner, mixed),
        ]
    return tensors


def _gets_more_bits(layer: int, count: int) -> bool:
    """Of values and `ffn_down` in Q4_K_M: the first and last eighth of the layers, and every third between them."""
    return layer < count // 8 or layer >= 7 * count // 8 or (layer - count // 8) % 3 == 2


def _head(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _matrix(name: str, rows: int, columns: int, kind: Type) -> _Tensor:
    while columns % GGML_QUANT_SIZES[kind][0]:
        kind = _FALLBACKS[kind]
    return _Tensor(f"{name}.weight", (rows, columns), kind)


def _vector(name: str, size: int) -> _Tensor:
    return _Tensor(name, (size,), Type.F32)


def _writer(config: Any, precision: str, tensors: list[_Tensor], path: Path) -> GGUFWriter:
    """A file with everything but the data of its tensors."""
    writer = GGUFWriter(path, _ARCHITECTURES[config.model_type])
    writer.add_file_type(_TYPES[precision][0])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(_head(config))
    writer.add_value_length(_head(config))
    writer.add_rope_dimension_count(_head(config))
    writer.add_rope_freq_base((config.rope_parameters or {}).get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    single = [f"<0x{byte:02X}>" for byte in range(256)]
    words = [*single, *(f"w{number}" for number in range(256, config.vocab_size))][: config.vocab_size]
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([TokenType.BYTE if word in single[:256] else TokenType.NORMAL for word in words])
    for tensor in tensors:
        numbers = numpy.dtype(numpy.float32 if tensor.type == Type.F32 else numpy.uint8)
        shape = tensor.shape if tensor.type == Type.F32 else tensor.byte_shape
        writer.add_tensor_info(tensor.name, shape, numbers, tensor.nbytes, raw_dtype=tensor.type)
    return writer


def _random(tensor: _Tensor) -> Any:
    """Its data: random for matrices, ones for norms, zeros for biases."""
    if len(tensor.shape) == 1:
        return numpy.full(tensor.shape, not tensor.name.endswith(".bias"), numpy.float32)
    return numpy.resize(_sample(tensor.type), tensor.byte_shape)


@cache
def _sample(kind: Type) -> Any:
    """The bytes of `_SAMPLE` weights, normally distributed or nearly so."""
    random = numpy.random.default_rng(0)
    if kind not in _SCALES:
        normal = random.standard_normal((_SAMPLE // 256, 256), numpy.float32) * DEVIATION
        return quantize(normal, kind).view(numpy.uint8).reshape(-1)
    numbers, size = GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (_SAMPLE // numbers, size), dtype=numpy.uint8)
    factor = 1.0
    for _ in range(2):  # the first pass measures the deviation, the second corrects it
        for offset, size_ratio in _SCALES[kind].items():
            blocks[:, offset : offset + 2] = numpy.frombuffer(numpy.float16(factor * size_ratio).tobytes(), numpy.uint8)
        factor = DEVIATION / float(dequantize(blocks, kind).std())
    return blocks.reshape(-1)
