"""Policies that look at keys and values or keep something of each head, and those from the literature."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from h2o_lab.literature.query_moments import QueryMoments
from h2o_stream import CacheConfig, attach, config
from h2o_stream.cache.policies import Candidates, make_policy
from h2o_stream.cache.policies.accumulated import Accumulated
from h2o_stream.cache.source import policy_source
from h2o_stream.errors import ConfigError
from tests.tolerance import assert_close


class Watcher(QueryMoments):
    """Records what it is shown."""

    defaults = config.PolicyDefaults(0.5, 4, 1.0, "gap", rule=f"{__name__}:Watcher")
    shown: ClassVar[list[Candidates]] = []

    def priority(self, candidates: Candidates) -> Tensor:
        self.shown.append(candidates)
        return candidates.rank.neg().float()


class TestKeysAndHeadState:
    @pytest.fixture(autouse=True)
    def watched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(config.POLICIES, "watcher", Watcher.defaults)
        monkeypatch.setattr(Watcher, "shown", [])

    @pytest.mark.parametrize("kv_bits", [16, 8])
    def test_a_policy_sees_what_is_stored(self, grouped: LlamaForCausalLM, kv_bits: int) -> None:
        """Keys before RoPE: in the first layer those of equal tokens are equal, wherever they are."""
        tokens = torch.arange(3, 13).repeat(1, 4)
        with attach(grouped, CacheConfig("watcher", window=24, chunk=7, kv_bits=kv_bits)) as cache:
            for part in (tokens[:, :36], *tokens[:, 36:].split(1, 1)):
                grouped(part, past_key_values=cache)
        last_but_one_chunk, last_step = Watcher.shown[4], Watcher.shown[-2]  # of the first layer
        for seen in (last_but_one_chunk, last_step):
            for x in (seen.keys, seen.values):
                assert seen.index.shape == x.shape[:3]
                for token in range(10):
                    same = x[0, 0][(seen.index[0, 0] >= 0) & (seen.index[0, 0] % 10 == token)]
                    assert float((same - same[:1]).abs().max()) < (1e-5 if kv_bits == 16 else 0.1)
            assert (seen.rotations.distance[seen.rank == 0] == 0).all()

    def test_the_moments_are_those_of_all_queries_of_a_row(self, grouped: LlamaForCausalLM) -> None:
        tokens, mask = torch.randint(3, 64, (2, 40)), torch.ones(2, 40, dtype=torch.int64)
        mask[0, :9] = 0
        states = []
        for ids, shown, step in ((tokens, mask, 11), (tokens[:1, 9:], None, 5), (tokens[1:], None, 1)):
            with attach(grouped, CacheConfig("watcher", window=24, chunk=7, positions="gap")) as cache:
                for end in range(step, ids.shape[1] + step, step):
                    seen = None if shown is None else shown[:, :end]
                    grouped(ids[:, end - step : end], attention_mask=seen, past_key_values=cache)
                states.append([vars(group.head_state) for group in cache.head_groups])
                assert cache.nbytes > sum(x.nbytes for state in states[-1] for x in state.values())
        both, alone = states[0][0], [state[0] for state in states[1:]]  # layers after the first depend on what is kept
        for name, x in both.items():
            assert x.shape == (2, 2, 3, 8)
            for row in range(2):
                assert_close(x[row], alone[row][name][0])
        assert (both["query_square"] >= both["query_mean"].square()).all()

    def test_rows_and_streams(self, grouped: LlamaForCausalLM) -> None:
        tokens = torch.randint(3, 64, (2, 30))
        with attach(grouped, CacheConfig("watcher", window=24)) as cache:
            grouped(tokens, past_key_values=cache)
            group = cache.head_groups[0]
            first, second = group.head_state.query_mean.clone()
            cache.reorder_cache(torch.tensor([1, 1]))
            assert group.head_state.query_mean.equal(torch.stack((second, second)))
            cache.reorder_cache(torch.tensor([0]))
            assert group.head_state.query_mean.equal(second[None])
            assert not first.equal(second)
            cache.reset()
            grouped(tokens[:1], past_key_values=cache)
            assert_close(group.head_state.query_mean, first[None])

    def test_others_see_no_keys(self) -> None:
        assert not Accumulated.needs_keys
        assert Candidates(*[torch.zeros(1, 1, 1)] * 4).keys is None


def literature(policy: str, keys: Tensor, values: Tensor, scores: Tensor, recent: int) -> Tensor:
    """Priorities [n] of tokens of one head, without rotations."""
    n = len(keys)
    plan = replace(CacheConfig(policy, window=n, sinks=0).plan(), recent=recent)
    index, rank = torch.arange(n), torch.arange(n - 1, -1, -1)
    seen = torch.tensor([[[n]]])
    view = Candidates(scores[None, None], index[None, None], rank[None, None], seen, None, keys[None, None])
    return make_policy(plan).priority(replace(view, values=values[None, None]))[0, 0]


class TestLiterature:
    """What each is for, on tokens made for it; the oracle has the numbers."""

    def test_the_version_identifies_their_source(self) -> None:
        """States of versions in which they were a part of h2o_stream can be loaded."""
        assert policy_source(CacheConfig("keydiff").plan()) == ""

    def test_keydiff_evicts_what_points_with_the_others(self) -> None:
        keys = torch.tensor([[1.0, 0.0], [5.0, 0.5], [0.1, 1.0], [1.0, 0.1]])
        worth = literature("keydiff", keys, keys, torch.zeros(4), 1)
        assert worth.argmax() == 2
        assert worth[2] - worth[1] > 0.5

    def test_lagkv_evicts_what_varies_least(self) -> None:
        even, uneven = torch.tensor([0.5, 0.5, 0.5]), torch.tensor([0.0, 3.0, 0.5])
        x = torch.stack([even, uneven, torch.zeros(3), torch.ones(3)])
        worth = literature("lagkv", x, x, torch.zeros(4), 2)
        assert worth[1] > worth[0]
        assert float(worth.sum()) == pytest.approx(1)

    def test_r_kv_keeps_the_newest_of_similar_keys(self) -> None:
        keys = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        worth = literature("r-kv", keys, keys, torch.ones(4), 1)
        assert worth[0] < worth[1] < worth[2]
        assert worth[2] == worth[3]

    def test_a_similar_value_halves_the_score_of_the_worse_token(self) -> None:
        values = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
        worth = literature("value-redundancy", values, values, torch.tensor([4.0, 3.0, 2.0, 1.0]), 1)
        assert worth.tolist() == [4.0, 1.5, 2.0, 1.0]


def test_a_policy_has_parameters_of_its_own() -> None:
    policy = make_policy(CacheConfig("snapkv:pooled=15:observation=8", 32).plan())
    assert (vars(policy)["pooled"], vars(policy)["observed"]) == (15, 8)
    for name, words in (("snapkv:pool=1", "it has observation=32, pooled=7"), ("snapkv:pooled=x", "'pooled=x' is no")):
        with pytest.raises(ConfigError, match=words):
            make_policy(CacheConfig(name, 32).plan())
    with pytest.raises(ConfigError, match="h2o has no parameters after a colon"):
        CacheConfig("h2o:decay=1")
