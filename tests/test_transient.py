"""Tokens that are evicted first: recalled passages, which have served their turn."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from h2o_stream import CacheConfig, ConfigError, H2OStreamError, attach
from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.cache.policies import Candidates, Policy, make_policy
from h2o_stream.cache.protection import Protection
from tests.fixtures import ids
from tests.states import with_checksums

WINDOW = 32


def feed(model: Any, cache: Any, tokens: Tensor) -> None:
    for part in tokens.split(1, 1):
        model(part, past_key_values=cache)


def held_of(cache: H2OCache, tokens: range) -> int:
    """How many heads hold how many of the tokens, in sum."""
    index = torch.cat([group.index.flatten() for group in cache.head_groups])
    return int(((index >= tokens.start) & (index < tokens.stop)).sum())


def test_no_score_is_lower(tiny: LlamaForCausalLM) -> None:
    """Not of a policy of anyone's; only an empty slot and a token that is not a number are worth less."""

    class Negative(Policy):
        def priority(self, candidates: Candidates) -> Tensor:
            return torch.tensor([-1e38, 0.0, torch.nan, 1e38, -3e37, 0.0]).expand_as(candidates.scores)

    config = CacheConfig(window=WINDOW)
    index = torch.tensor([[[3, 4, 5, 6, 7, -1]]], dtype=torch.int32)
    rank = torch.tensor([[[4, 3, 2, 1, 0, 6]]], dtype=torch.int32)
    candidates = Candidates(torch.zeros(1, 1, 6), index, rank, torch.tensor([[[8]]]))
    worth = Negative(config.plan()).worth(candidates, Protection(0, (), 0, (range(4, 5), range(6, 8))))
    assert worth.dtype == torch.float32
    assert worth[0, 0].argsort().tolist() == [5, 2, 1, 3, 4, 0]
    protected = make_policy(config.plan()).worth(candidates, Protection(4, (range(6, 7),), 1, (range(9),)))
    assert protected[0, 0].isposinf().tolist() == [True, False, False, True, True, False]
    assert protected.max() > 0 > protected[0, 0, 1] > protected[0, 0, 5]


class TestRanges:
    def test_they_are_merged_and_forgotten_when_nobody_holds_them(self, tiny: LlamaForCausalLM) -> None:
        with attach(tiny, CacheConfig(window=WINDOW, chunk=8)) as cache:
            cache.evict_first(100, 110)
            cache.evict_first(10, 14)
            cache.evict_first(14, 16)
            assert cache.transient == (range(10, 16), range(100, 110))
            tiny(ids(20), past_key_values=cache)
            cache.evict_first(3, 3)
            assert cache.transient == (range(10, 16), range(100, 110))
            feed(tiny, cache, ids(60))
            cache.evict_first(3, 3)
            assert cache.transient == (range(100, 110),)

    def test_the_list_stays_short_in_an_endless_stream(self, tiny: LlamaForCausalLM) -> None:
        with torch.no_grad(), attach(tiny, CacheConfig(window=WINDOW, chunk=8)) as cache:
            for turn in range(60):
                tiny(ids(9), past_key_values=cache)
                cache.evict_first(9 * turn, 9 * turn + 4)
                assert len(cache.transient) <= WINDOW // 9 + 2

    def test_a_row_that_has_not_come_so_far_keeps_them(self, tiny: LlamaForCausalLM) -> None:
        mask = torch.ones(2, 60, dtype=torch.int64)
        mask[1, :50] = 0
        with attach(tiny, CacheConfig(window=WINDOW, chunk=8)) as cache:
            tiny(ids(60, 2), attention_mask=mask, past_key_values=cache)
            cache.evict_first(11, 14)
            feed(tiny, cache, ids(60, 2)[:, :40])
            cache.evict_first(100, 101)
            assert cache.transient == (range(100, 101),)
            assert not any({11, 12, 13} & set(head) for head in cache.kept(0).flatten(0, 1).tolist())

    def test_a_new_stream_has_none(self, tiny: LlamaForCausalLM) -> None:
        with attach(tiny, CacheConfig(window=WINDOW)) as cache:
            cache.evict_first(5, 9)
            tiny(ids(20), past_key_values=cache)
            cache.reset()
            assert cache.transient == ()
            assert not cache.head_groups[0].protection.transient

    def test_ratios_of_a_first_prompt_leave_them(self, tiny: LlamaForCausalLM) -> None:
        with attach(tiny, CacheConfig("h2o-paper", heavy_ratio=0.25, recent_ratio=0.25)) as cache:
            cache.evict_first(5, 9)
            tiny(ids(60), past_key_values=cache)
            assert cache.transient == (range(5, 9),)
            assert held_of(cache, range(5, 9)) == 0

    @pytest.mark.parametrize(("start", "stop"), [(-1, 3), (5, 4), (0, 2**31)])
    def test_what_is_no_range_is_refused(self, tiny: LlamaForCausalLM, start: int, stop: int) -> None:
        with (
            attach(tiny, CacheConfig(window=WINDOW)) as cache,
            pytest.raises(ConfigError, match=f"tokens {start} to {stop} cannot be evicted first"),
        ):
            cache.evict_first(start, stop)

    def test_a_full_cache_takes_them_and_evicts_nothing(self, tiny: LlamaForCausalLM) -> None:
        with attach(tiny, CacheConfig("full")) as cache:
            tiny(ids(20), past_key_values=cache)
            cache.evict_first(0, 10)
            assert (cache.transient, cache.kept().shape[-1]) == ((), 20)


class TestState:
    @pytest.mark.parametrize("bounds", [[3], [5, 4], [3, 5, 5, 9], [9, 12, 3, 5], [-1, 4]])
    def test_ranges_that_are_none_are_refused(self, tiny: LlamaForCausalLM, bounds: list[int]) -> None:
        config = CacheConfig(window=WINDOW, chunk=8)
        with attach(tiny, config) as cache:
            tiny(ids(40, 2), past_key_values=cache)
            state = cache.state_dict()
        del state["checksums"]
        with attach(tiny, config) as cache, pytest.raises(H2OStreamError, match="the state is damaged: transient is"):
            cache.load_state_dict(with_checksums(state | {"transient": torch.tensor(bounds)}))

    def test_rows_that_are_chosen_anew(self, tiny: LlamaForCausalLM) -> None:
        with attach(tiny, CacheConfig(window=WINDOW, chunk=8)) as cache:
            tiny(ids(40, 2), past_key_values=cache)
            cache.evict_first(22, 30)
            cache.batch_select_indices(torch.tensor([1, 0, 1]))
            feed(tiny, cache, ids(30, 3))
            assert held_of(cache, range(22, 30)) == 0
