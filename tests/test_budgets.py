"""Windows that differ between heads: the arithmetic, the cache, and the measurement behind them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from h2o_stream import CacheConfig, H2OStreamError, attach
from h2o_stream.attachment import retrieval_heads
from h2o_stream.cache.arrays import to_tensor
from h2o_stream.cache.layer import LayerSpec
from h2o_stream.cache.state import encode_json
from h2o_stream.cache.windows import HeadWindow, schedules, windows
from h2o_stream.config import MIN_EVICTABLE
from h2o_stream.engine.engine import Engine
from h2o_stream.loading.transformers_model import LoadedModel
from tests.fixtures import make_grouped, make_llama, thinned, with_exhaustive
from tests.oracle import Rules
from tests.states import with_checksums
from tests.test_oracle import compare, tokens_of
from tests.tolerance import assert_close

GROUPS = (
    (HeadWindow((0, 1, 2), 0.6),),
    (HeadWindow((0, 2), 0.9), HeadWindow((1,), 3.0)),
    (HeadWindow((1, 2), 0.7), HeadWindow((0,), 1.0)),
)
"""Three layers of three KV heads: one size, two sizes, and two sizes of which one is the default."""
ALL = [group for layer in GROUPS for group in layer]
COUNTS = tuple(group.weight for group in ALL)
WINDOW, SINKS, HEAVY = 24, 2, 8
FINAL = windows(ALL, WINDOW, SINKS, MIN_EVICTABLE)
BY_HEAD = [
    [FINAL[ALL.index(next(group for group in layer if head in group.heads))] for head in range(3)] for layer in GROUPS
]
SIZES = ((7, 20), (7, 60), (0, 60), (0, 127), (70, 127), (1, 30))
TOKENS = torch.tensor([tokens_of(0, 120), tokens_of(1, 120)])


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A model of three layers whose heads are grouped as in `GROUPS`."""
    return make_grouped(monkeypatch, GROUPS)


def config_of(**more: Any) -> CacheConfig:
    return CacheConfig("h2o", WINDOW, HEAVY, SINKS, 0.9, **{"chunk": 7, **more})


