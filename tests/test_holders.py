"""How many heads hold each token, and the texts of the tokens that are held."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from h2o_stream import CacheConfig, H2OStreamError, attach
from h2o_stream.cache.holders import Holders, holders, retrieval_holders
from h2o_stream.cache.windows import HeadWindow
from h2o_stream.session.conversation_state import TurnSpan
from h2o_stream.session.retention import retention
from tests.families import FAMILIES
from tests.fixtures import make_llama


def ids(count: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(3, 64, (rows, count), generator=torch.Generator().manual_seed(rows))


def naive(kept: list[list[int]], start: int, stop: int) -> float:
    """Of the tokens that a head could hold, how many it does, over all heads; from `kept`, head by head."""
    return sum(sum(start <= token < stop for token in head) for head in kept) / (len(kept) * (stop - start))


def of_layers(cache: Any, layers: list[int]) -> list[list[int]]:
    return [[token for token in head if token >= 0] for number in layers for head in cache.kept(number)[0].tolist()]


@settings(max_examples=25, deadline=None)
@given(
    heads=st.lists(st.sets(st.integers(0, 30)), min_size=1, max_size=5),
    start=st.integers(0, 40),
    length=st.integers(1, 40),
)
def test_it_counts(heads: list[set[int]], start: int, length: int) -> None:
    most = max(map(len, heads))
    padded = torch.tensor([[-1] * (most - len(head)) + sorted(head) for head in heads]).view(len(heads), most)
    held, stop = Holders.of([padded[:2].numpy(), padded[2:].numpy()]), start + length
    assert held.share(start, stop) == pytest.approx(naive([list(head) for head in heads], start, stop))
    wanted = {token: sum(token in head for head in heads) / len(heads) for token in range(start, stop)}
    assert dict(held.shares(start, stop)) == pytest.approx({token: share for token, share in wanted.items() if share})
    assert held.share(start, start) == 0 == held.share(stop, start)
    assert [*held.shares(stop, start)] == []


@pytest.mark.parametrize("policy", ["h2o", "full"])
def test_a_stream(policy: str) -> None:
    model = make_llama()
    with torch.no_grad(), attach(model, CacheConfig(policy, window=24, chunk=8)) as cache:
        assert holders(cache).share(0, 5) == 0
        model(ids(70, 2), past_key_values=cache)
        for start, stop in ((0, 4), (3, 20), (30, 60), (60, 70)):
            whole = of_layers(cache, [0, 1])
            assert holders(cache).share(start, stop) == pytest.approx(naive(whole, start, stop))
            assert holders(cache, 1).share(start, stop) == pytest.approx(naive(of_layers(cache, [1]), start, stop))
        assert (holders(cache).share(3, 50) == 1) == (policy == "full")


@pytest.mark.parametrize("policy", ["h2o", "full"])
def test_layers_with_sliding_windows_hold_the_newest(policy: str) -> None:
    """They count among all heads and not among those that retrieve."""
    family = next(family for family in FAMILIES if "Gemma 3" in family.name)
    model = family.make()
    with (
        torch.no_grad(),
        attach(model, CacheConfig(policy, window=48, chunk=8, positions=family.positions[0])) as cache,
    ):
        model(ids(40), past_key_values=cache)
        layers = list(range(model.config.num_hidden_layers))
        assert holders(cache).share(0, 20) == pytest.approx(naive(of_layers(cache, layers), 0, 20))
        assert holders(cache).share(0, 20) < 1 == retrieval_holders(cache).share(0, 20)


def test_heads_with_larger_windows_are_asked(tiny: LlamaForCausalLM) -> None:
    with torch.no_grad(), attach(tiny, CacheConfig(window=24, chunk=8, budgets="equal")) as cache:
        tiny(ids(60), past_key_values=cache)
        assert retrieval_holders(cache).share(20, 40) == holders(cache).share(20, 40)  # there are none
        windows = (HeadWindow((0,), 0.75), HeadWindow((1,), 1.25))
        cache.specs = (replace(cache.specs[0], windows=windows), *cache.specs[1:])
        cache.reset()
        cache.make_layers(24)
        tiny(ids(60), past_key_values=cache)
        kept = of_layers(cache, [0])
        assert len(kept[0]) < len(kept[1])
        assert retrieval_holders(cache).num_heads == 1
        assert retrieval_holders(cache).share(20, 40) == pytest.approx(naive([kept[1]], 20, 40))


class TestRetention:
    @pytest.fixture
    def engine(self, tiny: LlamaForCausalLM, tokenizer: Any) -> Any:
        with torch.no_grad(), attach(tiny, CacheConfig(window=24, chunk=8)) as cache:
            tokens = ids(60)
            tiny(tokens, past_key_values=cache)
            yield SimpleNamespace(cache=cache, tokens=tokens[0].tolist(), tokenizer=tokenizer)

    def test_what_is_held_of_each_turn(self, engine: Any) -> None:
        turns = [TurnSpan(1, 0, 30), TurnSpan(2, 30, 60), TurnSpan(3, 60, 60)]
        first, second, empty = retention(engine, turns)
        kept = of_layers(engine.cache, [0, 1])
        for turn in (first, second):
            start, stop = turn.span.start, turn.span.stop
            assert turn.share == pytest.approx(naive(kept, start, stop))
            wanted = {token: sum(token in head for head in kept) / len(kept) for token in range(start, stop)}
            assert {piece.index: piece.share for piece in turn.pieces} == pytest.approx(
                {token: share for token, share in wanted.items() if share}
            )
        assert (empty.share, empty.pieces) == (0, [])
        with pytest.raises(H2OStreamError, match="there is no layer 2"):
            retention(engine, turns, 2)

    def test_what_was_recalled_is_marked(self, engine: Any) -> None:
        recalled = (range(5, 8), range(40, 58))
        pieces = [piece for turn in retention(engine, [TurnSpan(1, 0, 60)], None, recalled) for piece in turn.pieces]
        assert [piece.recalled for piece in pieces] == [
            any(piece.index in tokens for tokens in recalled) for piece in pieces
        ]
        assert {piece.recalled for piece in pieces} == {True, False}
        assert not any(piece.recalled for turn in retention(engine, [TurnSpan(1, 0, 60)]) for piece in turn.pieces)
