"""How far back each head of a model reaches, and what part of the slots it should have for it.

Most heads look at the first tokens and at recent ones; a few find what was said long ago and copy it.
Such heads show themselves without any text: in a random sequence that is read twice they attend to where the present
token stood before, and to what came after it (induction heads, arXiv 2209.11895).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from statistics import fmean, pvariance
from typing import Any

import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from h2o_stream.cache.budgets import HeadGroup
from h2o_stream.cache.identity import model_digest
from h2o_stream.cache.notes import LONG_S, read_note, write_note
from h2o_stream.cache.policies import make_policy
from h2o_stream.cache.slots import SlotLayer
from h2o_stream.cache.support import attention_of_ours, home_of, size_of
from h2o_stream.cache.window import LayerSpec
from h2o_stream.config import CachePlan
from h2o_stream.progress import Progress, ProgressCallback, ignore

_PERIOD = 256
"""Tokens of a random sequence; it is read twice."""

_ROWS = 2
"""Random sequences."""

_LARGE = 10**9
"""Weights of a model that gets one sequence."""

_FLOOR = 0.5
"""Part of an equal window that every head keeps."""

_NOTICEABLE = 0.2
"""Attention to the copy below which no head is said to reach back: a model without such heads has equal windows."""

_APART = 1.5
"""Ratio of the shares from which on two groups of heads in a layer have windows of their own."""

_measured: dict[str, Tensor] = {}
"""What `_attention_to_copy` gave, by model, for the life of the process."""


def shared_out(
    model: PreTrainedModel, specs: Sequence[LayerSpec], progress: ProgressCallback = ignore
) -> list[LayerSpec]:
    """The specs with the share of the slots that the heads of each layer should have.

    Of what a head attends to sharply, a window of w tokens misses a part that falls about as 1/w. The least is missed
    in all when windows go with the square root of what each head would miss (docs/fidelity.md).

    Args:
        model: a causal language model that `proof.prove` has accepted.
        specs: its layers. Those with a sliding window of their own take no part.
        progress: told after every layer, where heads have to be measured.
    """
    hidden_from = [spec.sliding or spec.hidden_from for spec in specs]
    if any(spec.shard for spec in specs):
        reach = _gathered(_attention_to_copy(model, hidden_from, progress), model.tp_size)
    else:
        reach = _known(model, hidden_from, progress)
    sharing = torch.tensor([spec.sliding is None for spec in specs])
    need = reach.sqrt() if float(reach[sharing].max()) >= _NOTICEABLE else torch.ones_like(reach)
    shares = _FLOOR + (1 - _FLOOR) * need / need[sharing].mean()
    grouped = [() if spec.sliding else _grouped(own.tolist()) for spec, own in zip(specs, shares, strict=True)]
    groups = [group for own in grouped for group in own]
    mean = fmean([group.share for group in groups], [group.count for group in groups])
    return [
        replace(spec, groups=tuple(replace(group, share=group.share / mean) for group in own) or spec.groups)
        for spec, own in zip(specs, grouped, strict=True)
    ]


def _gathered(own: Tensor, processes: int) -> Tensor:
    """[layers, Hkv] of all heads, from the [layers, n] that each of the processes has that share a model."""
    parts = [own] * distributed.get_world_size()
    distributed.all_gather_object(parts, own)
    first = distributed.get_rank() // processes * processes
    return torch.cat(parts[first : first + processes], 1)


def _grouped(shares: Sequence[float]) -> tuple[HeadGroup, ...]:
    """The heads of a layer in one group, or in two if the far-reaching ones stand clearly apart from the others."""
    order = sorted(range(len(shares)), key=lambda head: shares[head])
    cuts = [(order[:cut], order[cut:]) for cut in range(1, len(order))]
    apart = [fmean(shares[i] for i in far) / fmean(shares[i] for i in near) for near, far in cuts]
    if not cuts or max(apart) < _APART:
        parts = [order]
    else:
        # The cut that leaves the least variance inside the groups.
        spread = [sum(pvariance([shares[i] for i in part]) * len(part) for part in cut) for cut in cuts]
        parts = list(cuts[spread.index(min(spread))])
    # Sixteenths, so that another dtype or another machine seldom comes to anything else.
    return tuple(HeadGroup(tuple(sorted(part)), round(16 * fmean(shares[i] for i in part)) / 16) for part in parts)


def _known(model: PreTrainedModel, hidden_from: Sequence[int | None], progress: ProgressCallback = ignore) -> Tensor:
    """`_attention_to_copy`, from memory or from the user's cache folder if it was measured before."""
    key = f"{model_digest(model)} {model.dtype} {list(hidden_from)} {_PERIOD} {_rows(model)}"
    if key in _measured:
        return _measured[key]
    with suppress(ValueError, TypeError, RuntimeError):
        found = torch.tensor(read_note("reach", key), dtype=torch.float32)
        if found.dim() == 2 and len(found) == len(hidden_from):
            return _measured.setdefault(key, found)
    begun = time.perf_counter()
    _measured[key] = _attention_to_copy(model, hidden_from, progress)
    if time.perf_counter() - begun > LONG_S:
        write_note("reach", key, _measured[key].tolist())
    return _measured[key]


def _rows(model: PreTrainedModel) -> int:
    """Random sequences for a model: a large one takes long, and one sequence puts nearly all heads in their place."""
    return _ROWS if size_of(model) < _LARGE else 1


@torch.no_grad()
def _attention_to_copy(
    model: PreTrainedModel, hidden_from: Sequence[int | None], progress: ProgressCallback = ignore
) -> Tensor:
    """[layers, Hkv]: the part of its attention that a head gives to the present token's last place and the next.

    Args:
        model: the model, with positions of its own.
        hidden_from: of every layer, the age from which the model hides keys from it.
        progress: told after every layer.
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
        progress(Progress("measuring", number + 1, len(layers)))

    for number, layer in enumerate(layers):
        layer.watch = partial(watch, number)
    once = torch.randint(text.vocab_size, (_rows(model), period), generator=torch.Generator().manual_seed(0))
    repeated = torch.cat((once, once), 1).to(home_of(model))
    cache: Any = Cache(layers=layers)
    cache.padding = cache.place = None
    with attention_of_ours(model):
        positions = torch.arange(2 * period, device=home_of(model)).expand(len(once), -1)
        model.base_model(repeated, position_ids=positions, past_key_values=cache, h2o_cache=cache, use_cache=True)
    return torch.stack(reach)
