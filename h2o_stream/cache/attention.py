"""The attention function that transformers calls for an attached model.

`attach` registers it by name; the model's forward hands the cache through as the keyword `h2o_cache`, since
the attention interface passes extra keywords on but not ``past_key_values``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import AttentionInterface

if TYPE_CHECKING:
    from h2o_stream.cache.caches import H2OCache

ATTENTION_NAME = "h2o_stream"


def h2o_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    h2o_cache: H2OCache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend through the layer's slots; see `SlotLayer.attend` for shapes.

    ``attention_mask`` is None: masks inside a chunk are made from token indices. Dropout is ignored, this
    cache is for inference.
    """
    assert h2o_cache is not None, "the model is attached, but its forward did not pass h2o_cache on"
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return h2o_cache.layers[module.layer_idx].attend(query, key, value, scaling), None


AttentionInterface.register(ATTENTION_NAME, h2o_attention)
