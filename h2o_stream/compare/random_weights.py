"""Models of any shape with random weights, made as they stay: packed weights never exist in a wider form.

Such a model says nothing, but takes the time and the memory of a real one.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from h2o_stream.config import ModelConfig
from h2o_stream.errors import ConfigError
from h2o_stream.models.load import device_of, dtype_of
from h2o_stream.models.packed import PackedEmbedding, PackedLinear
from h2o_stream.models.pages import into_large_pages
from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.packing import ROWS, fits, pack

DEVIATION = 0.02
"""Standard deviation of random weights."""

_SAMPLE_ROWS = 1024
"""Rows that are drawn and packed; larger matrices repeat them."""

_KINDS = {"int8": MatrixKind.INT8, "int4": MatrixKind.INT4}


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
    """How weights are kept: ``int8``, ``int4`` or the name of a dtype."""
    dtype = str(dtype_of(choice.dtype, device_of(choice.device))).removeprefix("torch.")
    return choice.quantize if choice.quantize in _KINDS else dtype


def random_model(path: Path, choice: ModelConfig) -> Any:
    """A model with random weights, on the device it computes on.

    Args:
        path: see `read_settings`.
        choice: dtype, device and quantization; its model is ignored.

    Raises:
        ConfigError: the settings cannot be read, or weights cannot be packed for this device.
    """
    from transformers import AutoModelForCausalLM

    config, device = read_settings(path), device_of(choice.device)
    dtype = dtype_of(choice.dtype, device)
    kind = _KINDS.get(choice.quantize)
    if kind is None:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if device.type != "cpu":
        raise ConfigError(f"--quantize {choice.quantize} packs weights for the CPU, not for {device}; leave it out")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    _pack_layers(model, kind, tied)
    model.to_empty(device=device)
    if tied:
        _tie(model)
    for module in model.modules():
        module._is_hf_initialized = False
    model.initialize_weights()  # norms, RoPE and whatever else was not packed
    _fill(model)
    into_large_pages(model)
    return model


def _pack_layers(model: Any, kind: MatrixKind, tied: bool) -> None:
    """Exchange layers for packed ones without weights; the output layer has 8 bits at least."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and fits(kind, child.in_features):
                own = MatrixKind.INT8 if child is head else kind
                setattr(parent, name, PackedLinear(own, child.in_features, child.out_features, child.bias))
            elif child is embedding and type(child) is nn.Embedding and fits(kind, child.embedding_dim):
                own = MatrixKind.INT8 if tied else kind
                packed = PackedEmbedding(own, child.num_embeddings, child.embedding_dim, child.weight.dtype)
                setattr(parent, name, packed)


def _tie(model: Any) -> None:
    """Let the output layer have the weights of the embedding again."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if isinstance(embedding, PackedEmbedding):
        head.tiles = embedding.tiles
    else:
        model.tie_weights()


def _fill(model: Any) -> None:
    """Random weights for the packed layers, and zeros for their biases."""
    _sample.cache_clear()
    for module in model.modules():
        if isinstance(module, PackedLinear):
            _fill_tiles(module.tiles, module.kind, module.out_features, module.in_features)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, PackedEmbedding):
            _fill_tiles(module.tiles, module.kind, module.num_embeddings, module.embedding_dim)
    _sample.cache_clear()


def _fill_tiles(tiles: Tensor, kind: MatrixKind, rows: int, columns: int) -> None:
    sample = _sample(kind, columns)
    for part in tiles.split(len(sample)):
        part.copy_(sample[: len(part)])
    if rows % ROWS:
        pack(torch.randn(rows % ROWS, columns) * DEVIATION, kind, out=tiles[-1:])


@cache
def _sample(kind: MatrixKind, columns: int) -> Tensor:
    """Tiles of `_SAMPLE_ROWS` random rows."""
    return pack(torch.randn(_SAMPLE_ROWS, columns) * DEVIATION, kind)
