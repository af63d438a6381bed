"""Measures which heads of a transformers model retrieve, and gives them larger windows, see `cache.retrieval`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel

from h2o_stream.attachment.attention_interface import using_h2o_attention
from h2o_stream.attachment.model_facts import input_device, weight_count
from h2o_stream.base.measurements import LONG_S, read_measurement, save_measurement
from h2o_stream.base.progress import Progress, ProgressCallback, ignore
from h2o_stream.cache.identity import model_digest
from h2o_stream.cache.layer import LayeredCache, LayerSpec
from h2o_stream.cache.recurrent import as_class_for
from h2o_stream.cache.retrieval import PERIOD, num_rows, repeated_tokens, retrieval_windows
from h2o_stream.config import CachePlan

_measured: dict[str, Tensor] = {}
"""Results of `_attention_to_copy` in this process, by model."""


def give_retrieval_heads_more(
    model: PreTrainedModel, specs: Sequence[LayerSpec], progress: ProgressCallback = ignore
) -> list[LayerSpec]:
    """The specs, with larger windows for heads that retrieve.

    Args:
        model: a causal language model that `verify_logits` has accepted.
        specs: the layers of the model. Those with a sliding window of their own stay as they are.
        progress: called after every layer, if heads have to be measured.
    """
    if any(spec.shard for spec in specs):
        retrieval = _gathered(_attention_to_copy(model, specs, progress), model.tp_size)
    else:
        retrieval = _known(model, specs, progress)
    windows = iter(retrieval_windows(retrieval.float().numpy()))
    return [replace(spec, windows=next(windows)) if spec.evicts else spec for spec in specs]


def _gathered(local: Tensor, processes: int) -> Tensor:
    """[layers, Hkv] of all heads, from [layers, n] of each process that shares the model."""
    shards = [local] * distributed.get_world_size()
    distributed.all_gather_object(shards, local)
    first = distributed.get_rank() // processes * processes
    return torch.cat(shards[first : first + processes], 1)


def _known(model: PreTrainedModel, specs: Sequence[LayerSpec], progress: ProgressCallback = ignore) -> Tensor:
    """`_attention_to_copy`, from memory or from the user's cache folder if it was measured before."""
    hidden_from = [spec.sliding or spec.hidden_from for spec in specs]
    key = f"{model_digest(model)} {model.dtype} {list(hidden_from)} {PERIOD} {num_rows(weight_count(model))}"
    if key in _measured:
        return _measured[key]
    with suppress(ValueError, TypeError, RuntimeError):
        shares = torch.tensor(read_measurement("reach", key), dtype=torch.float32, device="cpu")
        if shares.dim() == 2 and len(shares) == sum(spec.evicts for spec in specs):
            return _measured.setdefault(key, shares)
    begun = time.perf_counter()
    _measured[key] = _attention_to_copy(model, specs, progress)
    if time.perf_counter() - begun > LONG_S:
        save_measurement("reach", key, _measured[key].tolist())
    return _measured[key]


@torch.no_grad()
def _attention_to_copy(
    model: PreTrainedModel, specs: Sequence[LayerSpec], progress: ProgressCallback = ignore
) -> Tensor:
    """Fraction of attention on a token's previous occurrence and the one after it: [layers that evict, Hkv] float32."""
    text = model.config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    tokens = repeated_tokens(text.vocab_size, num_rows(weight_count(model)), context)
    repeated, period = torch.from_numpy(tokens).to(input_device(model)), tokens.shape[1] // 2
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
    cache = as_class_for(model, LayeredCache(layers=layers))
    with using_h2o_attention(model):
        positions = torch.arange(2 * period, device=repeated.device).expand(len(repeated), -1)
        model.base_model(repeated, position_ids=positions, past_key_values=cache, h2o_cache=cache, use_cache=True)
    return torch.stack([retrieval[number] for number in sorted(retrieval)])


def _bare(spec: LayerSpec) -> LayerSpec:
    """A layer that sees as far as the model's own, and holds everything."""
    seen = spec.sliding or spec.hidden_from
    return LayerSpec(attends=spec.attends, states=spec.states, chunked=spec.chunked, hidden_from=seen)
