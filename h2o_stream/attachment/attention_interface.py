"""The attention function that transformers calls for an attached model.

`attach` selects it by name. The model's forward passes the cache through as the keyword `h2o_cache`, because the
attention interface gets extra keywords but not ``past_key_values``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from h2o_stream.cache.attention import LogitTransform
from h2o_stream.cache.layer import LayeredCache
from h2o_stream.errors import H2OStreamError, UnsupportedModelError
from h2o_stream.native.gradients import without_gradient

ATTENTION_NAME = "h2o_stream"

_UNSUPPORTED = ("position_bias", "indices", "block_indices")
"""Keywords of some models' attention that must not be ignored: biases, sparse indices."""


def h2o_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    h2o_cache: LayeredCache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend through the layer's slots; see `attend` for shapes.

    ``attention_mask`` is None: masks are made from token indices, and the layer knows its sliding window. ``s_aux``
    [Hq] are learned sinks. The output has no gradient, see `without_gradient`.

    Raises:
        UnsupportedModelError: a part of the model was called by itself, or a second model that shares the config; the
            model did not pass the cache through; or it wants an unsupported kind of attention.
        H2OStreamError: there is attention dropout, as in training.
    """
    if h2o_cache is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not pass extra keywords on to its attention; or a part of an attached model "
            "was called by itself (call the model), or another model shares its config (give it a copy)"
        )
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"{type(module).__name__} uses {name} in its attention, which is not served")
    if dropout:
        raise H2OStreamError(
            "an attached model is for inference, in training mode it drops attention; call model.eval()"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = h2o_cache.layer_of(module, key)
    device = h2o_cache.storage_device or query.device
    transform = LogitTransform(scaling, softcap, None if s_aux is None else s_aux.detach().to(device))
    autocast = torch.is_autocast_enabled(device.type)
    with torch.autocast(device.type, enabled=False) if autocast else nullcontext():
        q, k, v = (x.to(device) for x in (query, key, value))
        output = layer.attend(q, k, v, transform, h2o_cache.padding, h2o_cache.kernels)
    return without_gradient(output.to(query.device), query, key, value), None


AttentionInterface.register(ATTENTION_NAME, h2o_attention)


def attention_names(model: PreTrainedModel) -> list[tuple[Any, str]]:
    """The attention implementation of each config of a model; submodels may differ."""
    having = (module for module in model.modules() if "config" in vars(module) or hasattr(type(module), "config"))
    configs = {id(module.config): module.config for module in having}  # asking the others would take ten times as long
    return [
        (config, config._attn_implementation) for config in configs.values() if isinstance(config, PreTrainedConfig)
    ]


@contextmanager
def using_attention(model: PreTrainedModel, attention: list[tuple[Any, str]]) -> Iterator[None]:
    """Set the attention implementations that `attention_names` gave, and restore the present ones afterwards."""
    before = attention_names(model)
    _set_attention(attention)
    try:
        yield
    finally:
        _set_attention(before)


@contextmanager
def using_h2o_attention(model: PreTrainedModel) -> Iterator[None]:
    """Set `h2o_attention` as the attention implementation, and restore the present one afterwards."""
    with using_attention(model, attention_names(model)):
        model.set_attn_implementation(ATTENTION_NAME)
        yield


def _set_attention(attention: list[tuple[Any, str]]) -> None:
    for config, name in attention:  # setting a config also sets those inside it, which come later
        config._attn_implementation = name
