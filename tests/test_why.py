"""What became of a word, against what the cache and its saved states say directly; and which heads hold each token."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from h2o_stream import CacheConfig, Conversation, Engine, H2OStreamError, SamplingConfig, attach
from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.cache.holders import Holders, holders, retrieval_holders
from h2o_stream.cache.windows import HeadWindow
from h2o_stream.cache.worths import Worths
from h2o_stream.session.conversation_state import TurnSpan
from h2o_stream.session.history import ConversationHistory
from h2o_stream.session.retention import retention
from h2o_stream.session.transcript import Header
from h2o_stream.session.why import Gone, Kept, explain
from h2o_stream.ui.heatmap import explanation
from tests.families import FAMILIES
from tests.fixtures import ids, make_llama
from tests.small_talk import small_model, small_tokenizer
from tests.states import equal_states

TURNS = ["w3 w4 w5 w6 w7 w8", "w9 w10 w11 w12", "w13 w14 w15 w16", "w17 w18 w19 w20", "w21 w22 w23"]


def talk(policy: str, window: int = 24) -> Iterator[ConversationHistory]:
    cache = CacheConfig(policy, window, chunk=4)
    sampling = SamplingConfig(temperature=1.0, seed=4, max_tokens=4)
    with Engine(small_model(), small_tokenizer(), cache, sampling) as engine:
        history = ConversationHistory(Conversation(engine, "w1 w2"), Header("small", policy, window, None))
        for text in TURNS:
            list(history.say(text))
        yield history
        history.close()


@pytest.fixture(scope="module", params=["h2o", "tova", "sink"])
def history(request: pytest.FixtureRequest) -> Iterator[ConversationHistory]:
    yield from talk(request.param)


def heads_with(cache: H2OCache, tokens: range) -> set[int]:
    """The heads, by number, that hold any of these tokens."""
    heads = [row for group in cache.evicting_groups for row in group.index[0].tolist()]
    return {number for number, row in enumerate(heads) if any(token in tokens for token in row)}


@pytest.mark.every(2)
def test_every_word_is_kept_or_gone_as_the_cache_and_its_states_say(history: ConversationHistory) -> None:
    cache = history.conversation.engine.cache
    states = {entry.turn: history._transactions.checkpoint.state(entry.turn) for entry in history.entries}
    caches = {turn: cache.restored(state) for turn, state in states.items() if state is not None}
    fates = set()
    for turn, text in enumerate(TURNS, 1):
        for word in text.split():
            found = explain(history, word)[-1]
            assert found.turn <= turn
            index = next(
                i
                for i in range(len(history.conversation.engine.tokens))
                if history.conversation.engine.tokenizer.decode(history.conversation.engine.tokens[i]).strip() == word
            )
            tokens, fate = range(index, index + 1), found.fate
            fates.add(type(fate))
            if isinstance(fate, Kept):
                assert set(fate.now.heads) == heads_with(cache, tokens)
                assert fate.now.worth >= fate.now.least or fate.now.roles.keys() - {"heavy"}
                continue
            assert not heads_with(cache, tokens)
            assert not heads_with(caches[fate.turn], tokens)
            if fate.before is None:
                assert fate.turn == found.turn
            else:
                assert set(fate.before.heads) == heads_with(caches[fate.turn - 1], tokens) != set()
    assert fates == {Kept, Gone}


def test_looking_back_changes_nothing(history: ConversationHistory) -> None:
    before = history.conversation.state_dict()
    explain(history, "w3")
    after = history.conversation.state_dict()
    assert equal_states(before, after)


def test_the_first_token_is_a_sink_and_the_newest_is_recent() -> None:
    for history in talk("h2o", 32):
        cache = history.conversation.engine.cache
        newest = len(history.conversation.engine.tokens) - 1
        worths = Worths.of(cache)
        sink, recent = worths.holding(range(1)), worths.holding(range(newest, newest + 1))
        assert (set(sink.roles), set(recent.roles)) == ({"sink"}, {"recent"})


def test_states_that_are_not_kept_give_a_bound() -> None:
    for history in talk("sink"):
        history._transactions.checkpoint.states.pop(3)  # type: ignore[attr-defined]
        fate = explain(history, "w4")[-1].fate
        assert isinstance(fate, Gone)
        assert (fate.turn, fate.before) == (None, None)
        assert f"gone after turn {fate.since} or before" in explanation(explain(history, "w4")[-1]).plain


@pytest.mark.parametrize(
    ("word", "layer", "message"), [("w99", None, "was not said"), ("w3", 99, "there is no layer 99")]
)
def test_what_cannot_be_explained(word: str, layer: int | None, message: str) -> None:
    for history in talk("h2o"):
        with pytest.raises(H2OStreamError, match=message):
            explain(history, word, layer)


def test_a_cache_that_keeps_everything_has_no_reasons() -> None:
    for history in talk("full"):
        with pytest.raises(H2OStreamError, match="keeps every word"):
            explain(history, "w3")


def test_a_recurrent_layer_holds_no_words() -> None:
    from h2o_stream import attach
    from tests.test_recurrent import HYBRIDS, make, tokens

    model = make(next(iter(HYBRIDS)))
    with attach(model, CacheConfig("h2o", 24)) as cache, torch.no_grad():
        model(tokens(8), past_key_values=cache)
        layer = next(n for n, spec in enumerate(cache.specs) if not spec.attends)
        assert Worths.of(cache, layer).num_heads == 0
        assert Worths.of(cache).holding(range(1)) is not None


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
