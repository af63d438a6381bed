"""The state of a cache as arrays by name, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from math import isfinite
from statistics import StatisticsError, fmean
from types import MappingProxyType
from typing import Any

import numpy

from h2o_stream.cache.audit import check_slots
from h2o_stream.cache.protection import merged
from h2o_stream.cache.slots import Slots
from h2o_stream.cache.source import policy_source
from h2o_stream.cache.state import (
    FINGERPRINT,
    Array,
    State,
    check_fingerprint,
    checksummed,
    decode_json,
    dtype_of,
    encode_json,
    require_array,
    verify_checksums,
    whole_numbers,
)
from h2o_stream.cache.window_rules import WindowRules
from h2o_stream.cache.windows import HeadWindow
from h2o_stream.config import DEFAULT_WINDOW, CacheConfig
from h2o_stream.errors import ConfigError, H2OStreamError

_KEYS = {"long_term_scores": "lasting"}
"""What arrays are called in a state, where that differs from the attribute."""

_RANGES = ("pins", "transient")
"""Ranges of token indices in a state: attributes of the cache."""


def state_of(cache: WindowRules, recurrent: Mapping[str, Array] = MappingProxyType({})) -> State:
    """A copy of everything needed to continue exactly, with the states of recurrent layers by their names in it."""
    state = {
        f"{prefix}{_KEYS.get(name, name)}": array
        for prefix, group in _groups(cache)
        for name, array in group.arrays().items()
    }
    state |= {name: array.copy() for name, array in recurrent.items()}
    for name in _RANGES:
        bounds = [(tokens.start, tokens.stop) for tokens in getattr(cache, name)]
        state[name] = numpy.array(bounds, numpy.int64).ravel()
    state["progress"] = numpy.array([cache.tokens.columns, cache.first_prompt or DEFAULT_WINDOW], numpy.int64)
    for name in ("filled", "queries_per_key"):
        state[name] = numpy.array([getattr(group, name) for group in cache.head_groups], numpy.int64)
    windows = [[(window.heads, window.share) for window in spec.windows] for spec in cache.specs]
    assigned = cache.windows
    grown = {"window": cache.plan.window, "added": assigned.added, "evicted": list(assigned.evicted)}
    budgets = {"groups": windows, "windows": list(assigned.sizes), **(grown if cache.grown else {})}
    state["budgets"] = encode_json(budgets)
    state[FINGERPRINT] = encode_json(_fingerprint(cache, state))
    return checksummed(state)


def load_state(cache: WindowRules, state: Mapping[str, Array]) -> None:
    """Continue from a state of `state_of`, except for recurrent layers, in a shallow copy whose layers are replaced.

    Raises:
        H2OStreamError: the state does not fit, or is damaged. The copy is left half changed.
    """
    columns, prompt = whole_numbers(state, "progress", 2)
    budgets, saved = decode_json(state, "budgets"), decode_json(state, FINGERPRINT)
    try:
        if cache.config.auto_window:
            cache.config = _chosen_before(cache.config, saved["policy"])
        cache.first_prompt, cache.plan = prompt, cache.growth(prompt).plan(int(budgets.get("window", 0)))
    except (AttributeError, ConfigError, KeyError, TypeError, ValueError) as error:
        raise H2OStreamError(f"the state does not fit: its budgets are {budgets}") from error
    fingerprint, called = _fingerprint(cache, state), saved.get("model")
    if called != fingerprint["model"] and isinstance(called, str) and cache.is_called(called):
        fingerprint["model"] = called
    if saved["policy"].get("memory"):  # which versions before 0.3 could have; the stream goes on without it
        fingerprint["policy"]["memory"] = True
    check_fingerprint(state, fingerprint)
    verify_checksums(state)
    _load_windows(cache, budgets, prompt)
    names = {key: name for name, key in _KEYS.items()}
    filled = whole_numbers(state, "filled", len(cache.head_groups))
    queries_per_key = whole_numbers(state, "queries_per_key", len(filled))
    parts: dict[str, State] = {}
    for name, array in state.items():
        prefix, dot, key = name.rpartition(".")
        parts.setdefault(prefix + dot, {})[names.get(key, key)] = array
    for number, (prefix, group) in enumerate(_groups(cache)):
        arrays = parts.get(prefix, {})
        if number == 0:
            cache.tokens.expect(require_array(arrays, "seen").ravel().tolist(), columns)
            cache.tokens.advance()
        group.queries_per_key = queries_per_key[number]
        group.load(arrays)
        group.filled = min(filled[number], group.num_slots)
    cache.windows.pins, cache.windows.transient = (_ranges(state, name) for name in _RANGES)
    if not 0 < cache.seen_tokens <= columns:
        raise H2OStreamError(f"the state is damaged: it has seen {cache.seen_tokens} tokens in {columns} columns")
    for number, group in enumerate(cache.head_groups):
        check_slots(group, f"slots {number}")
    cache.assign_windows()


def _chosen_before(config: CacheConfig, policy: Mapping[str, Any]) -> CacheConfig:
    """A config whose window chooses itself, with what it chose in the stream of a saved plan."""
    window = int(policy["window"]) - int(policy.get("grown by", 0))
    return replace(config, window=window, kv_bits=policy["kv_bits"])


def _ranges(state: Mapping[str, Array], name: str) -> tuple[range, ...]:
    """Ranges of token indices, in order and apart."""
    bounds = whole_numbers(state, name)
    ranges = tuple(map(range, bounds[::2], bounds[1::2]))
    if len(bounds) % 2 or ranges != merged(ranges):
        raise H2OStreamError(f"the state is damaged: {name} is {bounds}")
    return ranges


def _groups(cache: WindowRules) -> Iterator[tuple[str, Slots]]:
    """Every head group, and what the names of its arrays begin with."""
    for number in range(len(cache.specs)):
        groups = cache.groups_of(number)
        for part, group in enumerate(groups):
            yield f"{number}." if len(groups) == 1 else f"{number}.{part}.", group


def _load_windows(cache: WindowRules, saved: Mapping[str, Any], prompt: int) -> None:
    """Make empty layers with the groups and windows of the saved stream, whatever was measured here."""
    try:
        layers = [tuple(HeadWindow(tuple(heads), share) for heads, share in layer) for layer in saved["groups"]]
        cache.specs = tuple(replace(spec, windows=layer) for spec, layer in zip(cache.specs, layers, strict=True))
        sizes = saved["windows"]
        if not all(map(_covers_layer, layers)):
            raise ValueError(layers)
        cache.make_layers(prompt, window=cache.plan.window)
        assigned, added = cache.windows, int(saved.get("added", 0))
        if added:
            assigned.added, assigned.evicted = added, tuple(map(int, saved["evicted"]))
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


def _fingerprint(cache: WindowRules, state: Mapping[str, Array]) -> dict[str, Any]:
    """Identifies the model, the policy and, by the first keys in the state, the dtype."""
    begin = f"{next(number for number, spec in enumerate(cache.specs) if spec.attends)}."
    keys = next((name for name in state if name.startswith(begin) and name.endswith(".keys")), f"{begin}keys")
    fingerprint = {"dtype": dtype_of(require_array(state, keys)), "model": cache.model_digest()}
    policy = asdict(cache.plan)
    policy |= {"grown by": cache.grown} if cache.grown else {}
    return fingerprint | {"policy": policy, "policy's source": policy_source(cache.plan)}
