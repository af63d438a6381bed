"""A window grows for what is pinned in it: to what it would have been from the start, or in the middle of a stream."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st

from h2o_stream import CacheConfig, attach
from h2o_stream.cache import window_growth
from h2o_stream.cache.audit import audit
from h2o_stream.cache.windows import HeadWindow, schedules
from h2o_stream.config import SamplingConfig
from h2o_stream.errors import ConfigError, H2OStreamError, OutOfMemoryError
from tests.family_models import TEXT, written
from tests.fixtures import make_grouped, make_llama
from tests.oracle import Oracle, Rules
from tests.test_budgets import GROUPS
from tests.test_oracle import TIE, compare, examples, held_by, kept_by, tokens_of
from tests.test_runtime import through_both
from tests.tolerance import FLOAT32, assert_close

WINDOW, CHUNK = 24, 8


def grown(window: int, pinned: int, minimum: int = 8) -> int:
    return max(window, pinned + max(window - window // 2, minimum))


@examples(
    5, 30, policy=st.sampled_from(["h2o", "h2o-paper", "sink", "random"]),
    positions=st.sampled_from(["gap", "rolling", "absolute"]), window=st.integers(2, 24), pinned=st.integers(1, 40),
    first=st.integers(0, 3), prompt=st.integers(1, 60), steps=st.integers(0, 20), seed=st.integers(0, 1000),
)  # fmt: skip
def test_a_window_that_grew_is_one_that_was_given(
    policy: str, positions: Any, window: int, pinned: int, first: int, prompt: int, steps: int, seed: int
) -> None:
    model, pin, tokens = make_llama(seed=seed), range(first, first + pinned), tokens_of(seed, prompt + steps)
    config = CacheConfig(policy, window, positions=positions, chunk=CHUNK, budgets="equal")
    sinks = 4 if policy in ("h2o", "sink", "random") else 0
    wanted = grown(window, len({*range(sinks), *pin}))
    if len({*range(sinks), *pin}) == sinks:
        wanted = window
    context = model.config.max_position_embeddings
    given = CacheConfig(policy, wanted, positions=positions, chunk=CHUNK, budgets="equal").plan(context)
    left = wanted - len({*range(given.sinks), *pin})
    heavy = left * given.heavy // (given.heavy + given.recent)
    rule = {"random": "random"}.get(policy, "accumulated")
    rules = Rules(
        wanted, heavy if given.heavy else 0, given.sinks, given.decay, positions, given.span, rule, given.long_term,
        recents=lambda layer, head: left - heavy, pins=(pin,),
    )  # fmt: skip
    assume(compare(model, config, rules, tokens, prompt, engines=("auto", "eager")))


@examples(
    4, 30, early=st.integers(0, 20), pinned=st.integers(9, 30), before=st.integers(1, 60), steps=st.integers(1, 40),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_in_the_middle_of_a_stream_nothing_is_evicted_until_it_is_full(
    early: int, pinned: int, before: int, steps: int, seed: int
) -> None:
    model, tokens = make_llama(seed=seed), tokens_of(seed, before + pinned + steps)
    config = CacheConfig("h2o", WINDOW, chunk=CHUNK, budgets="equal", span=100, long_term=0)
    pins = tuple(pin for pin in (range(4, early), range(before, before + pinned)) if len(pin))

    def rules_for(pins: tuple[range, ...]) -> Rules:
        held = len(set(range(4)).union(*pins))
        window = max(grown(WINDOW, held) if pins else WINDOW, WINDOW)
        plan = CacheConfig("h2o", window, chunk=CHUNK, budgets="equal").plan()
        heavy = (window - held) * plan.heavy // (plan.heavy + plan.recent)
        return Rules(
            window, heavy, 4, 0.99, "gap", 100, recents=lambda *_: window - held - heavy, pins=pins
        )  # fmt: skip

    first = pins[:-1]
    oracle = Oracle(model, rules_for(first))
    wanted = [oracle.feed(tokens[:before], CHUNK)]
    oracle.rules = rules_for(pins)
    wanted += [oracle.feed(tokens[before : before + pinned], CHUNK)]
    wanted += [oracle.feed([token]) for token in tokens[before + pinned :]]
    assume(oracle.margin > TIE)
    for engine in ("auto", "eager"):
        with attach(model, config, engine=engine) as cache:  # type: ignore[arg-type]
            for pin in first:
                cache.pin(pin.start, pin.stop)
            got = [model(torch.tensor([tokens[:before]]), past_key_values=cache).logits[0]]
            cache.pin(pins[-1].start, pins[-1].stop)
            got += [model(torch.tensor([tokens[before : before + pinned]]), past_key_values=cache).logits[0]]
            for token in tokens[before + pinned :]:
                got.append(model(torch.tensor([[token]]), past_key_values=cache).logits[0])
            assert cache.counts().window == oracle.rules.window
            assert [held_by(cache.kept(layer)[0]) for layer in range(2)] == [*kept_by(oracle).values()]
            audit(cache.evicting_groups)
        assert_close(torch.cat(got), torch.cat(wanted), FLOAT32)


def test_schedules_hold_no_more_than_come() -> None:
    """A grown schedule holds all that comes until it is full, evicts at least nothing, and ends with its window."""
    groups = [HeadWindow((0,), 2.5), HeadWindow((1, 2), 0.6), HeadWindow((3,), 0.3)]
    for schedule in schedules((60, 15, 9), tuple(group.weight for group in groups), 24):
        for seen in range(25, 90):
            later = schedule.grown(13, seen - schedule.held(seen))
            again = later.grown(5, 95 - later.held(95))
            held = [later.held(length) for length in range(seen, 130)]
            assert held[0] == schedule.held(seen)
            assert held[-1] == schedule.window + 13 == later.window
            assert all(later.num_evictions(length) >= 0 for length in range(seen, 130))
            assert [later.held(x) == later.window for x in (later.settled, later.settled + 1)] == [True, True]
            for length, now in enumerate(held, seen):
                assert now == min(length - seen + held[0], schedule.held(length) + 13)
            assert again.held(95) == later.held(95)
            assert again.held(200) == schedule.window + 18


@pytest.mark.every(5)
@pytest.mark.parametrize("kv_bits", [16, 4])
@pytest.mark.parametrize("fed", [10, 26, 70])
@pytest.mark.parametrize("measured", [True, False])
def test_measured_windows_and_states_go_on(
    monkeypatch: pytest.MonkeyPatch, measured: bool, fed: int, kv_bits: int
) -> None:
    """Before, while and after heads change size: every head gets as much, and a state continues exactly."""
    model = make_grouped(monkeypatch, GROUPS)
    tokens = torch.tensor([tokens_of(0, 200)])
    given = (
        WINDOW if kv_bits == 16 else 32
    )  # with fewer recent tokens, a quantized cache would store other ones exactly
    config = CacheConfig("h2o", given, chunk=7, kv_bits=kv_bits, budgets="measured" if measured else "equal")

    def step(cache: Any, number: int) -> torch.Tensor:
        return model(tokens[:, number, None], past_key_values=cache).logits

    with attach(model, config) as cache:
        model(tokens[:, :fed], past_key_values=cache)
        before = cache.windows.sizes
        cache.pin(fed, fed + 24)
        more = cache.counts().grown
        assert more == cache.plan.window - given > 0
        if fed > given:
            assert [size + more for size in before] == [*cache.windows.sizes]
        states, wanted = {}, {}
        for number in range(fed, 180):
            if number in (fed + 3, fed + 20, 150):
                states[number] = cache.state_dict()
            logits = step(cache, number)
            for start in states:
                wanted.setdefault(start, []).append(logits)
            pinned = torch.arange(fed, min(number, fed + 24))
            assert all(torch.isin(pinned, head).all() for layer in range(3) for head in cache.kept(layer)[0])
            audit(cache.evicting_groups)
        counts = cache.counts()
        assert counts.window - 1 <= counts.cached <= counts.window
        cache.reset()
        cache.unpin()
        assert cache.counts().window == given
    with attach(model, config) as cache:
        for start, state in states.items():
            cache.load_state_dict(state)
            got = [step(cache, number) for number in range(start, 180)]
            assert torch.cat(got).equal(torch.cat(wanted[start]))
            assert cache.counts() == counts
    with attach(model, replace(config, window=given + 1)) as cache, pytest.raises(H2OStreamError, match="another pol"):
        cache.load_state_dict(states[150])


def test_without_torch_it_is_the_same(tmp_path: Path) -> None:
    file = written(tmp_path, "Llama")
    engines = through_both(file, CacheConfig("h2o", WINDOW, chunk=CHUNK), sampling=SamplingConfig(0, max_tokens=40))
    counts = []
    for engine in engines:
        with engine:
            engine.pin(30)
            list(engine.prefill(TEXT[:60]))
            engine.cache.pin(60, 80)
            list(engine.prefill(TEXT[60:80]))
            list(engine.decode())
            state = engine.state_dict()
            ended = [*engine.tokens]
            list(engine.prefill(TEXT[80:90]))
            counts.append((engine.counts.window, engine.counts.grown, engine.counts.cached, [*engine.tokens]))
            engine.load_state_dict(state)
            assert [*engine.tokens] == ended
            assert engine.counts.window == 50 + WINDOW // 2
            list(engine.prefill(TEXT[80:90]))
            assert (engine.counts.window, engine.counts.cached) == (counts[-1][0], counts[-1][2])
    assert counts[0] == counts[1]


class TestLimits:
    def test_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(window_growth, "free_bytes", lambda device: 1000)
        with attach(make_llama(), CacheConfig(window=WINDOW)) as cache:
            with pytest.raises(OutOfMemoryError, match="100 pinned tokens .* need a window of 112, .* are free"):
                cache.pin(0, 100)
            assert (cache.pins, cache.counts().window) == ((), WINDOW)

    def test_a_cache_of_given_bytes_does_not_grow(self) -> None:
        with attach(make_llama(context=4096), CacheConfig(cache_size=40_000)) as cache:
            window = cache.counts().window
            cache.pin(0, window - 12)
            with pytest.raises(ConfigError, match=f"of a window of {window}, as large as --cache-size allows"):
                cache.pin(0, window)
            assert cache.counts().window == window

    def test_rows_of_different_lengths_go_on_without(self) -> None:
        model, mask = make_llama(), torch.ones(2, 60).index_fill(1, torch.arange(20), 0)
        mask[0] = 1
        tokens = torch.tensor([tokens_of(0, 60)] * 2)
        with attach(model, CacheConfig(window=WINDOW, chunk=CHUNK)) as cache:
            model(tokens, attention_mask=mask, past_key_values=cache)
            cache.pin(59, 70)
            assert cache.counts().window == WINDOW
            with pytest.raises(ConfigError, match="cannot grow in this stream"):
                cache.pin(70, 80)

    def test_an_explicit_span_and_explicit_heavy_slots_make_room(self) -> None:
        config = CacheConfig(window=100, heavy=24, span=380)
        plan = config.grown_plan(292, 512)
        assert (plan.heavy, plan.recent, plan.span) == (72, 216, 512 - 292 - 64)
        assert config.grown_plan(292).span == 380
