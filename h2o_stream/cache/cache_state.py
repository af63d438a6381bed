"""The state of a cache as tensors by name, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from math import isfinite
from statistics import StatisticsError, fmean
from typing import Any

import torch
from torch import Tensor

from h2o_stream.cache.audit import check_slots
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.identity import policy_source
from h2o_stream.cache.policies import merged
from h2o_stream.cache.recurrent import load_states, states_of
from h2o_stream.cache.state import (
    FINGERPRINT,
    check_fingerprint,
    checksummed,
    decode_json,
    encode_json,
    require_tensor,
    verify_checksums,
    whole_numbers,
    with_prefix,
)
from h2o_stream.cache.windowed_cache import WindowedCache
from h2o_stream.cache.windows import HeadWindow
from h2o_stream.config import DEFAULT_WINDOW
from h2o_stream.errors import H2OStreamError

_KEYS = {"long_term_scores": "lasting"}
"""What tensors are called in a state, where that differs from the attribute."""

_RANGES = ("pins", "transient")
"""Ranges of token indices in a state: attributes of the cache."""


def state_of(cache: WindowedCache) -> dict[str, Tensor]:
    """A copy of everything needed to continue exactly."""
    state = {
        f"{prefix}{_KEYS.get(name, name)}": tensor.clone(memory_format=torch.contiguous_format)
        for prefix, group, _ in _groups(cache)
        for name, tensor in group.tensors().items()
    }
    for number, layer in enumerate(cache.layers):
        state |= {f"{number}.{name}": tensor.clone() for name, tensor in states_of(layer).items()}
    for name in _RANGES:
        ranges = getattr(cache, name)
        state[name] = torch.tensor(
            [(tokens.start, tokens.stop) for tokens in ranges], dtype=torch.int64, device="cpu"
        ).flatten()
    state["progress"] = torch.tensor([cache.tokens.columns, cache.first_prompt or DEFAULT_WINDOW], device="cpu")
    state["filled"] = torch.tensor([group.filled for group in cache.head_groups], device="cpu")
    state["queries_per_key"] = torch.tensor([group.queries_per_key for group in cache.head_groups], device="cpu")
    windows = [[(window.heads, window.share) for window in spec.windows] for spec in cache.specs]
    state["budgets"] = encode_json({"groups": windows, "windows": list(cache.windows.sizes)})
    state[FINGERPRINT] = encode_json(_fingerprint(cache, cache.head_groups[0].dtype))
    return checksummed(state)


def load_state(cache: WindowedCache, state: Mapping[str, Tensor]) -> None:
    """Continue from a state. If that fails, the cache is left half changed.

    Args:
        cache: a shallow copy; its layers are replaced.
        state: as `state_of` gives it.

    Raises:
        H2OStreamError: the state does not fit, or is damaged.
    """
    layers, sizes = cache.layers, [_head_sizes(group) for group in cache.head_groups if group.is_initialized]
    columns, prompt = whole_numbers(state, "progress", 2)
    cache.plan = cache.config.for_prompt(prompt).plan(cache.max_distance)
    begin = f"{next(number for number, spec in enumerate(cache.specs) if spec.attends)}."
    first = next((name for name in state if name.startswith(begin) and name.endswith(".keys")), f"{begin}keys")
    check_fingerprint(state, _fingerprint(cache, require_tensor(state, first).dtype))
    verify_checksums(state)
    _load_windows(cache, decode_json(state, "budgets"), prompt)
    names = {key: name for name, key in _KEYS.items()}
    filled = whole_numbers(state, "filled", len(cache.head_groups))
    for group, count in zip(cache.head_groups, whole_numbers(state, "queries_per_key", len(filled)), strict=True):
        group.queries_per_key = count
    for number, (prefix, group, device) in enumerate(_groups(cache)):
        tensors = {names.get(key, key): tensor for key, tensor in with_prefix(state, prefix).items()}
        if number == 0:
            cache.tokens.lengths = tuple(require_tensor(tensors, "seen").flatten().tolist())
            cache.tokens.columns = columns
        _load_group(group, tensors, device)
        group.filled = filled[number]
    rows = len(cache.tokens.lengths)
    for number, (layer, before, spec) in enumerate(zip(cache.layers, layers, cache.specs, strict=True)):
        load_states(layer, with_prefix(state, f"{number}."), rows, before, spec.device)
    cache.first_prompt = prompt
    cache.windows.pins, cache.windows.transient = (_ranges(state, name) for name in _RANGES)
    if not 0 < cache.seen_tokens <= columns:
        raise H2OStreamError(f"the state is damaged: it has seen {cache.seen_tokens} tokens in {columns} columns")
    for number, group in enumerate(cache.head_groups):
        if len(sizes) == len(cache.head_groups) and sizes[number] != _head_sizes(group):
            raise H2OStreamError(f"the state does not fit: heads of slots {number} are of another size")
        check_slots(group, f"slots {number}")
    cache.assign_windows()


def _ranges(state: Mapping[str, Tensor], name: str) -> tuple[range, ...]:
    """Ranges of token indices, in order and apart."""
    bounds = whole_numbers(state, name)
    ranges = tuple(map(range, bounds[::2], bounds[1::2]))
    if len(bounds) % 2 or ranges != merged(ranges):
        raise H2OStreamError(f"the state is damaged: {name} is {bounds}")
    return ranges


def _groups(cache: WindowedCache) -> Iterator[tuple[str, HeadGroup, torch.device | None]]:
    """Every head group, what the names of its tensors begin with, and its device."""
    for number, (layer, spec) in enumerate(zip(cache.layers, cache.specs, strict=True)):
        for part, group in enumerate(layer.head_groups):
            yield f"{number}." if len(layer.head_groups) == 1 else f"{number}.{part}.", group, spec.device


def _head_sizes(group: HeadGroup) -> tuple[int, int]:
    """Sizes of a key and of a value."""
    return group.store.keys.shape[-1], group.store.values.shape[-1]


def _load_group(group: HeadGroup, tensors: Mapping[str, Tensor], device: torch.device | None) -> None:
    """Copy the tensors of a head group, whose tokens are counted already."""
    keys, values = (require_tensor(tensors, name)[:, :, :1].to(device or "cpu") for name in ("keys", "values"))
    slots, minimum = require_tensor(tensors, "index").shape[-1], group.slots_needed(group.tokens.lengths)
    if not minimum <= slots <= group.plan.window + group.schedule.max_held + group.spare:
        raise H2OStreamError(f"the state does not fit: it has {slots} slots, {minimum} are needed")
    if keys.dim() != 4 or keys.shape[:3] != values.shape[:3] or keys.dtype != values.dtype:
        raise H2OStreamError(f"the state does not fit: values are {tuple(values.shape)} {values.dtype}")
    if group.heads is not None and keys.shape[1] != len(group.heads):
        raise H2OStreamError(f"the state does not fit: {keys.shape[1]} heads of a group of {len(group.heads)}")
    group.allocate(keys, values, slots)
    for name, tensor in group.tensors().items():
        tensor.copy_(require_tensor(tensors, name, like=tensor))


def _load_windows(cache: WindowedCache, saved: Mapping[str, Any], prompt: int) -> None:
    """Make empty layers with the groups and windows of the saved stream, whatever was measured here."""
    try:
        layers = [tuple(HeadWindow(tuple(heads), share) for heads, share in layer) for layer in saved["groups"]]
        cache.specs = tuple(replace(spec, windows=layer) for spec, layer in zip(cache.specs, layers, strict=True))
        sizes = saved["windows"]
        if not all(map(_covers_layer, layers)):
            raise ValueError(layers)
        cache.make_layers(prompt)
        mean, window = fmean(sizes, cache.windows.weights), cache.plan.window
        if not window - 1 <= mean <= window or not all(type(n) is int and n > 0 for n in sizes):
            raise ValueError(sizes)
        cache.windows.set_sizes(cache.evicting_groups, sizes)
    except (KeyError, TypeError, ValueError, StatisticsError) as error:
        raise H2OStreamError(f"the state does not fit: its budgets are {saved}") from error


def _covers_layer(windows: Sequence[HeadWindow]) -> bool:
    """Whether groups of heads name every head of a layer once, or are one group of all heads."""
    heads = sorted(head for window in windows for head in window.heads)
    named = len(windows) == 1 or all(window.heads for window in windows)
    shares = all(isfinite(window.share) and window.share > 0 for window in windows)
    return bool(windows) and named and heads == list(range(len(heads))) and shares


def _fingerprint(cache: WindowedCache, dtype: torch.dtype) -> dict[str, Any]:
    fingerprint = {"dtype": str(dtype), "model": cache.model_digest(), "policy": asdict(cache.plan)}
    return fingerprint | {"policy's source": policy_source(cache.plan)}
