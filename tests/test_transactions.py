"""A disturbance at any point leaves a conversation and its session in the state before or after the operation."""

from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest

from h2o_stream import ConfigError, H2OStreamError
from h2o_stream.cache.state import State
from h2o_stream.engine.events import Finished, PrefillProgress, Token
from h2o_stream.errors import DataError
from h2o_stream.session.automatic import automatic_session
from h2o_stream.session.history import ConversationHistory
from h2o_stream.session.sessions import Session
from h2o_stream.session.transactions import ResumeError
from h2o_stream.session.transcript import Entry, Header
from h2o_stream.session.turn import Turn
from tests.disturbances import full_disk, interrupted
from tests.histories import Histories
from tests.small_talk import WORDS

TOO_LONG = " ".join(WORDS * 40)


pytestmark = pytest.mark.usefixtures("own_home")


def whole(history: ConversationHistory) -> tuple[object, ...]:
    conversation = history.conversation
    arrays = conversation.state_dict() if history.entries else {}
    state = {name: (array.dtype, array.shape, array.tobytes()) for name, array in arrays.items()}
    return [*history.entries], conversation.metadata.system, conversation.pins, conversation.turn_spans, state


class TestInterrupted:
    @pytest.mark.every(2)
    @pytest.mark.parametrize("saved", [False, True])
    def test_a_turn_at_any_line(self, make_small: Histories, saved: bool) -> None:
        history, count = make_small(), 0
        if saved:
            history.open("talk")
        list(history.say("w3 w4"))
        before = whole(history)
        for line in range(1, 1200, 43):
            try:
                with interrupted(line):
                    list(history.say("w5 w6 w7"))
            except KeyboardInterrupt:
                count += 1
            if len(history.entries) == 1:
                assert whole(history) == before
            else:
                history.undo()
        assert count > 20
        history.close()

    def test_an_undo_at_any_line(self, make_small: Histories) -> None:
        """Including the state of the random generator."""
        line, done = 0, False
        while not done:
            line += 37
            history = make_small()
            history.open(f"talk{line}")
            list(history.say("w3"))
            after = whole(history)[1:]
            list(history.say("w4"))
            before = whole(history)[1:]
            try:
                with interrupted(line, ("session",)):
                    history.undo()
                done = True
            except KeyboardInterrupt:
                done = False
            assert whole(history)[1:] == (after if len(history.entries) == 1 else before)
            history.close()
        assert line > 100

    @pytest.mark.every(2)
    @pytest.mark.parametrize("how", ["save", "fork"])
    def test_a_copy_at_any_line(self, make_small: Histories, own_home: Path, how: str) -> None:
        """The copy is complete, or there is none."""
        history, line, done = make_small(), 0, False
        list(history.say("w3 w4"))
        before = whole(history)
        while not done:
            line += 17
            try:
                with interrupted(line, ("session",)):
                    getattr(history, how)(f"copy{line}")
                done = True
            except KeyboardInterrupt:
                done = history.session is not None
            if (own_home / f"copy{line}" / "transcript.jsonl").exists():
                assert how == "save" or done
                session = history.session
                with nullcontext(session) if session is not None else Session(f"copy{line}", create=False) as session:
                    assert [entry.prompt for entry in session.transcript.entries] == ["w3 w4"]
            assert whole(history)[1:] == before[1:]
        assert line > 100
        history.close()

    def test_a_session_that_is_left_at_any_line_is_released(self, make_small: Histories) -> None:
        line, done = 0, False
        while not done:
            line += 5
            history = make_small()
            history.keep(automatic_session)
            list(history.say("w3"))
            left = history.session  # which is not only closed because nobody refers to it
            assert left
            with suppress(KeyboardInterrupt), interrupted(line, ("session",)):
                history.fork(f"to{line}")
                done = True
            history.close()
            Session(left.name, create=False).close()
        assert line > 100

    def test_a_pin_pins_nothing_of_the_next_turn(self, make_small: Histories) -> None:
        history = make_small()
        list(history.say("w3"))
        engine = history.conversation.engine
        pins = engine.cache.pins
        events = history.pin("w4 w5 w6 w7 w8 w9")
        next(events)
        engine.should_stop = lambda: True
        assert isinstance(next(events), Finished)
        assert (engine.cache.pins, history.conversation.pins) == (pins, [])
        assert history.entries[-1].kind == "told"

    def test_a_window_that_grew_for_nothing_is_taken_back(
        self, make_small: Histories, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Regression: after a Ctrl-C before the first of the tokens that were to be pinned."""
        history = make_small()
        list(history.say("w3"))
        before, engine = whole(history), history.conversation.engine
        window = engine.cache.plan.window

        def interrupt(*_: object) -> None:
            assert engine.cache.plan.window > window
            raise KeyboardInterrupt

        monkeypatch.setattr(engine, "prefill", interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(history.pin(" ".join(WORDS[:6] * 3)))
        assert whole(history) == before
        assert engine.cache.plan.window == window

    def test_an_opening_leaves_no_passage(self, make_small: Histories) -> None:
        history = make_small()
        conversation = history.conversation
        next(history.say("w3 w4")).counts  # noqa: B018 -- four tokens of the system prompt
        history.close()
        assert (conversation.turn_spans, len(conversation.engine.tokens), history.entries) == ([], 0, [])
        list(history.say("w5"))
        assert [passage.start for passage in conversation.turn_spans] == [0]

    @pytest.mark.parametrize("num_events", [1, 2, 3, 5])
    def test_what_was_yielded_is_a_turn(self, make_small: Histories, num_events: int) -> None:
        history = make_small()
        list(history.say("w3"))
        seen, text = len(history.conversation.engine.tokens), ""
        events = history.say("w4 w5")
        for _ in range(num_events):
            event = next(events)
            if isinstance(event, Token):
                text += event.text
        events.close()
        entry = history.entries[-1]
        assert (entry.prompt, entry.text, entry.finish) == ("w4 w5", text, "interrupted")
        assert history.conversation.turn_spans[-1].start == seen
        assert history.conversation.turn_spans[-1].stop == len(history.conversation.engine.tokens)

    def test_an_interrupted_forward_without_a_history_is_torn_until_reset(self, make_small: Histories) -> None:
        conversation = make_small().conversation

        def fail(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        forward = conversation.engine.model.forward
        conversation.engine.model.forward = fail
        with pytest.raises(KeyboardInterrupt):
            list(conversation.say("w3"))
        conversation.engine.model.forward = forward
        assert conversation.torn
        for call in (lambda: list(conversation.say("w3")), conversation.state_dict):
            with pytest.raises(H2OStreamError, match="cut off halfway"):
                call()
        conversation.reset()
        assert isinstance(list(conversation.say("w3"))[-1], Turn)

    def test_out_of_memory_takes_the_turn_back(self, make_small: Histories, monkeypatch: pytest.MonkeyPatch) -> None:
        history = make_small()
        list(history.say("w3"))
        before = whole(history)

        def fail(*_: object, **__: object) -> None:
            raise MemoryError

        events = history.say("w4 w5 w6 w7 w8")
        next(events)
        with monkeypatch.context() as patch:
            patch.setattr("torch.nn.functional.embedding", fail)
            turn = next(events)
        assert turn.finish == "oom"
        assert turn.detail.endswith("The conversation is as it was before this turn.")
        assert whole(history) == before


class TestSessions:
    def two(self, make_small: Histories) -> ConversationHistory:
        """A conversation, and a second session with another policy."""
        history = make_small("sink")
        history.open("other")
        for _ in range(3):
            list(history.say("w8 w9"))
        history.close()
        history = make_small()
        history.open("talk")
        list(history.say("w3"))
        return history

    def free(self, name: str) -> list[Entry]:
        with Session(name, create=False) as session:
            return session.transcript.entries

    def test_loading_what_is_not_there(self, make_small: Histories, own_home: Path) -> None:
        history = self.two(make_small)
        before = whole(history)
        with pytest.raises(DataError, match="there is no session typo"):
            history.open("typo", create=False)
        assert whole(history) == before
        assert not (own_home / "typo").exists()
        history.close()

    def test_a_replay_that_does_not_fit(self, make_small: Histories) -> None:
        with Session("big") as session:
            session.add(Entry(1, "w3", "w4"), None, Header("small", "h2o", 99, TOO_LONG))
        history = self.two(make_small)
        before = whole(history)
        with pytest.raises(ResumeError):
            history.open("big")
        with pytest.raises(ConfigError, match="pinned tokens"):
            list(history.replay("big"))
        assert whole(history) == before
        list(history.say("w5"))
        assert [entry.prompt for entry in self.free("big")] == ["w3"]
        history.close()

    @pytest.mark.every(2)
    @pytest.mark.parametrize("num_events", [1, 4, 7])
    def test_a_replay_that_is_interrupted(self, make_small: Histories, num_events: int) -> None:
        history = self.two(make_small)
        before, there = whole(history), self.free("other")
        events = history.replay("other")
        for _ in range(num_events):
            next(events)
        history.conversation.engine.should_stop = lambda: True
        assert isinstance(list(events)[-1], Finished)
        assert whole(history) == before
        assert self.free("other") == there
        history.conversation.engine.should_stop = lambda: False
        events = history.replay("other")
        next(events)
        events.close()
        assert whole(history) == before
        assert isinstance(list(history.replay("other"))[-1], PrefillProgress)
        assert [entry.prompt for entry in history.entries] == ["w8 w9"] * 3
        history.close()

    def test_any_exception_releases_the_lock(self, make_small: Histories, monkeypatch: pytest.MonkeyPatch) -> None:
        history = self.two(make_small)
        before = whole(history)

        def fail(*_: object) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(Session, "state", fail)
            with pytest.raises(ZeroDivisionError):
                history.open("other")
        assert whole(history) == before
        assert len(self.free("other")) == 3
        history.close()
        history.close()
        assert len(self.free("talk")) == 1

    def test_random_state_of_another_kind(self, make_small: Histories) -> None:
        from h2o_stream.cache.state import checksummed

        history = make_small()
        list(history.say("w3"))
        before, state = whole(history), history.conversation.state_dict()
        kept = {name: state[name] for name in ("engine.tokens", "engine.opening")}
        foreign = state | checksummed(kept | {"engine.draws": np.zeros(16, np.uint8)}, "engine.checksums")
        with pytest.raises(H2OStreamError, match="is not the state of a random generator"):
            history.conversation.load_state_dict(foreign)
        assert whole(history) == before


class TestFullDisk:
    @pytest.mark.every(2)
    @pytest.mark.parametrize("first", range(1, 8))
    def test_at_any_write(self, make_small: Histories, own_home: Path, first: int) -> None:
        history = make_small()
        history.open("talk")
        list(history.say("w3"))
        saved = (own_home / "talk" / "transcript.jsonl").read_bytes()
        states = {path: path.read_bytes() for path in own_home.rglob("state-*")}
        with full_disk(first):
            turn = list(history.say("w4"))[-1]
        assert first > 4 or "No space left on device" in turn.detail
        assert (own_home / "talk" / "transcript.jsonl").read_bytes().startswith(saved)
        assert all(path.read_bytes() == data for path, data in states.items())
        assert not list(own_home.rglob("*.part"))
        list(history.say("w5"))
        history.close()
        with Session("talk") as session:
            assert [entry.prompt for entry in session.transcript.entries] == ["w3", "w4", "w5"]

    @pytest.mark.parametrize("first", range(1, 7))
    def test_a_copy_on_a_full_disk_leaves_nothing(self, make_small: Histories, own_home: Path, first: int) -> None:
        history = make_small()
        list(history.say("w3"))
        before = whole(history)
        with full_disk(first), pytest.raises(DataError, match="No space left"):
            history.fork("copy")
        assert whole(history) == before
        assert history.session is None
        assert not (own_home / "copy").exists()

    def test_the_oldest_state_stays_until_the_newest_is_there(self, own_home: Path) -> None:
        def state(turn: int) -> State:
            return {"number": np.array(turn)}

        with Session("talk") as session:
            for turn in range(1, 9):
                session.add(Entry(turn, "w3", "w4"), state(turn), Header("small", "h2o", 32, None))
            before = sorted(own_home.rglob("state-*"))
            with full_disk(), pytest.raises(DataError, match="not saved yet"):
                session.add(Entry(9, "w5", "w6"), state(9))
            assert sorted(own_home.rglob("state-*")) >= before[1:]
            session.add(Entry(10, "w7", "w8"), state(10))
        with Session("talk") as session:
            assert [entry.turn for entry in session.transcript.entries] == list(range(1, 11))
            assert (session.state(9), session.state(10)) == (None, state(10))
