"""/why WORD: what became of a word, against what the cache and its saved states say directly."""

from collections.abc import Iterator

import pytest
import torch

from h2o_stream import CacheConfig, Conversation, Engine, H2OStreamError, SamplingConfig
from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.cache.worths import Worths
from h2o_stream.session.history import ConversationHistory
from h2o_stream.session.transcript import Header
from h2o_stream.session.why import Gone, Kept, explain
from h2o_stream.ui.heatmap import explanation
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


def holders(cache: H2OCache, tokens: range) -> set[int]:
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
                assert set(fate.now.heads) == holders(cache, tokens)
                assert fate.now.worth >= fate.now.least or fate.now.roles.keys() - {"heavy"}
                continue
            assert not holders(cache, tokens)
            assert not holders(caches[fate.turn], tokens)
            if fate.before is None:
                assert fate.turn == found.turn
            else:
                assert set(fate.before.heads) == holders(caches[fate.turn - 1], tokens) != set()
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
