"""What a person sees of the memory behind the window: /memory, /why and lines with -v."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from h2o_stream import CacheConfig, Conversation, Engine, H2OStreamError, SamplingConfig
from h2o_stream.native import library
from h2o_stream.session.history import ConversationHistory
from h2o_stream.session.memory import memory_of, remembered, report_memory
from h2o_stream.session.transcript import Header
from h2o_stream.session.why import Explanation, Gone, explain
from h2o_stream.ui.heatmap import explanation
from h2o_stream.ui.memory import memory_lines
from tests.commands import piped
from tests.small_talk import small_model, small_tokenizer

pytestmark = pytest.mark.skipif(library.loaded() is None, reason="there is no compiled library")

TURNS = ["w3 w4 w5 w6 w7 w8", "w9 w10 w11 w12", "w13 w14 w15 w16", "w17 w18 w19 w20", "w21 w22 w23"]


@pytest.fixture(scope="module")
def history() -> Iterator[ConversationHistory]:
    cache, sampling = CacheConfig("h2o", 24, chunk=4, memory="auto"), SamplingConfig(seed=4, max_tokens=4)
    with Engine(small_model(), small_tokenizer(), cache, sampling) as engine:
        history = ConversationHistory(Conversation(engine, "w1 w2"), Header("small", "h2o", 24, None))
        for text in TURNS:
            list(history.say(text))
        yield history
        history.close()


def test_every_token_is_in_the_cache_or_in_memory(history: ConversationHistory) -> None:
    cache, memory = history.conversation.engine.cache, memory_of(history.conversation.engine)
    assert memory is not None
    (row,), head = memory.rows, 0
    for group in cache.evicting_groups:
        assert group.memory is not None
        for slots in group.index[0].tolist():
            remembered = row.token_indices(head).tolist()
            held = [token for token in slots if token >= 0]
            assert sorted(remembered + held) == list(range(cache.seen_tokens))
            head += 1
    assert head == memory.num_heads


def test_what_is_shown_of_it(history: ConversationHistory) -> None:
    engine, spans = history.conversation.engine, history.conversation.turn_spans
    report = report_memory(engine, spans)
    assert 0 < report.tokens <= engine.cache.seen_tokens - 1
    assert 0 < sum(count for _, count in report.turns) <= report.queries
    first, second = memory_lines(report)
    assert f"{report.tokens:,} tokens of {report.heads} heads" in first
    assert "found again" in second
    assert f"turn {report.turns[0][0]} ({report.turns[0][1]})" in second


def test_why_says_that_a_word_is_remembered(history: ConversationHistory) -> None:
    shown, memory = [], memory_of(history.conversation.engine)
    assert memory is not None
    found_again = {token for row in memory.rows for token in row.looked_back()}
    for text in TURNS[:4]:
        for word in text.split():
            found = explain(history, word)[-1]
            assert found.memory is not None or not isinstance(found.fate, Gone)
            shown.append(explanation(found).plain)
    assert any("in the memory of" in line for line in shown)
    found = remembered(history.conversation.engine, range(min(found_again), max(found_again) + 1))
    assert found is not None
    assert found.found == sum(len(row.looked_back()) for row in memory.rows)
    assert "found again from turn 2 by" in explanation(Explanation(2, "w9", 4, Gone(3, 3), found)).plain


def test_without_a_memory() -> None:
    with (
        Engine(small_model(), small_tokenizer(), CacheConfig("h2o", 24)) as engine,
        pytest.raises(H2OStreamError, match="--memory auto"),
    ):
        report_memory(engine, [])


def test_commands(tiny_folder: Path) -> None:
    typed = ["one two three", "/memory", "/exit"]
    without = piped(tiny_folder, typed)
    assert "there is no memory behind the window; start with --memory auto" in without.stderr
    with_memory = piped(tiny_folder, typed, "--memory", "1GiB", "-v")
    assert with_memory.stderr.count("memory: ") == 2
    assert "at most 1.0 GiB" in with_memory.stderr
