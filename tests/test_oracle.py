"""The cache against the naive oracle: the same kept tokens and logits at every step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from h2o_stream import CacheConfig, attach
from tests.conftest import make_llama
from tests.oracle import Oracle, Rules
from tests.tolerance import assert_close

TIE = 1e-5
"""Relative difference of scores below which float32 may order them either way."""


def compare(model: torch.nn.Module, config: CacheConfig, rules: Rules, tokens: list[int], prompt: int) -> bool:
    """Feed both `prompt` tokens as a prompt and the rest one by one. Returns False if too close to a tie to compare."""
    oracle, chunk = Oracle(model, rules), config.plan().chunk or prompt
    chunks = [tokens[i : min(i + chunk, prompt)] for i in range(0, prompt, chunk)]
    expected, wanted = [oracle.feed(part) for part in chunks], [oracle.kept(0)]
    for token in tokens[prompt:]:
        expected.append(oracle.feed([token]))
        wanted.append(oracle.kept(0))
    layers = range(model.config.num_hidden_layers)
    wanted += [oracle.kept(layer) for layer in layers]
    if oracle.margin <= TIE:
        return False
    with attach(model, config) as cache:
        for pin in rules.pins:
            cache.pin(pin.start, pin.stop)
        logits, kept = [model(torch.tensor([tokens[:prompt]]), past_key_values=cache).logits[0]], [cache.kept(0)[0]]
        for token in tokens[prompt:]:
            logits.append(model(torch.tensor([[token]]), past_key_values=cache).logits[0])
            kept.append(cache.kept(0)[0])
        kept += [cache.kept(layer)[0] for layer in layers]
    assert [held_by(heads) for heads in kept] == wanted
    assert_close(torch.cat(logits), torch.cat(expected))
    return True


def held_by(heads: torch.Tensor) -> list[list[int]]:
    """The tokens of each head, from a row of `kept`."""
    return [head[head >= 0].tolist() for head in heads]


def tokens_of(seed: int, count: int) -> list[int]:
    return torch.randint(3, 64, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    heads=st.integers(1, 2),
    groups=st.sampled_from([1, 3]),
    heavy=st.integers(0, 6),
    recent=st.integers(1, 6),
    prompt=st.integers(1, 24),
    steps=st.integers(0, 10),
    seed=st.integers(0, 1000),
)
def test_h2o_paper_is_the_cookbook_rule(
    heads: int, groups: int, heavy: int, recent: int, prompt: int, steps: int, seed: int
) -> None:
    model = make_llama(heads=heads, groups=groups, seed=seed)
    window = heavy + recent
    config = CacheConfig(policy="h2o-paper", window=window, heavy=heavy, chunk=0)
    rules = Rules(window, heavy)
    assume(compare(model, config, rules, tokens_of(seed, prompt + steps), prompt))


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    groups=st.sampled_from([1, 3]),
    positions=st.sampled_from(["gap", "rolling", "absolute"]),
    sinks=st.integers(0, 3),
    heavy=st.integers(1, 5),
    recent=st.integers(1, 5),
    span=st.integers(0, 20),
    decay=st.sampled_from([1.0, 0.99, 0.7]),
    chunk=st.integers(1, 9),
    prompt=st.integers(1, 24),
    steps=st.integers(0, 10),
    seed=st.integers(0, 1000),
)
def test_h2o_in_chunks_and_in_every_position_mode(
    groups: int,
    positions: str,
    sinks: int,
    heavy: int,
    recent: int,
    span: int,
    decay: float,
    chunk: int,
    prompt: int,
    steps: int,
    seed: int,
) -> None:
    model = make_llama(groups=groups, seed=seed)
    window = sinks + heavy + recent
    config = CacheConfig("h2o", window, heavy, sinks, decay, positions, span, chunk)
    rules = Rules(window, heavy, sinks, decay, positions, span)
    assume(compare(model, config, rules, tokens_of(seed, prompt + steps), prompt))


@pytest.mark.parametrize(("policy", "sinks"), [("recent", 0), ("sink", 4)])
@pytest.mark.parametrize("positions", ["gap", "rolling", "absolute"])
@pytest.mark.parametrize("chunk", [1, 5, 0])
def test_policies_without_heavy_hitters(policy: str, sinks: int, positions: str, chunk: int) -> None:
    config = CacheConfig(policy, window=9, positions=positions, span=7, chunk=chunk)
    rules = Rules(9, 0, sinks, positions=positions, span=7)
    assert compare(make_llama(groups=3), config, rules, tokens_of(1, 40), 25)


@pytest.mark.parametrize("positions", ["gap", "rolling", "absolute"])
@pytest.mark.parametrize("chunk", [1, 5])
def test_pins_stay_and_stand_near(positions: str, chunk: int) -> None:
    """Pinned tokens are not evicted and have no gap in front of them; sinks alone keep their place."""
    pins = (range(1, 5), range(17, 20))
    config = CacheConfig("h2o", 20, 9, 2, 0.9, positions, span=13, chunk=chunk)
    movable = 20 - 5 - 3
    recent = movable - movable * 9 // 18
    rules = Rules(20, 9, 2, 0.9, positions, 13, long_term=2.0, recents=lambda layer, head: recent, pins=pins)
    assert compare(make_llama(groups=3), config, rules, tokens_of(5, 90), 50)


def test_far_past_the_span_and_the_context() -> None:
    """`gap` and `rolling` continue past the model's context; distances stay within it."""
    model = make_llama(context=32)
    for positions in ("gap", "rolling"):
        config = CacheConfig("h2o", 12, 4, 2, 0.9, positions, chunk=4)
        span = config.plan(32).span
        assert compare(model, config, Rules(12, 4, 2, 0.9, positions, span, long_term=2.0), tokens_of(3, 90), 60)
