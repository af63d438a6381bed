"""The attention function that transformers calls for an attached model.

`attach` registers it by name; the model's forward hands the cache through as the keyword `h2o_cache`, since
the attention interface passes extra keywords on but not ``past_key_values``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import AttentionInterface

from h2o_stream.cache.gradients import without_gradient
from h2o_stream.cache.attention import LogitTransform
from h2o_stream.errors import H2OStreamError, UnsupportedModelError

if TYPE_CHECKING:
    from h2o_stream.cache.h2o_cache import H2OCache

ATTENTION_NAME = "h2o_stream"

_NOT_SERVED = ("s_aux", "sinks", "position_bias", "indices", "block_indices")
"""What some models hand to their attention and would be wrong to ignore: learned sinks, biases, sparse choices."""


def h2o_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    h2o_cache: H2OCache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend through the layer's slots; see `HeadGroup.attend` for shapes.

    ``attention_mask`` is None: masks inside a chunk are made from token indices. The model's sliding window is
    the layer's own affair. What comes out has no gradient, see `without_gradient`.

    Raises:
        UnsupportedModelError: the model did not hand the cache on, or wants an attention that is not ours.
        H2OStreamError: attention is to be dropped at random, as in training.
    """
    if h2o_cache is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not pass extra keywords on to its attention, or a part of an attached model "
            "was called by itself; call the model"
        )
    for name in _NOT_SERVED:
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"{type(module).__name__} uses {name} in its attention, which is not served")
    if dropout:
        raise H2OStreamError(
            "an attached model is for inference, in training mode it drops attention; call model.eval()"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = h2o_cache.layers[module.layer_idx]
    there = h2o_cache.place or query.device
    mixed = layer.attend(query.to(there), key.to(there), value.to(there), LogitTransform(scaling, softcap), h2o_cache.padding)
    return without_gradient(mixed.to(query.device), query, key, value), None


AttentionInterface.register(ATTENTION_NAME, h2o_attention)
