"""Windows that differ from layer to layer: the arithmetic, the cache with them, and what is measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from h2o_stream import CacheConfig, ConfigError, H2OStreamError, attach
from h2o_stream.cache.budgets import schedules, windows
from h2o_stream.config import MIN_EVICTABLE
from h2o_stream.models.load import LoadedModel
from tests.conftest import make_llama
from tests.oracle import Rules
from tests.test_oracle import compare, tokens_of

SHARES = (0.5, 1.75, 0.75)
WINDOW, SINKS, HEAVY = 24, 2, 8
FINAL = windows(SHARES, WINDOW, SINKS, MIN_EVICTABLE, None)
TOKENS = torch.tensor([tokens_of(0, 120), tokens_of(1, 120)])


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A model of three layers whose shares are `SHARES`."""

    def told(model: Any, specs: Any) -> Any:
        return [replace(spec, share=share) for spec, share in zip(specs, SHARES, strict=True)]

    monkeypatch.setattr("h2o_stream.cache.attach.shared_out", told)
    return make_llama(groups=2, layers=3, context=256)


def config_of(**more: Any) -> CacheConfig:
    return CacheConfig("h2o", WINDOW, HEAVY, SINKS, 0.9, **{"chunk": 7, **more})


class TestArithmetic:
    @given(
        shares=st.lists(st.floats(0.2, 4), min_size=2, max_size=8),
        window=st.integers(16, 300),
        pinned=st.integers(0, 8),
        most=st.none() | st.integers(300, 600),
    )
    def test_windows(self, shares: list[float], window: int, pinned: int, most: int | None) -> None:
        mean = sum(shares) / len(shares)
        sizes = windows([share / mean for share in shares], window, pinned, 8, most)
        assert sum(sizes) == window * len(shares)
        assert min(sizes) >= pinned + 7
        assert most is None or max(sizes) <= most + 1

    def test_shares_move_toward_equal_where_too_little_is_left(self) -> None:
        assert windows([0.5, 1.5], 100, 0, 8, None) == [50, 150]
        assert windows([0.5, 1.5], 100, 60, 8, None) == [80, 120]
        assert windows([0.5, 1.5], 100, 0, 8, 110) == [90, 110]
        assert windows([0.5, 1.5], 100, 92, 8, None) == [100, 100]

    @given(sizes=st.lists(st.integers(5, 90), min_size=2, max_size=6))
    def test_the_total_is_that_of_equal_windows_at_any_moment(self, sizes: list[int]) -> None:
        common = sum(sizes) // len(sizes)
        sizes[0] += common * len(sizes) - sum(sizes)
        plans = schedules(tuple(sizes), common)
        before = [0] * len(sizes)
        for seen in range(1, max(max(sizes), common) + 3):
            held = [plan.held(seen) for plan in plans]
            assert sum(held) == min(seen, common) * len(sizes)
            assert all(now <= was + 1 for now, was in zip(held, before, strict=True))
            before = held
        assert before == sizes


