"""Slots on their own and attached to a model."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from h2o_stream import CacheConfig, ConfigError, H2OStreamError, attach
from h2o_stream.cache import eager
from h2o_stream.cache.attention import LogitTransform
from h2o_stream.cache.audit import check_slots
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.config import MIN_EVICTABLE
from tests.fixtures import ids
from tests.slots import attend
from tests.tolerance import assert_close


class TestChunks:
    def test_several_forwards_equal_one(self, tiny: LlamaForCausalLM) -> None:
        with attach(tiny, CacheConfig(window=12, heavy=4, chunk=4)) as cache:
            whole = tiny(ids(32), past_key_values=cache).logits
            kept = cache.kept(1)
            cache.reset()
            logits = [tiny(part, past_key_values=cache).logits for part in ids(32).split(8, dim=1)]
            assert kept.equal(cache.kept(1))
        assert_close(torch.cat(logits, 1), whole)


class TestSlots:
    """Bookkeeping of one layer under any mix of prefill and decode steps."""

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(
        policy=st.sampled_from(["h2o", "h2o-paper", "sink", "recent"]),
        window=st.integers(2, 12),
        lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
        batch=st.integers(1, 2),
    )
    def test_invariants(self, policy: str, window: int, lengths: list[int], batch: int) -> None:
        plan = CacheConfig(policy, window, positions="absolute", chunk=4).plan()
        layer = HeadGroup(plan)
        for number, length in enumerate(lengths):
            torch.manual_seed(number)
            q, k, v = (
                torch.randn(batch, 4, length, 4),
                torch.randn(batch, 2, length, 4),
                torch.randn(batch, 2, length, 4),
            )
            assert attend(layer, q, k, v, LogitTransform(0.5)).shape == (batch, length, 4, 4)
            self.check(layer)

    def check(self, layer: HeadGroup) -> None:
        check_slots(layer, "slots")
        held = layer.held
        kept = layer.kept()
        seen = layer.tokens.lengths[0]
        recent = torch.arange(max(seen - layer.protection.recent, 0), seen)
        assert kept[..., held - len(recent) :].eq(recent).all()
        pinned = torch.arange(min(layer.plan.sinks, held))
        assert kept[..., : len(pinned)].eq(pinned).all()

    def test_keys_and_values_stay_with_their_tokens(self) -> None:
        plan = CacheConfig("h2o", 6, heavy=2, sinks=1, positions="absolute", chunk=3).plan()
        layer = HeadGroup(plan)
        numbers = torch.arange(20.0)
        for part in numbers.split([5, 1, 1, 4, 1, 1, 1, 6]):
            k = part.view(1, 1, -1, 1).expand(1, 2, -1, 4)
            attend(layer, torch.randn(1, 2, len(part), 4), k.clone(), -k, LogitTransform(0.5))
            occupied = layer.index >= 0
            assert layer.store.keys[occupied][:, 0].equal(layer.index[occupied].float())
            assert layer.store.values[occupied][:, 0].equal(-layer.index[occupied].float())

    def test_scores_are_float32_and_do_not_saturate_in_bfloat16(self) -> None:
        """Bug 4 of the reference: at a score of 512, increments below 1 vanish in half precision."""
        plan = CacheConfig("h2o-paper", 4, heavy=2, positions="absolute").plan()
        layer = HeadGroup(plan)
        one = torch.ones(1, 1, 1, 4, dtype=torch.bfloat16)
        for _ in range(3):
            attend(layer, one, one, one, LogitTransform(0.5))
        layer.scores[layer.index == 0] = 4096.0
        before = layer.scores[layer.index == 0].item()
        attend(layer, one, one, one, LogitTransform(0.5))
        assert layer.scores.dtype == torch.float32
        assert layer.scores[layer.index == 0].item() == pytest.approx(before + 0.25)

    def test_bytes_are_the_arithmetic(self, grouped: LlamaForCausalLM) -> None:
        with attach(grouped, CacheConfig(window=20)) as cache:
            assert cache.nbytes == 0
            sizes = []
            for part in ids(60, rows=2).split(6, dim=1):
                grouped(part, past_key_values=cache)
                sizes.append(cache.nbytes)
        slots, heads, size, layers, batch = 21, 2, 8, 2, 2
        per_slot = 2 * size * 4 + 3 * 4 + 2
        assert set(sizes) == {layers * batch * (heads * (slots * per_slot + 8) + 8)}


class TestPrefill:
    def test_no_matrix_is_larger_than_chunk_by_window_and_chunk(self, tiny: Any, monkeypatch: Any) -> None:
        """Bug 7 of the reference: it materializes the whole attention matrix of a prompt."""
        shapes, attention = [], eager.attention

        def watch(*args: Any) -> Any:
            output, probs = attention(*args)
            shapes.append(probs.shape)
            return output, probs

        with attach(tiny, CacheConfig(window=20, chunk=16), engine="eager"):
            monkeypatch.setattr(eager, "attention", watch)
            tiny(ids(500))
        assert max(shape[-2] for shape in shapes) == 16
        assert max(shape[-1] for shape in shapes) == 20 + 16


class TestPins:
    def test_pinned_tokens_outlive_the_stream(self, tiny: LlamaForCausalLM) -> None:
        with attach(tiny, CacheConfig(window=24)) as cache:
            cache.pin(0, 10)
            tiny(ids(100), past_key_values=cache)
            assert cache.kept(0)[..., :10].eq(torch.arange(10)).all()
            counts = cache.counts()
            assert (counts.sinks, counts.pinned, counts.cached, counts.evicted) == (4, 6, 24, 76)
            assert counts.sinks + counts.pinned + counts.heavy + counts.recent + counts.free == counts.window

    def test_ranges_anywhere_and_let_go_again(self, tiny: LlamaForCausalLM) -> None:
        """A pin may name tokens that have not been fed yet; in a batch it counts each row's tokens."""
        mask = torch.ones(2, 60).index_fill(1, torch.arange(20), 0)
        mask[0] = 1
        with attach(tiny, CacheConfig(window=32, chunk=8)) as cache:
            cache.pin(10, 14)
            cache.pin(25, 30)
            cache.pin(12, 16)
            assert cache.pins == (range(10, 16), range(25, 30))
            tiny(ids(60, rows=2), attention_mask=mask, past_key_values=cache)
            for row in cache.kept(1).flatten(0, 1).tolist():
                assert {0, 1, 2, 3, *range(10, 16), *range(25, 30)} <= set(row)
            assert cache.counts().pinned == 11
            cache.unpin(12, 27)
            assert cache.pins == (range(10, 12), range(27, 30))
            cache.unpin()
            assert cache.pins == ()
            tiny(ids(200, rows=2), past_key_values=cache)
            assert not {10, 11, 12, 13, 14, 15} <= set(cache.kept(1)[0, 0].tolist())

    def test_a_late_pin_holds_what_every_head_still_has(self, tiny: LlamaForCausalLM) -> None:
        with attach(tiny, CacheConfig(window=24, chunk=8)) as cache:
            tiny(ids(60), past_key_values=cache)
            cache.pin(52, 58)
            with pytest.raises(H2OStreamError, match="tokens 20 to 22 some have been evicted"):
                cache.pin(20, 22)
            tiny(ids(100, seed=1), past_key_values=cache)
            assert all({*range(52, 58)} <= set(head) for head in cache.kept(1)[0].tolist())

    def test_a_pin_that_is_not_a_range_is_refused(self, tiny: LlamaForCausalLM) -> None:
        with attach(tiny, CacheConfig(window=24)) as cache:
            for start, stop in ((-1, 3), (5, 4)):
                with pytest.raises(ConfigError, match="cannot be pinned"):
                    cache.pin(start, stop)

    def test_a_full_cache_takes_pins_and_needs_none(self, tiny: LlamaForCausalLM) -> None:
        with attach(tiny, CacheConfig("full")) as cache:
            cache.pin(0, 1000)
            cache.unpin()
            assert cache.pins == ()

    def test_too_many_for_the_context_are_refused(self, tiny: LlamaForCausalLM) -> None:
        context = tiny.config.max_position_embeddings
        with attach(tiny, CacheConfig(window=24, chunk=8)) as cache:
            cache.pin(0, context - 8 - MIN_EVICTABLE)
            assert cache.counts().window == context - 8
            with pytest.raises(ConfigError, match=f"leave 7 of a window of {context - 8}, as large as the {context}"):
                cache.pin(0, context - 7 - MIN_EVICTABLE)

    def test_too_late_is_refused(self, tiny: LlamaForCausalLM) -> None:
        with attach(tiny, CacheConfig(window=24)) as cache:
            tiny(ids(30), past_key_values=cache)
            with pytest.raises(H2OStreamError, match="30 were seen"):
                cache.pin(0, 10)
