"""How far back each layer of a model reaches, and what part of the slots it should have for it.

Most layers look at the first tokens and at recent ones; a few have heads that find what was said long ago and copy it.
Such heads show themselves without any text: in a random sequence that is read twice they attend to where the present
token stood before, and to what came after it (induction heads, arXiv 2209.11895).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from h2o_stream.cache.attention import ATTENTION_NAME
from h2o_stream.cache.policies import make_policy
from h2o_stream.cache.slots import SlotLayer
from h2o_stream.cache.state import model_digest
from h2o_stream.cache.window import LayerSpec
from h2o_stream.config import CachePlan

_PERIOD = 128
"""Tokens of the random sequence; it is read twice."""

_FLOOR = 0.3
"""Part of an equal window that every layer keeps."""

_NOTICEABLE = 0.2
"""Attention to the copy below which no head is said to reach back: a model without such heads has equal windows."""

_measured: dict[str, list[float]] = {}
"""Shares by model, for the life of the process."""


def shared_out(model: PreTrainedModel, specs: Sequence[LayerSpec]) -> list[LayerSpec]:
    """The specs with the share of the slots that each layer should have.

    Of what a head attends to sharply, a window of w tokens misses a part that falls about as 1/w. The least is missed
    in all when windows go with the square root of what each layer would miss (docs/fidelity.md).

    Args:
        model: a causal language model that `support.prove` has accepted.
        specs: its layers. Those with a sliding window of their own take no part.
    """
    key = f"{model_digest(model)} {[spec.sliding for spec in specs]}"
    if key not in _measured:
        sharing = torch.tensor([spec.sliding is None for spec in specs])
        heads = _attention_to_copy(model, [spec.sliding or spec.hidden_from for spec in specs])
        reach = heads.mean(1)
        need = reach.sqrt() if float(heads[sharing].max()) >= _NOTICEABLE else torch.ones_like(reach)
        # Sixteenths, so that another dtype or another machine seldom comes to anything else.
        shares = ((_FLOOR + (1 - _FLOOR) * need / need[sharing].mean()) * 16).round()
        _measured[key] = (shares / shares[sharing].mean()).tolist()
    return [replace(spec, share=share) for spec, share in zip(specs, _measured[key], strict=True)]


@torch.no_grad()
def _attention_to_copy(model: PreTrainedModel, hidden_from: Sequence[int | None]) -> Tensor:
    """[layers, Hkv]: the part of its attention that a head gives to the present token's last place and the next.

    Args:
        model: the model, with positions of its own.
        hidden_from: of every layer, the age from which the model hides keys from it.
    """
    text = model.config.get_text_config()
    period = min(_PERIOD, (getattr(text, "max_position_embeddings", None) or 2 * _PERIOD) // 2)
    plan = CachePlan("recent", 2 * period, 0, 0, 2 * period, 1.0, "absolute", 0, 2 * period)
    reach: list[Tensor] = [torch.empty(0)] * len(hidden_from)
    layers = [SlotLayer(plan, make_policy(plan), None, hidden) for hidden in hidden_from]

    def watch(number: int, probs: Tensor, there: Tensor, before: int) -> None:
        query = torch.arange(period, 2 * period, device=probs.device)
        copied = probs[..., query, query - period] + probs[..., query, query - period + 1]
        reach[number] = copied.mean((0, 2, 3)).cpu()

    for number, layer in enumerate(layers):
        layer.watch = partial(watch, number)
    once = torch.randint(text.vocab_size, (1, period), generator=torch.Generator().manual_seed(0))
    repeated = torch.cat((once, once), 1).to(model.device)
    cache: Any = Cache(layers=layers)
    cache.padding = None
    previous = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION_NAME)
    try:
        positions = torch.arange(2 * period, device=model.device)[None]
        model.base_model(repeated, position_ids=positions, past_key_values=cache, h2o_cache=cache, use_cache=True)
    finally:
        model.set_attn_implementation(previous)
    return torch.stack(reach)
