"""Conversations under any sequence of operations, disturbed anywhere, compared with a list of expected turns.

``H2O_EXAMPLES=20000 make test-all ARGS=tests/test_conversation_machine.py`` tries more examples, and others each time.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from h2o_stream import ConfigError, Conversation, H2OStreamError
from h2o_stream.cache.audit import audit
from h2o_stream.cache.identity import model_digest
from h2o_stream.errors import DataError
from h2o_stream.session.automatic import automatic_session
from h2o_stream.session.history import ConversationHistory
from h2o_stream.session.sessions import Session
from h2o_stream.session.transactions import ResumeError
from h2o_stream.session.transcript import Header
from tests.conversation_model import MODEL, TOKENIZER, ExpectedConversation, ExpectedTurn, digest_of, start_turn
from tests.disturbances import full_disk, interrupted
from tests.small_talk import WORDS, small_engine
from tests.test_recall import indexed, said

DIGEST = model_digest(MODEL)
SYSTEMS = ("w1 w2", "w3", "w4 w5 w6 w7 w8")
TOO_LONG = " ".join(WORDS * 40)

texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map(" ".join)
names = st.sampled_from(["one", "two", "ü" * 4])
kinds = st.sampled_from(["say", "say", "pin", "feed"])
disturbances = st.one_of(
    st.none(),
    st.none(),
    st.tuples(st.just("line"), st.integers(1, 300), st.just(("session", "recall"))),
    st.tuples(st.just("line"), st.integers(1, 3000), st.just(("session", "engine", "cache"))),
    st.tuples(st.just("disk"), st.integers(1, 6), st.integers(0, 6)),
)


class ConversationMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.folder = Path(tempfile.mkdtemp())
        self.stack.callback(shutil.rmtree, self.folder)
        self.stack.enter_context(patch.dict(os.environ, {"XDG_DATA_HOME": str(self.folder)}))
        for place in ("attach", "verification", "retrieval_heads"):  # a digest takes milliseconds
            self.stack.enter_context(patch(f"h2o_stream.attachment.{place}.model_digest", lambda model: DIGEST))
        self.stack.enter_context(patch("h2o_stream.recall.recall.decide", lambda *arguments: []))
        self.stack.enter_context(torch.no_grad())
        self.engine = self.stack.enter_context(small_engine(MODEL, TOKENIZER))
        conversation = Conversation(self.engine, SYSTEMS[0], recall="auto")
        self.history = ConversationHistory(conversation, Header("small", "h2o", 32, None))
        self.expected = ExpectedConversation(SYSTEMS[0])
        self.name: str | None = None
        self.saved: dict[str, ExpectedConversation] = {}
        self.unsaved: set[str] = set()

    def teardown(self) -> None:
        self.history.close()
        self.engine.close()
        self.check_that_a_fresh_one_comes_to_the_same()
        self.check_the_disk()
        self.stack.close()

    # observations

    @property
    def digest(self) -> str:
        return digest_of(self.history.conversation.state_dict()) if self.engine.tokens else ""

    def seen(self, talk: ExpectedConversation) -> bool:
        """Whether the conversation is as expected."""
        conversation = self.history.conversation
        entries = [(entry.kind, entry.prompt, entry.text, entry.finish) for entry in self.history.entries]
        return (
            not conversation.torn
            and (entries, conversation.pins, conversation.system) == (talk.entries, talk.pins, talk.system)
            and self.digest == talk.digest
        )

    def disturbed(self, disturbance: Any, do: Callable[[], Any]) -> BaseException | None:
        """Run an action with a disturbance and return its exception, if any."""
        with ExitStack() as stack:
            if disturbance is not None:
                how, *numbers = disturbance
                stack.enter_context(
                    interrupted(*numbers) if how == "line" else full_disk(numbers[0], sum(numbers))  # type: ignore[arg-type]
                )
            try:
                do()
            except (KeyboardInterrupt, H2OStreamError) as error:
                return error.with_traceback(None)
        return None

    def before_or(self, after: ExpectedConversation, error: BaseException | None, name: str | None) -> None:
        """Expect the conversation as before or as `after`; without an error, only `after`."""
        if (error is None or self.seen(after)) and self.there(name):
            assert self.seen(after)
            self.expected, self.name = after, name
        else:
            assert error is not None
            assert self.there(self.name)
            assert self.seen(self.expected)
        if self.name is not None:
            self.saved[self.name] = self.expected

    def there(self, name: str | None) -> bool:
        session = self.history.session
        return (None if session is None else session.name) == name

    @property
    def automatic(self) -> bool:
        """Whether the conversation is in an automatic session."""
        return self.history.session is not None and self.history.session.automatic

    def find_automatic(self) -> None:
        """Learn the name of a session that a turn has started."""
        if self.name is None and self.history.session is not None and self.automatic:
            self.name = self.history.session.name

    def on_disk(self, name: str) -> bool:
        path = self.folder / "h2o-stream" / "sessions" / name / "transcript.jsonl"
        return path.exists() and path.stat().st_size > 0  # a session without a line does not count

    # operations

    @rule(kind=kinds, text=texts, events=st.none() | st.integers(1, 6), disturbance=disturbances)
    def turn(self, kind: str, text: str, events: int | None, disturbance: Any) -> None:
        before, draws, messages = self.expected, self.engine.sampler.rng_state, list[str]()

        def do() -> None:
            iterator = start_turn(self.history, kind, text)
            for event in islice(iterator, events):
                messages.append(getattr(event, "detail", ""))
            if events is not None:
                iterator.close()  # type: ignore[attr-defined]

        error = self.disturbed(disturbance, do)
        if len(self.history.entries) == len(before.turns):
            assert self.seen(before), error
            assert error is not None or (self.engine.tokens or not before.turns)
            return
        self.find_automatic()
        assert self.there(self.name)
        entry = self.history.entries[-1]
        assert entry.prompt == text
        assert error is None or isinstance(error, KeyboardInterrupt | DataError), error
        after = (entry.kind, entry.prompt, entry.text, entry.finish)
        stopped = events if entry.finish == "interrupted" else None
        said = ExpectedTurn(kind, text, stopped, draws, after, tuple(self.engine.tokens), self.digest)
        self.expected = replace(before, turns=(*before.turns, said))
        assert self.seen(self.expected)
        if self.name is not None:
            self.saved[self.name] = self.expected
            silent = disturbance is not None and self.automatic  # it is said once
            if silent or any("not" in detail for detail in messages) or isinstance(error, DataError):
                self.unsaved.add(self.name)
            elif error is None and disturbance is None:
                self.unsaved.discard(self.name)

    @rule(count=st.integers(1, 3), disturbance=disturbances)
    def undo(self, count: int, disturbance: Any) -> None:
        error = self.disturbed(disturbance, lambda: self.history.undo(count))
        turns = self.expected.turns
        after = replace(self.expected, turns=turns[:-count]) if count <= len(turns) else self.expected
        assert count <= len(turns) or error is not None
        self.before_or(after, error, self.name)

    @rule(system=st.none() | st.sampled_from(SYSTEMS) | st.just(TOO_LONG), disturbance=disturbances)
    def reset(self, system: str | None, disturbance: Any) -> None:
        name = None if self.automatic else self.name
        error = self.disturbed(disturbance, lambda: self.history.reset(system))
        assert system != TOO_LONG or isinstance(error, ConfigError | KeyboardInterrupt)
        self.before_or(ExpectedConversation(self.expected.system if system is None else system), error, name)

    @rule(name=names, disturbance=disturbances)
    def save(self, name: str, disturbance: Any) -> None:
        known = self.on_disk(name)
        error = self.disturbed(disturbance, lambda: self.history.save(name))
        assert not known or error is not None
        self.before_or(self.expected, error, self.name)
        if not known and self.on_disk(name):
            self.saved[name] = self.expected
        assert error is not None or self.on_disk(name)

    @rule(name=names, disturbance=disturbances)
    def fork(self, name: str, disturbance: Any) -> None:
        known = self.on_disk(name)
        error = self.disturbed(disturbance, lambda: self.history.fork(name))
        assert not known or error is not None
        self.before_or(self.expected, error, self.name if known else name)
        assert known or self.there(name) or not self.on_disk(name), "an abandoned copy leaves nothing"

    @rule(name=names, create=st.booleans(), replay=st.booleans(), disturbance=disturbances)
    def load(self, name: str, create: bool, replay: bool, disturbance: Any) -> None:
        known = self.on_disk(name)
        error = self.disturbed(disturbance, lambda: self.history.open(name, create))
        if name == self.name or not (known or create):
            assert error is not None
            return self.before_or(self.expected, error, self.name)
        if isinstance(error, ResumeError):
            assert name in self.unsaved or disturbance is not None, error
            self.before_or(self.expected, error, self.name)
            return self.replay_session(name, None) if replay else None
        after = self.saved[name] if known else ExpectedConversation(self.expected.system)
        if name in self.unsaved and self.there(name):
            after = replace(after, turns=after.turns[: len(self.history.entries)])
            self.unsaved.discard(name)
        self.before_or(after, error, name)
        return None

    @rule(name=names, disturbance=disturbances, events=st.none() | st.integers(1, 20))
    def replay(self, name: str, disturbance: Any, events: int | None) -> None:
        if self.on_disk(name) and name != self.name:
            self.replay_session(name, disturbance, events)

    def replay_session(self, name: str, disturbance: Any, events: int | None = None) -> None:
        draws, digests = self.engine.sampler.rng_state, list[tuple[str, tuple[int, ...]]]()

        def do() -> None:
            iterator = self.history.replay(name)
            for _ in islice(iterator, events):
                pass
            iterator.close()

        error = self.disturbed(disturbance, do)
        if not self.there(name):
            assert error is not None or events is not None
            return self.before_or(self.expected, error or KeyboardInterrupt(), self.name)
        there = self.saved[name]
        entries, turns = self.history.entries, list[ExpectedTurn]()
        assert [entry.prompt for entry in entries] == [turn.text for turn in there.turns][: len(entries)]
        assert len(entries) == len(there.turns) or name in self.unsaved
        self.unsaved.discard(name)
        with suppress(H2OStreamError):  # old states are deleted
            for entry in reversed(entries):
                state = self.history._transactions.checkpoint.state(entry.turn)
                if state is None:
                    break
                digests.append((digest_of(state), tuple(state["engine.tokens"].tolist())))
        digests += [("", ())] * (len(entries) - len(digests))
        for entry, (digest, tokens) in zip(entries, reversed(digests), strict=True):
            kind = "pin" if entry.kind == "pinned" else f"feed {entry.text}"
            seen = (entry.kind, entry.prompt, entry.text, entry.finish)
            turns.append(ExpectedTurn(kind, entry.prompt, None, draws, seen, tokens, digest))
        self.expected, self.name = ExpectedConversation(there.system, tuple(turns)), name
        assert self.seen(self.expected)
        self.saved[name] = self.expected
        return None

    @rule()
    def leave_the_session(self) -> None:
        self.history.close()
        self.name = None

    # invariants

    @invariant()
    def it_is_as_the_model_says(self) -> None:
        assert self.there(self.name)
        conversation = self.history.conversation
        assert not conversation.torn
        assert conversation.system == self.expected.system
        assert conversation.pins == self.expected.pins
        assert [entry.prompt for entry in self.history.entries] == [turn.text for turn in self.expected.turns]
        tokens, place = self.engine.tokens, 0
        assert tuple(tokens) == (self.expected.turns[-1].tokens if self.expected.turns else ())
        assert self.engine.cache.seen_tokens == len(tokens)
        for passage in conversation.turn_spans:
            assert passage.start == place < passage.stop
            place = passage.stop
        assert place == len(tokens)
        if tokens:
            audit(self.engine.cache.evicting_groups)  # type: ignore[arg-type]

    @invariant()
    def the_index_has_what_the_transcript_has(self) -> None:
        assert indexed(self.history) == said(self.history)

    @invariant()
    def nothing_half_written_lies_about(self) -> None:
        assert not list(self.folder.rglob("*.part"))

    def check_that_a_fresh_one_comes_to_the_same(self) -> None:
        with small_engine(MODEL, TOKENIZER) as engine:
            conversation = Conversation(engine, self.expected.system)
            for turn in self.expected.turns:
                engine.sampler.rng_state = turn.draws
                events = start_turn(conversation, turn.kind, turn.text)
                for _ in islice(events, turn.events):
                    pass
                del events
                if turn.tokens:
                    assert tuple(engine.tokens) == turn.tokens
            if self.expected.turns:
                assert torch.equal(engine.cache.kept(1), self.held), "kept tokens differ"

    def check_the_disk(self) -> None:
        for name, talk in self.saved.items():
            if not self.on_disk(name):
                assert not talk.turns or name in self.unsaved
                continue
            with Session(name, create=False) as session:
                prompts = [entry.prompt for entry in session.transcript.entries]
                wanted = [turn.text for turn in talk.turns]
                assert prompts == wanted or (name in self.unsaved and prompts == wanted[: len(prompts)])

    @invariant()
    def remember_what_is_held(self) -> None:
        self.held = self.engine.cache.kept(1)


class AutomaticMachine(ConversationMachine):
    """The same where every turn without a session starts an automatic one."""

    def __init__(self) -> None:
        super().__init__()
        self.history.keep(automatic_session)


class TestConversations(ConversationMachine.TestCase):  # type: ignore[name-defined]
    settings = settings(
        max_examples=10, stateful_step_count=9, deadline=None, derandomize="H2O_EXAMPLES" not in os.environ,
        database=None, print_blob=True, suppress_health_check=list(HealthCheck),
    )  # fmt: skip


@pytest.mark.exhaustive
class TestManyConversations(ConversationMachine.TestCase):  # type: ignore[name-defined]
    settings = settings(TestConversations.settings, max_examples=int(os.environ.get("H2O_EXAMPLES", "200")))


@pytest.mark.exhaustive
class TestAutomaticSessions(AutomaticMachine.TestCase):  # type: ignore[name-defined]
    settings = settings(TestConversations.settings, max_examples=int(os.environ.get("H2O_EXAMPLES", "200")))
