"""The cache against the naive oracle: the same kept tokens and logits at every step."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from h2o_stream import CacheConfig, attach
from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.config import EngineChoice
from tests.fixtures import make_llama, thinned, with_exhaustive
from tests.oracle import Oracle, Rules
from tests.tolerance import FLOAT32, assert_close

SETTINGS = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
TIE = 1e-5
"""Relative difference of scores below which float32 may order them either way."""


def examples(some: int, many: int, **strategies: Any) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """Checks some examples in `make test`, and many in `make test-all`."""

    def checked(check: Callable[..., None]) -> Callable[[int], None]:
        @pytest.mark.parametrize("count", with_exhaustive([some], [many]))
        def test(count: int) -> None:
            settings(SETTINGS, max_examples=count)(given(**strategies)(check))()

        return test

    return checked


def compare(
    model: torch.nn.Module,
    config: CacheConfig,
    rules: Rules,
    tokens: list[int],
    prompt: int,
    share: float = FLOAT32,
    engines: Sequence[EngineChoice] = ("auto",),
) -> bool:
    """Feed both `prompt` tokens as a prompt and the rest one by one. Returns False if too close to a tie to compare.

    Logits may differ by `share` of their RMS.
    """
    oracle = Oracle(model, rules)
    expected, wanted = [oracle.feed(tokens[:prompt], config.plan().chunk)], [kept_by(oracle)]
    for token in tokens[prompt:]:
        expected.append(oracle.feed([token]))
        wanted.append(kept_by(oracle))
    if oracle.margin <= TIE:
        return False
    for engine in engines:
        with attach(model, config, engine=engine) as cache:
            for pin in rules.pins:
                cache.pin(pin.start, pin.stop)
            evict_first(cache, rules)
            logits, first = (
                [model(torch.tensor([tokens[:prompt]]), past_key_values=cache).logits[0]],
                cache.evicting_layers[0],
            )
            kept = [held_by(cache.kept(first)[0])]
            for token in tokens[prompt:]:
                evict_first(cache, rules)
                logits.append(model(torch.tensor([[token]]), past_key_values=cache).logits[0])
                kept.append(held_by(cache.kept(first)[0]))
            at_end = {layer: held_by(cache.kept(layer)[0]) for layer in cache.evicting_layers}
        assert kept == [held[first] for held in wanted]
        assert at_end == {layer: wanted[-1][layer] for layer in at_end}
        assert_close(torch.cat(logits), torch.cat(expected), share)
    return True


def evict_first(cache: H2OCache, rules: Rules) -> None:
    for since, tokens in rules.transient:
        if since == cache.seen_tokens:
            cache.evict_first(tokens.start, tokens.stop)


def kept_by(oracle: Oracle) -> dict[int, list[list[int]]]:
    """The tokens of each head of each layer with attention."""
    return {layer: oracle.kept(layer) for layer in oracle.held}


def held_by(heads: torch.Tensor) -> list[list[int]]:
    """The tokens of each head, from a row of `kept`."""
    return [head[head >= 0].tolist() for head in heads]


def tokens_of(seed: int, count: int) -> list[int]:
    return torch.randint(3, 64, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@examples(
    5, 20, heads=st.integers(1, 2), groups=st.sampled_from([1, 3]), heavy=st.integers(0, 6), recent=st.integers(1, 6),
    prompt=st.integers(1, 24), steps=st.integers(0, 10), seed=st.integers(0, 1000),
)  # fmt: skip
def test_h2o_paper_is_the_cookbook_rule(
    heads: int, groups: int, heavy: int, recent: int, prompt: int, steps: int, seed: int
) -> None:
    model = make_llama(heads=heads, groups=groups, seed=seed)
    window = heavy + recent
    config = CacheConfig(policy="h2o-paper", window=window, heavy=heavy, chunk=0)
    rules = Rules(window, heavy)
    assume(compare(model, config, rules, tokens_of(seed, prompt + steps), prompt))


@examples(
    6, 30, groups=st.sampled_from([1, 3]), positions=st.sampled_from(["gap", "rolling", "absolute"]),
    sinks=st.integers(0, 3), heavy=st.integers(1, 5), recent=st.integers(1, 5), span=st.integers(0, 20),
    decay=st.sampled_from([1.0, 0.99, 0.7]),
    chunk=st.integers(1, 9), prompt=st.integers(1, 24), steps=st.integers(0, 10), seed=st.integers(0, 1000),
)  # fmt: skip
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


@pytest.mark.every(3)
@pytest.mark.parametrize(("policy", "sinks"), [("recent", 0), ("sink", 4)])
@pytest.mark.parametrize(("positions", "chunk"), thinned(
    product(("gap", "rolling", "absolute"), (5, 0, 1)), lambda positions, chunk: chunk == 5 or positions == "gap"
))  # fmt: skip
def test_policies_without_heavy_hitters(policy: str, sinks: int, positions: str, chunk: int) -> None:
    config = CacheConfig(policy, window=9, positions=positions, span=7, chunk=chunk)
    rules = Rules(9, 0, sinks, positions=positions, span=7)
    assert compare(make_llama(groups=3), config, rules, tokens_of(1, 40), 25)


@pytest.mark.every(2)
@pytest.mark.parametrize(("positions", "chunk"), with_exhaustive(
    [("gap", 5), ("rolling", 1), ("absolute", 5)], [("gap", 1), ("rolling", 5), ("absolute", 1)]
))  # fmt: skip
def test_pins_stay_and_stand_near(positions: str, chunk: int) -> None:
    """Pinned tokens are not evicted and have no gap in front of them; sinks alone keep their place."""
    pins = (range(1, 5), range(17, 20))
    config = CacheConfig("h2o", 20, 9, 2, 0.9, positions, span=13, chunk=chunk)
    movable = 20 - 5 - 3
    recent = movable - movable * 9 // 18
    rules = Rules(20, 9, 2, 0.9, positions, 13, long_term=2.0, recents=lambda layer, head: recent, pins=pins)
    assert compare(make_llama(groups=3), config, rules, tokens_of(5, 80), 50)


@examples(
    4, 20, policy=st.sampled_from(["h2o", "h2o-paper", "tova", "random", "sink"]), pinned=st.booleans(),
    positions=st.sampled_from(["gap", "rolling", "absolute"]), heavy=st.integers(2, 6), chunk=st.integers(1, 9),
    starts=st.lists(st.integers(0, 35), min_size=1, max_size=4), prompt=st.integers(5, 24), late=st.integers(0, 9),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_transient_tokens_leave_first(
    policy: str, positions: str, heavy: int, chunk: int, starts: Any, pinned: bool, prompt: int, late: int, seed: int
) -> None:
    """Said before the prompt or after some steps, of tokens before and after that."""
    model, window = make_llama(seed=seed), 14
    sinks = 0 if policy in ("h2o-paper", "tova", "random") else 2
    heavy = 0 if policy == "sink" else heavy
    config = CacheConfig(policy, window, heavy, sinks, 0.9, positions, 13, chunk, budgets="equal", long_term=2.0)
    plan, pins = config.plan(), (range(9, 12),) if pinned else ()
    movable = window - sinks - 3 * pinned
    recent = movable - movable * plan.heavy // (plan.heavy + plan.recent)
    rule = "accumulated" if policy.startswith("h2o") else policy
    rules = Rules(
        window, plan.heavy, sinks, plan.decay, positions, 13, rule, plan.long_term, pins=pins,
        recents=lambda layer, head: recent,
        transient=tuple((0 if i % 2 else prompt + late, range(start, start + 5)) for i, start in enumerate(starts)),
    )  # fmt: skip
    assume(compare(model, config, rules, tokens_of(seed, prompt + 14), prompt))
