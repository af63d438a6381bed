"""Another window, policy or model in the middle of a chat: all or nothing."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from h2o_stream import CacheConfig, Conversation, Engine, H2OStreamError, SamplingConfig
from h2o_stream.engine.events import Finished
from h2o_stream.session.history import ConversationHistory
from h2o_stream.session.transcript import Header
from tests.commands import piped, records, texts
from tests.fixtures import with_exhaustive
from tests.histories import TALK, said

pytestmark = pytest.mark.usefixtures("own_home")


@pytest.fixture
def open_conversation(talker: Any, tokenizer: PreTrainedTokenizerBase) -> Iterator[Any]:
    """Opens conversations, each on a model of its own with the same weights."""
    sampling = SamplingConfig(temperature=0.0, max_tokens=10)
    with ExitStack() as engines:

        def conversation(window: int, **more: Any) -> Conversation:
            engine = Engine(talker(), tokenizer, CacheConfig(window=window), sampling, **more)
            return Conversation(engines.enter_context(engine), "Be brief.")

        yield conversation


def in_window(window: int) -> Header:
    return Header("tiny", "h2o", window, None)


@pytest.mark.every(2)
@pytest.mark.parametrize("saved", [True, False])
def test_the_transcript_is_fed_to_the_other_conversation(open_conversation: Any, saved: bool) -> None:
    history = ConversationHistory(open_conversation(64), in_window(64))
    if saved:
        history.open("talk")
    list(history.pin("The code is 4711."))
    replies = said(history, *TALK[:3])

    expected = open_conversation(48)
    list(expected.pin("The code is 4711."))
    for text, reply in zip(TALK[:3], replies, strict=True):
        list(expected.feed_turn(text, reply))

    list(history.continue_in(open_conversation(48), in_window(48)))
    engine = history.conversation.engine
    assert engine.tokens == expected.engine.tokens
    assert engine.cache.kept(0).equal(expected.engine.cache.kept(0))
    assert [(entry.kind, entry.text) for entry in history.entries[1:]] == [("said", reply) for reply in replies]
    assert history.conversation.pins == ["The code is 4711."]
    assert history.header().window == 48
    if saved:
        header = history.session.transcript.header
        assert header.window == 48
    history.regenerate()
    assert [entry.prompt for entry in history.undo()] == TALK[1:2]
    again = said(history, *TALK[1:3])
    history.close()
    if saved:
        resumed = ConversationHistory(open_conversation(48), in_window(48))
        assert resumed.open("talk", create=False)
        assert [entry.text for entry in resumed.entries[-2:]] == again
        resumed.close()


def test_a_transcript_that_is_not_fed_completely_changes_nothing(open_conversation: Any) -> None:
    history = ConversationHistory(open_conversation(64), in_window(64))
    replies = said(history, *TALK[:2])
    before, old = list(history.entries), history.conversation
    stopped = open_conversation(48, should_stop=lambda: True)
    assert isinstance(list(history.continue_in(stopped, in_window(48)))[-1], Finished)
    events = history.continue_in(open_conversation(48), in_window(48))
    next(events)
    events.close()
    assert history.conversation is old
    assert history.entries == before
    undone = history.undo(2)
    assert said(history, *(entry.prompt for entry in undone)) == replies


def test_a_suspended_conversation_resumes(open_conversation: Callable[..., Conversation]) -> None:
    whole = said(ConversationHistory(open_conversation(64), in_window(64)), *TALK[:3])
    history = ConversationHistory(open_conversation(64), in_window(64))
    first = said(history, *TALK[:2])
    history.suspend()
    history.conversation.engine.close()
    history.conversation.engine.reopen()
    history.resume()
    assert first + said(history, *TALK[2:3]) == whole


def test_there_must_be_a_way_back(open_conversation: Callable[..., Conversation]) -> None:
    history = ConversationHistory(open_conversation(64), in_window(64))
    history.open("talk")
    said(history, TALK[0])
    for path in history.session.index_path.parent.glob("state-*"):
        path.unlink()
    with pytest.raises(H2OStreamError, match="no way back"):
        history.suspend()
    history.close()


class TestCommands:
    def test_window_and_policy(self, tiny_folder: Path, tmp_path: Path) -> None:
        out = tmp_path / "run.jsonl"
        lines = ["one", "two", "/window 60", "three", "/policy SINK", "/undo", "four", "/show config", "/stats"]
        done = piped(tiny_folder, lines, "--window", 64, "--jsonl", out)
        assert done.exit_code == 0
        assert "window 60 · gap; fed again: 2 turns," in done.stderr
        assert "sink · window 60 · rolling; fed again: 3 turns," in done.stderr
        assert "undone: three" in done.stderr
        run, *rest, summary = records(out.read_text())
        assert [record["type"] for record in rest] == ["turn", "turn", "change", "turn", "change", "turn"]
        changes = [record for record in rest if record["type"] == "change"]
        assert [(change["policy"], change["window"]) for change in changes] == [("h2o", 60), ("sink", 60)]
        assert rest[-1]["cached_tokens"] <= 61
        assert (run["window"], summary["turns"]) == (64, 4)

    def test_the_next_reply_is_that_of_the_transcript_in_the_new_window(
        self, tiny_folder: Path, tmp_path: Path
    ) -> None:
        changed, retold = tmp_path / "changed.jsonl", tmp_path / "retold.jsonl"
        piped(tiny_folder, ["one " * 30, "two " * 20, "/window 48", "three"], "--window", 96, "--jsonl", changed)
        piped(tiny_folder, ["one " * 30, "two " * 20], "--window", 96, "--session", "talk")
        piped(tiny_folder, ["three"], "--window", 48, "--session", "talk", "--retell", "--jsonl", retold)
        assert texts(changed.read_text())[-1:] == texts(retold.read_text())

    @pytest.mark.parametrize("session", with_exhaustive([()], [(("--session", "talk"),)]))
    def test_what_fails_changes_nothing(self, tiny_folder: Path, tmp_path: Path, session: tuple[str, ...]) -> None:
        failing = {
            "/window 5000": "passes the 400 positions", "/window 0": "--window must be at least 1",
            "/window wide": "/window takes a number, not 'wide'",
            "/policy lru": "--policy takes one of", "/model ./nowhere": "./nowhere does not exist",
        }  # fmt: skip
        told = {}
        for number, lines in enumerate((["one", *failing, "/undo", "two", "three"], ["one", "/undo", "two", "three"])):
            out = tmp_path / f"{number}.jsonl"
            names = (session[0], f"{session[1]}{number}") if session else ()
            done = piped(tiny_folder, lines, "--window", 64, "-s", "Be brief. " * 6, "--jsonl", out, *names)
            assert done.exit_code == 0
            assert [words in done.stderr for words in failing.values()] == [number == 0] * len(failing)
            told[number] = texts(out.read_text())
        assert told[0] == told[1]

    def test_another_model_continues(self, tiny_folder: Path, small: Path, tmp_path: Path) -> None:
        out, file = tmp_path / "run.jsonl", tmp_path / "talk.json"
        lines = ["one", f"/model {tiny_folder}/", "two", f"/export {file}"]
        done = piped(tiny_folder, lines, "--jsonl", out, "--session", "talk")
        assert f"{tiny_folder}/ · h2o · window 256 (auto) · gap; fed again: 1 turn," in done.stderr
        change = next(record for record in records(out.read_text()) if record["type"] == "change")
        assert (change["model"], change["turn"]) == (f"{tiny_folder}/", 1)
        exported = json.loads(file.read_text())
        assert [message["content"] for message in exported["messages"] if message["role"] == "user"] == ["one", "two"]
        assert "resumed after turn 2" in piped(f"{tiny_folder}/", ["/stats"], "--session", "talk").stderr  # type: ignore[arg-type]