@pytest.mark.parametrize("positions", ["gap", "rolling", "absolute"])
@pytest.mark.parametrize(("chunk", "prompt"), [(7, 20), (7, 60), (0, 60), (1, 30)])
def test_it_is_what_the_definitions_say(model: Any, positions: str, chunk: int, prompt: int) -> None:
    """Prompts that end before, while and after the layers change their size; a chunk of 0 is the whole prompt."""
    plans = schedules(tuple(FINAL), WINDOW)
    movable = [size - SINKS for size in FINAL]
    recents = tuple(m - m * HEAVY // (WINDOW - SINKS) for m in movable)
    config = config_of(positions=positions, chunk=chunk)
    rules = Rules(
        WINDOW,
        HEAVY,
        SINKS,
        0.9,
        positions,
        config.plan(256).span,
        limits=lambda layer, seen: plans[layer].held(seen),
        recents=recents,
    )
    assert compare(model, config, rules, tokens_of(5, 75), prompt)


def test_until_the_window_is_full_nothing_is_lost(model: Any) -> None:
    with attach(model, config_of()) as cache:
        model(TOKENS[:, :WINDOW], past_key_values=cache)
        assert all(cache.kept(layer).shape[-1] == WINDOW for layer in range(3))
        for _ in range(30):
            model(TOKENS[:, :1], past_key_values=cache)
            assert cache.counts().cached == WINDOW
        assert [cache.kept(layer).shape[-1] for layer in range(3)] == FINAL


def test_memory_is_that_of_equal_windows(model: Any) -> None:
    sizes = []
    for budgets in ("measured", "equal"):
        with attach(model, config_of(budgets=budgets)) as cache:
            model(TOKENS, past_key_values=cache)
            sizes.append(cache.nbytes)
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("kv_bits", [16, 8])
def test_a_row_of_a_padded_batch_comes_out_as_alone(model: Any, kv_bits: int) -> None:
    """A short row and a long one, prefilled and decoded past every change of size."""
    lengths, steps = (13, 60), 40
    mask = torch.stack([torch.arange(60) >= 60 - length for length in lengths]).long()
    ids = TOKENS[:, :60] * mask
    config = config_of(kv_bits=kv_bits)
    with attach(model, config) as cache:
        together = [model(ids, attention_mask=mask, past_key_values=cache).logits[:, -1]]
        fed = TOKENS[:, 60 : 60 + steps].split(1, 1)
        together += [model(token, past_key_values=cache).logits[:, -1] for token in fed]
        kept = [cache.kept(layer) for layer in range(3)]
    for row, length in enumerate(lengths):
        with attach(model, config) as cache:
            alone = [model(ids[row : row + 1, 60 - length :], past_key_values=cache).logits[:, -1]]
            fed = TOKENS[row : row + 1, 60 : 60 + steps].split(1, 1)
            alone += [model(token, past_key_values=cache).logits[:, -1] for token in fed]
            own = torch.cat([step[row : row + 1] for step in together])
            torch.testing.assert_close(own, torch.cat(alone), atol=2e-4, rtol=1e-3)
            for layer in range(3):
                own = kept[layer][row]
                assert own[own >= 0].tolist() == cache.kept(layer).flatten().tolist()


def test_rows_that_leave_a_batch_take_nothing_with_them(model: Any) -> None:
    """A short row goes on as it would alone after the long one, for which layers had changed their size, is dropped."""
    mask = torch.stack([torch.arange(60) >= 47, torch.ones(60)]).long()
    with attach(model, config_of()) as cache:
        model(TOKENS[:, :60] * mask, attention_mask=mask, past_key_values=cache)
        cache.reorder_cache(torch.tensor([0]))
        got = [model(TOKENS[:1, 60 + step, None], past_key_values=cache).logits for step in range(50)]
    with attach(model, config_of()) as cache:
        model(TOKENS[:1, 47:60], past_key_values=cache)
        wanted = [model(TOKENS[:1, 60 + step, None], past_key_values=cache).logits for step in range(50)]
    torch.testing.assert_close(torch.cat(got), torch.cat(wanted), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("fed", [20, 30, 70])
@pytest.mark.parametrize("kv_bits", [16, 4])
def test_a_state_goes_on_at_any_size(model: Any, monkeypatch: pytest.MonkeyPatch, fed: int, kv_bits: int) -> None:
    """With the windows of the saved stream, whatever is measured where it is loaded."""
    config = config_of(kv_bits=kv_bits)
    with attach(model, config) as cache:
        model(TOKENS[:, :fed], past_key_values=cache)
        state = cache.state_dict()
        wanted = [model(TOKENS[:, 70 + step, None], past_key_values=cache).logits for step in range(40)]
    monkeypatch.setattr("h2o_stream.cache.attach.shared_out", lambda model, specs: specs)
    with attach(model, config) as cache:
        cache.load_state_dict(state)
        got = [model(TOKENS[:, 70 + step, None], past_key_values=cache).logits for step in range(40)]
        assert torch.cat(got).equal(torch.cat(wanted))
        state["windows"][0] += 1
        with pytest.raises(H2OStreamError, match="windows"):
            cache.load_state_dict(state)


def test_pins_are_in_every_layer_and_late_ones_must_fit_the_smallest(model: Any) -> None:
    with attach(model, config_of()) as cache:
        cache.pin(0, 8)
        model(TOKENS[:, :100], past_key_values=cache)
        for layer in range(3):
            assert cache.kept(layer)[0, 0, :8].tolist() == list(range(8))
        assert [cache.kept(layer).shape[-1] for layer in range(3)] == windows(SHARES, WINDOW, 8, MIN_EVICTABLE, None)
        with pytest.raises(ConfigError, match="of a layer of 16"):
            cache.pin(99, 110)


class TestMeasured:
    def test_the_embedded_model_reaches_back_in_a_few_layers(self, embedded: LoadedModel) -> None:
        with attach(embedded.model, CacheConfig(window=256)) as cache:
            sizes = [layer.schedule.window for layer in cache.layers]
        assert sum(sizes) == 30 * 256
        assert min(sizes) > 128
        assert {17, 18, 23} <= {number for number, size in enumerate(sizes) if size > 400}

    def test_a_model_that_copies_nothing_has_equal_windows(self) -> None:
        with attach(make_llama(layers=3), CacheConfig(window=16, sinks=0)) as cache:
            assert [layer.schedule.window for layer in cache.layers] == [16] * 3

    def test_what_is_not_measured_is_equal(self, embedded: LoadedModel) -> None:
        for config in (CacheConfig("sink"), CacheConfig(budgets="equal")):
            with attach(embedded.model, config) as cache:
                assert {layer.schedule.window for layer in cache.layers} == {256}
