"""Policies that fold what they evict: their moments, and what attention makes of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from h2o_stream import CacheConfig, attach
from h2o_stream.cache.attention import LogitTransform, attention
from h2o_stream.cache.policies import Candidates, Policy, make_policy
from tests.conftest import make_llama
from tests.families import FAMILIES
from tests.oracle import Rules
from tests.test_oracle import compare, tokens_of
from tests.tolerance import assert_close

folding = pytest.mark.parametrize("policy", ["compensation", "moments"])

SIZE = 8


def fold(policy: Policy, keys: Tensor, values: Tensor, *parts: Tensor) -> dict[str, Tensor]:
    """The state after parts [B, H, K] of the tokens were evicted one after the other."""
    index = torch.arange(keys.shape[2]).expand(keys.shape[:3])
    seen = torch.full((len(keys), 1, 1), keys.shape[2])
    start = policy.head_state(1, keys.shape[-1], values.shape[-1])
    state = {name: x.expand(*keys.shape[:2], *x.shape) for name, x in start.items()}
    for part in parts:
        tokens = Candidates(index.float(), index, seen - 1 - index, seen, keys=keys, values=values, head_state=state)
        state = policy.fold(tokens, part)
    return state


def outputs(policy: Policy, spread: float) -> tuple[Tensor, Tensor]:
    """What queries get from 4 kept tokens and 20 folded ones, whose keys differ by `spread`, and from all 24."""
    generator = torch.Generator().manual_seed(1)
    query, kept, centre = (torch.randn(1, 1, n, SIZE, generator=generator) for n in (3, 4, 1))
    keys = torch.cat((kept, centre + spread * torch.randn(1, 1, 20, SIZE, generator=generator)), 2)
    values = torch.randn(1, 1, 24, SIZE, generator=generator)
    state = fold(policy, keys, values, (torch.arange(24) >= 4).expand(1, 1, 24))
    folded = policy.folded(state, query[:, :, None], torch.full((1, 1, 1), 24), None)
    transform = LogitTransform(1.0)
    ours = attention(query, keys[:, :, :4], values[:, :, :4], None, None, transform, folded)[0]
    return ours, attention(query, keys, values, None, None, transform)[0]


def test_moments_of_parts_are_the_moments_of_all() -> None:
    policy = make_policy(CacheConfig("moments", 32).plan())
    keys, values = torch.randn(2, 2, 30, SIZE) + 3, torch.randn(2, 2, 30, 5)
    evicted, part = torch.rand(2, 2, 30) < 0.6, torch.arange(30) % 3
    state = fold(policy, keys, values, *(evicted & (part == n) for n in range(3)), torch.zeros_like(evicted))
    for row in range(2):
        for head in range(2):
            gone = evicted[row, head]
            k, v = keys[row, head, gone], values[row, head, gone]
            assert state["folded_count"][row, head] == gone.sum()
            assert state["folded_indices"][row, head] == gone.nonzero().sum()
            assert_close(state["folded_key"][row, head], k.mean(0))
            assert_close(state["folded_value"][row, head], v.mean(0))
            assert_close(state["folded_covariance"][row, head], (v - v.mean(0)).T @ (k - k.mean(0)) / len(k))


@folding
def test_equal_keys_fold_without_loss(policy: str) -> None:
    ours, exact = outputs(make_policy(CacheConfig(policy, 32).plan()), 0.0)
    assert_close(ours, exact)


def test_the_covariance_follows_the_query_to_first_order() -> None:
    """Ten times smaller differences make the error of the mean ten times smaller, and that of the moments a hundred."""
    errors = {
        policy: [float((ours - exact).norm()) for s in (0.1, 0.01) for ours, exact in [outputs(rule, s)]]
        for policy in ("compensation", "moments")
        for rule in [make_policy(CacheConfig(policy, 32).plan())]
    }
    first, second = errors["compensation"], errors["moments"]
    assert 7 < first[0] / first[1] < 14
    assert 50 < second[0] / second[1] < 200


@folding
@pytest.mark.parametrize("positions", ["gap", "rolling", "absolute"])
@pytest.mark.parametrize("chunk", [1, 7])
def test_the_oracle_folds_alike(policy: str, positions: str, chunk: int) -> None:
    """Within the span and far behind it, with pins, and with transient tokens that leave without being folded."""
    config = CacheConfig(policy, 16, 6, 2, 0.9, positions, span=13, chunk=chunk, budgets="equal", long_term=2.0)
    recent = 11 - 11 * 6 // 14
    rules = Rules(
        16,
        6,
        2,
        0.9,
        positions,
        13,
        long_term=2.0,
        folding=policy,
        recents=lambda layer, head: recent,
        pins=(range(5, 8),),
        transient=((0, range(20, 26)),),
    )
    assert compare(make_llama(groups=3), config, rules, tokens_of(4, 70), 40)


@folding
@pytest.mark.parametrize("kv_bits", [16, 4])
def test_every_token_is_held_or_counted(grouped: LlamaForCausalLM, policy: str, kv_bits: int) -> None:
    tokens = torch.tensor([tokens_of(2, 80), tokens_of(3, 80)])
    with attach(grouped, CacheConfig(policy, 24, chunk=8, kv_bits=kv_bits)) as cache:
        cache.evict_first(10, 14)
        for part in tokens.split([50, *[1] * 10, 20], 1):
            grouped(part, past_key_values=cache)
            for group in cache.head_groups:
                folded, transient = group.head_state.folded_count[..., 0], (group.index >= 10) & (group.index < 14)
                gone = 4 - transient.sum(-1)
                assert ((group.index >= 0).sum(-1) + folded + gone == cache.seen_tokens).all()
        assert cache.nbytes > sum(x.nbytes for group in cache.head_groups for x in vars(group.head_state).values()) > 0


def test_a_sliding_window_folds_nothing() -> None:
    """What the model hides by itself does not come back as a mean."""
    model = next(family for family in FAMILIES if family.name == "Mistral, sliding").make()
    tokens = torch.tensor([tokens_of(2, 60)])
    logits = []
    for policy in ("h2o", "moments"):
        with attach(model, CacheConfig(policy, 24, positions="absolute", chunk=8), engine="eager") as cache:
            logits.append(model(tokens, past_key_values=cache).logits)
    assert logits[0].equal(logits[1])
