"""Models of any shape with random weights, which take the time and memory of real ones.

Packed weights are created packed; they never exist in a wider form.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from h2o_stream.config import ModelConfig
from h2o_stream.errors import ConfigError
from h2o_stream.models.huge_pages import HugePageBuffer
from h2o_stream.models.packed_experts import split_stacked_experts
from h2o_stream.models.packed_layers import PackedEmbedding, PackedLinear
from h2o_stream.models.precision import device_of, dtype_of
from h2o_stream.models.quantize import packed_kinds, replace_module, tie_head, untie_head
from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.packing import ROWS, pack
from h2o_stream.native.pointers import dtype_name

DEVIATION = 0.02
"""Standard deviation of random weights."""

_SAMPLE_ROWS = 1024
"""Random rows that are packed; larger matrices repeat them."""

_PACKED = ("int8", "int4")


def read_settings(path: Path) -> Any:
    """The config of a model of transformers, from its config.json or the folder of one.

    Raises:
        ConfigError: it is missing or describes no causal language model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        if not path.exists():
            raise ConfigError(f"--random-weights {path}: no such file")
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(f"--random-weights {path}: {reason}") from error
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ConfigError(f"--random-weights {path}: {config.model_type} is not a causal language model")
    return config


def precision_of(choice: ModelConfig) -> str:
    """How weights are stored: ``int8``, ``int4`` or the name of a dtype."""
    dtype = dtype_of(choice.dtype, device_of(choice.device))
    return choice.quantize if choice.quantize in _PACKED else dtype_name(dtype)


def random_model(path: Path, choice: ModelConfig) -> Any:
    """A model with random weights, on the device it computes on: the settings of `path` in the precision of `choice`.

    Raises:
        ConfigError: the settings cannot be read, or weights cannot be packed for this device.
    """
    from transformers import AutoModelForCausalLM

    config, device = read_settings(path), device_of(choice.device)
    dtype = dtype_of(choice.dtype, device)
    if choice.quantize not in _PACKED:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if device.type != "cpu":
        raise ConfigError(f"--quantize {choice.quantize} packs weights for the CPU, not for {device}; leave it out")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    split_stacked_experts(model)
    kinds = packed_kinds(model, choice.quantize)
    tied = untie_head(model, kinds)
    for name, kind in kinds.items():
        replace_module(model, name, kind)
    if tied:
        tie_head(model)
    model.to_empty(device=device)
    if model.all_tied_weights_keys:  # an embedding that could not be packed
        model.tie_weights()
    for module in model.modules():
        module._is_hf_initialized = False
    model.initialize_weights()  # norms, RoPE and everything else that is not packed
    _fill([model.get_submodule(name) for name in kinds])
    return model


def _fill(layers: Sequence[Any]) -> None:
    """Fill packed layers with random weights, and biases with zeros."""
    pages = HugePageBuffer(layer.tiles.shape for layer in layers)
    for layer in layers:
        rows, columns = _size(layer)
        layer.tiles, sample = pages.take(layer.tiles.shape), _sample(layer.kind, columns)
        for tiles in layer.tiles.split(len(sample)):
            tiles.copy_(sample[: len(tiles)])
        if rows % ROWS:
            pack(torch.randn(rows % ROWS, columns) * DEVIATION, layer.kind, out=layer.tiles[-1:])
        if getattr(layer, "bias", None) is not None:
            layer.bias.data.zero_()
    _sample.cache_clear()


def _size(layer: PackedLinear | PackedEmbedding) -> tuple[int, int]:
    if isinstance(layer, PackedLinear):
        return layer.out_features, layer.in_features
    return layer.num_embeddings, layer.embedding_dim


@cache
def _sample(kind: MatrixKind, columns: int) -> Tensor:
    """Tiles of `_SAMPLE_ROWS` random rows."""
    tiles: Tensor = pack(torch.randn(_SAMPLE_ROWS, columns) * DEVIATION, kind)
    return tiles
