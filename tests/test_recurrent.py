"""Hybrids: recurrent states pass through the cache with the slots, in batches, turns, beams and saved streams."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_stream import CacheConfig, H2OStreamError, UnsupportedModelError, attach
from h2o_stream.cache.attention import LogitTransform
from h2o_stream.cache.layer import LayerSpec
from h2o_stream.cache.recurrent import states_of
from h2o_stream.cache.windows import HeadWindow
from h2o_stream.config import CachePlan
from tests.families import FAMILIES, tiny
from tests.fixtures import ids as tokens
from tests.fixtures import thinned, with_exhaustive
from tests.states import with_checksums
from tests.test_generate_forms import PROMPTS, batch_of, generate, step, with_column
from tests.tolerance import assert_close

HYBRIDS = ("Qwen3-Next", "Falcon-H1", "Jamba", "MiniMax", "LFM3", "Nemotron-H")
"""A delta rule, attention and states in one layer, a model that begins anew, a cache of its own, convolutions, and
layers that keep nothing."""


def make(name: str) -> Any:
    return next(family for family in FAMILIES if family.name == name).make()


def states(cache: Any) -> list[Tensor]:
    return [state for layer in cache.layers for state in states_of(layer).values()]


WAYS: list[dict[str, Any]] = [
    {}, {"num_beams": 3, "num_return_sequences": 3}, {"do_sample": True, "num_return_sequences": 2},
]  # fmt: skip
hybrids = pytest.mark.parametrize("name", with_exhaustive(HYBRIDS[::2], HYBRIDS[1::2]))
policies = pytest.mark.parametrize("policy", ["h2o", pytest.param("full", marks=pytest.mark.exhaustive)])


@policies
@pytest.mark.parametrize(("name", "how"), thinned(
    itertools.product(HYBRIDS, WAYS), lambda name, how: HYBRIDS.index(name) == 2 * WAYS.index(how)
))  # fmt: skip
def test_generate_is_what_it_is_without_a_cache(name: str, policy: str, how: dict[str, Any]) -> None:
    model, batch = make(name), batch_of(3)
    expected = generate(use_cache=False, **how)(model, None, batch)
    with attach(model, CacheConfig(policy, window=64)) as cache:
        assert generate(**how)(model, cache, batch).equal(expected)


def in_turns(model: Any, lengths: list[tuple[int, ...]], rows: int, config: CacheConfig) -> list[tuple[Tensor, Any]]:
    """Logits [n, V] of each row and what it keeps, fed in padded turns of these lengths by row."""
    texts = [tokens(sum(turn[row] for turn in lengths), seed=row)[0] for row in range(rows)]
    found: list[list[Tensor]] = [[] for _ in texts]
    with attach(model, config) as cache:
        for number, turn in enumerate(lengths):
            width = max(turn[:rows])
            ids, mask = torch.zeros(rows, width, dtype=torch.int64), torch.zeros(rows, width, dtype=torch.int64)
            for row, count in enumerate(turn[:rows]):
                start = sum(earlier[row] for earlier in lengths[:number])
                columns = slice(width - count, width) if number % 2 == 0 else slice(0, count)
                ids[row, columns], mask[row, columns] = texts[row][start : start + count], 1
            logits = model(ids, attention_mask=mask, past_key_values=cache).logits
            for row, line in enumerate(found):
                line.append(logits[row, mask[row].bool()])
        kept = [{n: cache.kept(n)[row].tolist() for n in cache.evicting_layers} for row in range(rows)]
        assert cache.get_seq_length() == sum(max(turn[:rows]) for turn in lengths)
    return [(torch.cat(line), held) for line, held in zip(found, kept, strict=True)]


@hybrids
def test_rows_of_padded_turns_are_as_alone(name: str) -> None:
    """Padding before and after the tokens of a turn, and rows that wait."""
    model, config = make(name), CacheConfig(window=12, chunk=5)
    lengths = [(9, 5, 14), (4, 7, 0), (1, 1, 1), (0, 1, 1), (3, 8, 8), (6, 0, 2)]
    together = in_turns(model, lengths, 3, config)
    for row in range(3):
        alone, held = by_itself(model, [turn[row] for turn in lengths if turn[row]], row, config)
        assert_close(together[row][0], alone)
        for layer, heads in held.items():
            assert [[i for i in head if i >= 0] for head in together[row][1][layer]] == heads


def by_itself(model: Any, counts: list[int], row: int, config: CacheConfig) -> tuple[Tensor, Any]:
    with attach(model, config) as cache:
        parts = tokens(sum(counts), seed=row).split(counts, 1)
        logits = torch.cat([model(part, past_key_values=cache).logits[0] for part in parts])
        return logits, {n: cache.kept(n)[0].tolist() for n in cache.evicting_layers}


@hybrids
def test_a_turn_of_several_tokens_goes_on(name: str) -> None:
    """Jamba's own forward begins a new state with it, so that its tokens go one by one."""
    model, ids = make(name), tokens(40)
    expected = model(ids, use_cache=False).logits
    with attach(model, CacheConfig(window=48)) as cache:
        assert cache.continues == (name != "Jamba")
        ours = torch.cat([model(part, past_key_values=cache).logits for part in ids.split([20, 1, 12, 1, 6], 1)], 1)
        assert_close(ours, expected)
        last = model(tokens(3, seed=1), past_key_values=cache, logits_to_keep=1, return_dict=False)
        assert last[0].shape == (1, 1, 64)