class TestArithmetic:
    @given(
        shares=st.lists(st.tuples(st.floats(0.2, 4), st.integers(1, 4)), min_size=2, max_size=8),
        window=st.integers(16, 300),
        pinned=st.integers(0, 8),
        max_window=st.none() | st.integers(300, 600),
    )
    def test_windows(self, shares: list[tuple[float, int]], window: int, pinned: int, max_window: int | None) -> None:
        heads = sum(count for _, count in shares)
        mean = sum(share * count for share, count in shares) / heads
        groups = [HeadWindow(tuple(range(count)), share / mean) for share, count in shares]
        sizes = windows(groups, window, pinned, 8, max_window)
        total = sum(size * group.weight for size, group in zip(sizes, groups, strict=True))
        assert window * heads - 4 <= total <= window * heads
        assert min(sizes) >= pinned + 7
        assert max_window is None or max(sizes) <= max_window + 1

    def test_shares_move_toward_equal_where_too_little_is_left(self) -> None:
        groups = [HeadWindow((), 0.5), HeadWindow((), 1.5)]
        assert windows(groups, 100, 0, 8) == [50, 150]
        assert windows(groups, 100, 60, 8) == [80, 120]
        assert windows(groups, 100, 0, 8, 110) == [90, 110]
        assert windows(groups, 100, 92, 8) == [100, 100]

    @given(groups=st.lists(st.tuples(st.integers(5, 90), st.integers(1, 4)), min_size=2, max_size=6))
    def test_the_total_is_that_of_equal_windows_at_any_moment(self, groups: list[tuple[int, int]]) -> None:
        sizes, counts = [size for size, _ in groups], [count for _, count in groups]
        common = -(-sum(size * count for size, count in groups) // sum(counts))
        plans = schedules(tuple(sizes), tuple(counts), common)
        before = [0] * len(sizes)
        for seen in range(1, max(*sizes, common) + 3):
            held = [plan.held(seen) for plan in plans]
            total = sum(now * count for now, count in zip(held, counts, strict=True))
            assert total <= min(seen, common) * sum(counts)
            assert total >= min(seen, common) * sum(counts) - sum(counts) - 4 or seen > common
            assert all(now <= was + 1 for now, was in zip(held, before, strict=True))
            assert all(now <= seen for now in held)
            evicted = [was + 1 - now for was, now in zip(before, held, strict=True)]
            assert [plan.num_evictions(seen - 1) for plan in plans] == evicted
            before = held
        assert before == sizes


@pytest.mark.every(3)
@pytest.mark.parametrize(("positions", "chunk", "prompt"), thinned(
    [(positions, *sizes) for positions in ("gap", "rolling", "absolute") for sizes in SIZES],
    lambda positions, *sizes: (positions, *sizes) in (("gap", 0, 60), ("rolling", 7, 60), ("absolute", 70, 127)),
))  # fmt: skip
def test_it_is_what_the_definitions_say(model: Any, positions: str, chunk: int, prompt: int) -> None:
    """Prompts that end before, while and after the layers change size; a chunk of 0 is the whole prompt."""
    plans = dict(zip(FINAL, schedules(tuple(FINAL), COUNTS, WINDOW), strict=True))

    def recent(layer: int, head: int) -> int:
        movable = BY_HEAD[layer][head] - SINKS
        return movable - movable * HEAVY // (WINDOW - SINKS)

    config = config_of(positions=positions, chunk=chunk)
    rules = Rules(
        WINDOW, HEAVY, SINKS, 0.9, positions, config.plan(256).span, long_term=2.0, recents=recent,
        limits=lambda layer, head, seen: plans[BY_HEAD[layer][head]].held(seen),
    )  # fmt: skip
    assert compare(model, config, rules, tokens_of(5, 130), prompt)


def test_until_the_window_is_full_nothing_is_lost(model: Any) -> None:
    with attach(model, config_of()) as cache:
        model(TOKENS[:, :WINDOW], past_key_values=cache)
        assert all(cache.kept(layer).shape[-1] == WINDOW for layer in range(3))
        for _ in range(60):
            model(TOKENS[:, :1], past_key_values=cache)
            assert 0.9 * WINDOW < cache.counts().cached <= WINDOW, "in a stage, growing heads leave slots empty"
            assert cache.counts().evicted == cache.seen_tokens - cache.counts().cached
        kept = [[int((head >= 0).sum()) for head in cache.kept(layer)[0]] for layer in range(3)]
        assert kept == BY_HEAD


def test_memory_is_that_of_equal_windows(model: Any) -> None:
    sizes = []
    for budgets in ("measured", "equal"):
        with attach(model, config_of(budgets=budgets)) as cache:
            model(TOKENS, past_key_values=cache)
            sizes.append(cache.nbytes)
    assert 0.99 * sizes[1] < sizes[0] <= sizes[1]


def test_rows_that_leave_a_batch_take_nothing_with_them(model: Any) -> None:
    """A short row continues as if alone after the long one, which had made layers change size, is dropped."""
    mask = torch.stack([torch.arange(60) >= 47, torch.ones(60)]).long()
    with attach(model, config_of()) as cache:
        model(TOKENS[:, :60] * mask, attention_mask=mask, past_key_values=cache)
        cache.reorder_cache(torch.tensor([0]))
        got = [model(TOKENS[:1, 60 + step, None], past_key_values=cache).logits for step in range(50)]
    with attach(model, config_of()) as cache:
        model(TOKENS[:1, 47:60], past_key_values=cache)
        wanted = [model(TOKENS[:1, 60 + step, None], past_key_values=cache).logits for step in range(50)]
    assert_close(torch.cat(got), torch.cat(wanted))


@pytest.mark.parametrize(
    ("fed", "kv_bits"), with_exhaustive([(20, 16), (30, 4), (70, 16)], [(20, 4), (30, 16), (70, 4)])
)
def test_a_state_continues_at_any_size(model: Any, monkeypatch: pytest.MonkeyPatch, fed: int, kv_bits: int) -> None:
    """The saved stream's windows are used, whatever is measured where it is loaded."""
    config = config_of(kv_bits=kv_bits)
    with attach(model, config) as cache:
        model(TOKENS[:, :fed], past_key_values=cache)
        state = cache.state_dict()
        wanted = [model(TOKENS[:, 70 + step, None], past_key_values=cache).logits for step in range(40)]
    monkeypatch.setattr("h2o_stream.attachment.attach.give_retrieval_heads_more", lambda model, specs, progress: specs)
    with attach(model, config) as cache:
        cache.load_state_dict(state)
        got = [model(TOKENS[:, 70 + step, None], past_key_values=cache).logits for step in range(40)]
        assert torch.cat(got).equal(torch.cat(wanted))
        for damaged in ({"groups": [], "windows": FINAL}, {"groups": [[]] * 3}, {}):
            with pytest.raises(H2OStreamError, match="its budgets are"):
                cache.load_state_dict(with_checksums({**state, "budgets": to_tensor(encode_json(damaged))}))
        groups = [[(group.heads, group.share) for group in layer] for layer in GROUPS]
        saved = {"groups": groups, "windows": [99] * len(FINAL)}
        with pytest.raises(H2OStreamError, match="its budgets are"):
            cache.load_state_dict(with_checksums({**state, "budgets": to_tensor(encode_json(saved))}))
        cache.load_state_dict(state)


def test_pins_are_in_every_layer_and_late_ones_must_fit_the_smallest(model: Any) -> None:
    with attach(model, config_of()) as cache:
        cache.pin(0, 8)
        model(TOKENS[:, :100], past_key_values=cache)
        for layer in range(3):
            for head in cache.kept(layer)[0]:
                assert head[head >= 0][:8].tolist() == list(range(8))
        smallest = min(windows(ALL, WINDOW, 8, MIN_EVICTABLE))
        cache.pin(99, 110)
        assert cache.counts().grown == 8 + 11 + MIN_EVICTABLE - smallest


class TestMeasured:
    def test_the_embedded_model_has_a_few_retrieval_heads(self, served_embedded: LoadedModel) -> None:
        """As it was measured, which test_runtime does again."""
        with Engine(served_embedded.model, served_embedded.tokenizer, CacheConfig(window=256)) as engine:
            groups: Any = engine.cache.head_groups  # type: ignore[attr-defined]
            heads = [group.schedule.window for group in groups for _ in group.heads]
        assert len(heads) == 90
        assert 255 < sum(heads) / 90 <= 256
        assert min(heads) > 64
        assert 4 < sum(size > 512 for size in heads) < 20

    def test_what_took_long_is_kept_and_what_is_damaged_measured_again(self, monkeypatch: Any, own_cache: Path) -> None:
        monkeypatch.setattr(retrieval_heads, "LONG_S", 0.0)
        monkeypatch.setattr(retrieval_heads, "_measured", {})
        model, specs = make_llama(seed=5), [LayerSpec(), LayerSpec()]
        first = retrieval_heads._known(model, specs)
        (path,) = (own_cache / "reach").iterdir()
        retrieval_heads._measured.clear()
        path.write_text(json.dumps((first + 1).tolist()))
        torch.testing.assert_close(retrieval_heads._known(model, specs), first + 1)
        for damaged in ("", "[[1", "[1, 2]", "[[0.5, 0.5]]", '{"a": 1}', "\x00"):
            retrieval_heads._measured.clear()
            path.write_text(damaged)
            assert retrieval_heads._known(model, specs).equal(first)
        assert len(list(path.parent.iterdir())) == 1

    def test_a_model_that_copies_nothing_has_equal_windows(self) -> None:
        with attach(make_llama(layers=3), CacheConfig(window=16, sinks=0)) as cache:
            assert [group.schedule.window for group in cache.head_groups] == [16] * 3

    def test_what_is_not_measured_is_equal(self, model: Any) -> None:
        for config in (CacheConfig("sink", WINDOW), CacheConfig(window=WINDOW, budgets="equal")):
            with attach(model, config) as cache:
                assert {group.schedule.window for group in cache.head_groups} == {WINDOW}
