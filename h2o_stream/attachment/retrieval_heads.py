"""Finds the retrieval heads of a model and gives them larger windows.

Most heads attend to the first tokens and to recent ones; a few find a passage from long ago and copy it. Such heads
can be found without any text: in a repeated random sequence they attend to the previous occurrence of the present token
and to what came after it (induction heads, arXiv 2209.11895).
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from statistics import fmean

import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel

from h2o_stream.attachment.attention_interface import using_h2o_attention
from h2o_stream.attachment.measurements import LONG_S, read_measurement, save_measurement
from h2o_stream.attachment.model_facts import input_device, weight_count
from h2o_stream.cache.identity import model_digest
from h2o_stream.cache.layer import LayeredCache, LayerSpec
from h2o_stream.cache.recurrent import as_class_for
from h2o_stream.cache.windows import HeadWindow
from h2o_stream.config import CachePlan
from h2o_stream.progress import Progress, ProgressCallback, ignore

_PERIOD = 256
"""Tokens of a random sequence; it is read twice."""

_ROWS = 2
"""Random sequences."""

_LARGE = 10**9
"""Weights of a model that gets one sequence."""

_FLOOR = 0.3
"""Fraction of an equal window that every head keeps."""

_MIN_RETRIEVAL = 0.2
"""Attention to the copy that a retrieval head pays at least; a model without such heads gets equal windows."""

_STEP = 1.25
"""Ratio between the shares of two head groups: heads of a layer whose shares round to the same power form one."""

_measured: dict[str, Tensor] = {}
"""Results of `_attention_to_copy` in this process, by model."""


def give_retrieval_heads_more(
    model: PreTrainedModel, specs: Sequence[LayerSpec], progress: ProgressCallback = ignore
) -> list[LayerSpec]:
    """The specs, with larger windows for heads that retrieve.

    A window of w tokens misses a fraction of what a head attends to sharply that falls about as 1/w. The total is
    smallest if windows grow with the square root of what each head would miss (docs/fidelity.md).

    Args:
        model: a causal language model that `verify_logits` has accepted.
        specs: its layers. Those with a sliding window of their own stay as they are.
        progress: called after every layer, if heads have to be measured.
    """
    if any(spec.shard for spec in specs):
        retrieval = _gathered(_attention_to_copy(model, specs, progress), model.tp_size)
    else:
        retrieval = _known(model, specs, progress)
    found = float(retrieval.max()) >= _MIN_RETRIEVAL
    need = retrieval.sqrt() if found else torch.ones_like(retrieval)
    shares = iter((_FLOOR + (1 - _FLOOR) * need / need.mean()).tolist())
    layers = [_grouped(next(shares)) if spec.evicts else () for spec in specs]
    groups = [group for layer in layers for group in layer]
    mean = fmean([group.share for group in groups], [group.weight for group in groups])
    return [
        replace(spec, windows=tuple(replace(group, share=group.share / mean) for group in layer) or spec.windows)
        for spec, layer in zip(specs, layers, strict=True)
    ]


def _gathered(local: Tensor, processes: int) -> Tensor:
    """[layers, Hkv] of all heads, from [layers, n] of each process that shares the model."""
    shards = [local] * distributed.get_world_size()
    distributed.all_gather_object(shards, local)
    first = distributed.get_rank() // processes * processes
    return torch.cat(shards[first : first + processes], 1)


def _grouped(shares: Sequence[float]) -> tuple[HeadWindow, ...]:
    """The heads of a layer in groups of about the same share."""
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for head, share in enumerate(shares):
        groups[round(math.log(share, _STEP))].append(head)
    # Sixteenths, so that another dtype or machine seldom gives another result.
    return tuple(
        HeadWindow(tuple(heads), round(16 * fmean(shares[head] for head in heads)) / 16)
        for _, heads in sorted(groups.items())
    )


def _known(model: PreTrainedModel, specs: Sequence[LayerSpec], progress: ProgressCallback = ignore) -> Tensor:
    """`_attention_to_copy`, from memory or from the user's cache folder if it was measured before."""
    hidden_from = [spec.sliding or spec.hidden_from for spec in specs]
    key = f"{model_digest(model)} {model.dtype} {list(hidden_from)} {_PERIOD} {_rows(model)}"
    if key in _measured:
        return _measured[key]
    with suppress(ValueError, TypeError, RuntimeError):
        found = torch.tensor(read_measurement("reach", key), dtype=torch.float32, device="cpu")
        if found.dim() == 2 and len(found) == sum(spec.evicts for spec in specs):
            return _measured.setdefault(key, found)
    begun = time.perf_counter()
    _measured[key] = _attention_to_copy(model, specs, progress)
    if time.perf_counter() - begun > LONG_S:
        save_measurement("reach", key, _measured[key].tolist())
    return _measured[key]


def _rows(model: PreTrainedModel) -> int:
    """Random sequences for a model: a large one takes long, and one sequence finds nearly all of its heads."""
    return _ROWS if weight_count(model) < _LARGE else 1


@torch.no_grad()
def _attention_to_copy(
    model: PreTrainedModel, specs: Sequence[LayerSpec], progress: ProgressCallback = ignore
) -> Tensor:
    """Fraction of attention on the previous occurrence of the current token and the token after it.

    Returns:
        [layers that evict, Hkv] float32.
    """
    text = model.config.get_text_config()
    period = min(_PERIOD, (getattr(text, "max_position_embeddings", None) or 2 * _PERIOD) // 2)
    plan = CachePlan("recent", 2 * period, 0, 0, 2 * period, 1.0, "absolute", 0, 2 * period)
    retrieval: dict[int, Tensor] = {}
    layers = [_bare(spec).make_layer(plan, number) for number, spec in enumerate(specs)]

    def watch(number: int, probs: Tensor, visible: Tensor) -> None:
        query = torch.arange(period, 2 * period, device=probs.device)
        copied = probs[..., query, query - period] + probs[..., query, query - period + 1]
        retrieval[number] = copied.mean((0, 2, 3)).cpu()
        progress(Progress("measuring", number + 1, len(layers)))

    for number, (layer, spec) in enumerate(zip(layers, specs, strict=True)):
        if spec.evicts:
            layer.head_groups[0].watch = partial(watch, number)
    once = torch.randint(
        text.vocab_size, (_rows(model), period), generator=torch.Generator().manual_seed(0), device="cpu"
    )
    repeated = torch.cat((once, once), 1).to(input_device(model))
    cache = as_class_for(model, LayeredCache(layers=layers))
    with using_h2o_attention(model):
        positions = torch.arange(2 * period, device=input_device(model)).expand(len(once), -1)
        model.base_model(repeated, position_ids=positions, past_key_values=cache, h2o_cache=cache, use_cache=True)
    return torch.stack([retrieval[number] for number in sorted(retrieval)])


def _bare(spec: LayerSpec) -> LayerSpec:
    """A layer that sees as far as the model's own, and holds everything."""
    seen = spec.sliding or spec.hidden_from
    return LayerSpec(attends=spec.attends, states=spec.states, chunked=spec.chunked, hidden_from=seen)