@policies
@hybrids
def test_going_back_to_a_state(name: str, policy: str) -> None:
    """As /undo does; and another stream with another number of rows begins from nothing."""
    model = make(name)
    with attach(model, CacheConfig(policy, window=12, chunk=5)) as cache:
        model(tokens(30, rows=2), past_key_values=cache)
        state, ids = cache.state_dict(), tokens(1, rows=2, seed=3)
        expected = model(ids, past_key_values=cache).logits
        model(tokens(7, rows=2, seed=4), past_key_values=cache)
        cache.load_state_dict(state)
        assert model(ids, past_key_values=cache).logits.equal(expected)
        cache.reset()
        assert not states(cache)
        first = model(tokens(30), past_key_values=cache).logits
        with pytest.raises(H2OStreamError, match="fit"):
            cache.load_state_dict(
                with_checksums({**state, **{k: v[:1] for k, v in state.items() if "conv" in k or "recurrent" in k}})
            )
        assert model(tokens(30)).logits.equal(first)


def test_a_state_without_the_recurrent_part_is_refused() -> None:
    model = make("Qwen3-Next")
    with attach(model, CacheConfig(window=12)) as cache:
        model(tokens(30), past_key_values=cache)
        state = {name: x for name, x in cache.state_dict().items() if "conv" not in name and "recurrent" not in name}
        with pytest.raises(H2OStreamError, match="has no recurrent state"):
            cache.load_state_dict(with_checksums({k: v for k, v in state.items() if k != "checksums"}))


@hybrids
def test_rows_are_reordered_with_their_states(name: str) -> None:
    model, ids = make(name), tokens(20, rows=3)
    with attach(model, CacheConfig(window=12, chunk=5)) as cache:
        model(ids, past_key_values=cache)
        cache.reorder_cache(torch.tensor([2, 2, 0]))
        ours = model(tokens(1).expand(3, 1), past_key_values=cache).logits
        model(ids[[2, 2, 0]])
        assert_close(ours, model(tokens(1).expand(3, 1), past_key_values=cache).logits)


@hybrids
def test_pins_and_what_is_evicted_first(name: str) -> None:
    with attach(model := make(name), CacheConfig(window=16, chunk=4)) as cache:
        cache.pin(6, 9)
        cache.evict_first(10, 20)
        model(tokens(40, rows=2), past_key_values=cache)
        for layer in cache.evicting_layers:
            for head in cache.kept(layer).flatten(0, 1).tolist():
                assert {6, 7, 8} <= set(head)
                assert not set(range(10, 20)) & set(head)


@hybrids
def test_memory_is_constant_and_the_states_are_counted(name: str) -> None:
    model = make(name)
    with attach(model, CacheConfig(window=40, chunk=16)) as cache:
        sizes = set()
        for _ in range(4):
            model(tokens(50), past_key_values=cache)
            sizes.add(cache.nbytes)
        held = sum(state.nbytes for state in states(cache))
        assert sizes == {held + sum(group.nbytes for group in cache.head_groups)}
        assert held == sum(spec.state_bytes for spec in cache.specs)
    with attach(model, CacheConfig(cache_size=sizes.pop(), kv_bits=16, chunk=16)) as cache:
        assert cache.plan.window == 40


def test_padding_of_the_first_turn_may_be_anywhere() -> None:
    model, ids = make("Falcon-H1"), tokens(12)
    with attach(model, CacheConfig(window=24)):
        expected = model(ids).logits
        padded = torch.cat((torch.zeros(1, 2, dtype=torch.int64), ids, torch.zeros(1, 3, dtype=torch.int64)), 1)
        mask = torch.tensor([[0] * 2 + [1] * 12 + [0] * 3])
        ours = model(torch.cat((padded, tokens(17, seed=2))), attention_mask=torch.cat((mask, torch.ones_like(mask))))
        assert_close(ours.logits[:1, 2:14], expected)
        with pytest.raises(H2OStreamError, match="nothing but logits"):
            model(padded, attention_mask=mask, output_hidden_states=True)


def test_a_column_of_padding_after_a_prompt() -> None:
    model, batch = make("Qwen3-Next"), batch_of(3)
    with attach(model, CacheConfig(window=64)) as cache:
        model(**batch, past_key_values=cache)
        mask = with_column(batch["attention_mask"], 1, 0, 0)
        step(model, cache, mask)
        ours = step(model, cache, with_column(mask, 1, 1, 1)).logits
        for row, count in enumerate(PROMPTS):
            text = batch["input_ids"][row : row + 1, -count:]
            said = [9, 9] if row == 0 else [9]
            alone = model(torch.cat((text, torch.tensor([said])), 1)).logits[:, -1:]
            assert_close(ours[row : row + 1], alone)


def test_nothing_to_evict_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no layer whose memory would grow"), attach(tiny_mamba()):
        pass


def tiny_mamba() -> Any:
    return tiny("Mamba", hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=8)()


def test_learned_sinks_go_with_their_heads() -> None:
    """Heads in two groups attend as in one."""
    plan = CachePlan("recent", 16, 0, 0, 16, 1.0, "absolute", 0, 16)
    query, key, value = (torch.randn(1, heads, 9, 8) for heads in (6, 3, 3))
    transform = LogitTransform(0.3, sinks=torch.randn(6))
    whole, split = LayerSpec(), LayerSpec(windows=(HeadWindow((0, 2)), HeadWindow((1,))))
    one, two = (spec.make_layer(plan, 0).attend(query, key, value, transform) for spec in (whole, split))
    assert_close(one, two)
    without = whole.make_layer(plan, 0).attend(query, key, value, LogitTransform(0.3))
    assert (one - without).abs().max() > 0.01
