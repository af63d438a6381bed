"""A conversation that reads evicted passages again: what is fed, marked, indexed and saved."""

from pathlib import Path
from typing import Any

import pytest

from h2o_lab.recall.asking import prefilled, say
from h2o_stream import CacheConfig, Conversation, Engine, SamplingConfig
from h2o_stream.engine.events import Token
from h2o_stream.loading.transformers_model import LoadedModel
from h2o_stream.recall.passage import Candidate, Passage, Recalled
from h2o_stream.session.history import ConversationHistory
from tests.fixtures import with_exhaustive
from tests.histories import Histories

pytestmark = pytest.mark.usefixtures("own_home")


@pytest.fixture
def make(make_small: Histories) -> Histories:
    """With recall, if nothing else is said."""
    return lambda recall="auto": make_small(recall=recall)


@pytest.fixture
def recall_first_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decide to recall the first message, whatever is asked."""

    def decide(message: str, index: Any, *_: object) -> list[Candidate]:
        passage = next(passage for passage in index.search([message.split()[0]], 9) if passage.turn == 1)
        return [Candidate(passage, passage.text, 1.0, ("w3",), 0.0, 2, "recalled")]

    monkeypatch.setattr("h2o_stream.recall.recall.decide", decide)


def indexed(history: ConversationHistory) -> list[tuple[int, str, str]]:
    """Turn, role and text of all passages in the index."""
    recall = history.conversation.recall
    recall.synchronize()
    words = ["unk", *(f"w{number}" for number in range(24))]
    return sorted((passage.turn, passage.role, passage.text) for passage in recall._index.search(words, 999))


def said(history: ConversationHistory) -> list[tuple[int, str, str]]:
    """The same from the transcript."""
    texts = [(entry.turn, ("user", entry.prompt), ("assistant", entry.text)) for entry in history.entries]
    return sorted((turn, role, text.strip()) for turn, *both in texts for role, text in both if text.strip())


def fill(history: ConversationHistory, turns: int) -> None:
    for _ in range(turns):
        list(history.feed_turn("w5 w6 w7 w8", "w9 w10"))


class TestReading:
    @pytest.fixture
    def history(self, make: Histories, recall_first_turn: None) -> ConversationHistory:
        """Its first turn was evicted, and is recalled by the next message."""
        history = make()
        list(history.feed_turn("w3 w4", "w9"))
        fill(history, 8)
        return history

    def test_the_passage_stands_before_the_message(self, history: ConversationHistory) -> None:
        before = len(history.conversation.engine.tokens)
        first, *_, turn = history.say("w3 w11")
        assert [candidate.passage.text for candidate in first.candidates] == ["w3 w4"]
        assert turn.recalled == first.candidates
        (marked,) = history.conversation.recalled
        tokens, tokenizer = history.conversation.engine.tokens, history.conversation.engine.tokenizer
        assert before < marked.start
        assert "w3 w4" in tokenizer.decode(tokens[marked.start : marked.stop])
        assert tokenizer.decode(tokens[marked.stop : marked.stop + 2]) == "w3 w11"

    def test_it_is_marked_in_the_state_and_in_neither_transcript_nor_index(
        self, make: Histories, history: ConversationHistory
    ) -> None:
        list(history.say("w3 w11"))
        assert history.entries[-1].prompt == "w3 w11"
        assert indexed(history) == said(history)
        state, marked = history.conversation.state_dict(), history.conversation.recalled
        other = make()
        other.conversation.load_state_dict(state)
        assert other.conversation.recalled == marked != ()

    def test_it_goes_first(self, history: ConversationHistory) -> None:
        list(history.say("w3 w11"))
        (marked,) = history.conversation.recalled
        fill(history, 6)
        cache = history.conversation.engine.cache
        kept = {int(index) for layer in range(2) for index in cache.kept(layer).flatten()}
        assert not kept & set(marked)

    @pytest.mark.usefixtures("recall_first_turn")
    def test_it_stays_while_replies_are_measured(self, make: Histories) -> None:
        """Regression: margins were those of a turn that was over, when passages go first."""
        history = make()
        list(history.feed_turn("w3 w4", "w9"))
        fill(history, 8)
        conversation = history.conversation
        engine, cache = conversation.engine, conversation.engine.cache
        with prefilled(conversation, "w3 w11") as recalling:
            (marked,) = conversation.recalled
            state = engine.state_dict()
            list(engine.prefill([5, 6, 7]))
            kept = {int(index) for layer in range(2) for index in cache.kept(layer).flatten()}
            engine.load_state_dict(state)
        assert recalling
        assert set(marked) <= kept

    @pytest.mark.parametrize(("verdict", "recalling"), [("recalled", True), ("no room", False)])
    def test_what_has_no_room_is_not_counted_as_read(
        self, history: ConversationHistory, monkeypatch: pytest.MonkeyPatch, verdict: Any, recalling: bool
    ) -> None:
        """Regression: comparisons said of such questions that something was read again."""
        passage = Passage(1, "user", "w3 w4", 0, 2)
        found = [Candidate(passage, passage.text, 1.0, ("w3",), 0.0, 2, verdict)]
        monkeypatch.setattr("h2o_stream.recall.recall.decide", lambda *_: found)
        assert say(history.conversation, "w3 w11")[1] is recalling

    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_a_turn_that_is_abandoned(self, history: ConversationHistory, count: int) -> None:
        """After its first event nothing was fed; later its text and the mark stay."""
        before = len(history.conversation.engine.tokens)
        events = history.say("w3 w11")
        for _ in range(count):
            next(events)
        events.close()
        assert (len(history.conversation.engine.tokens) > before) is (count > 1)
        assert len(history.entries) == (9 if count == 1 else 10)
        assert bool(history.conversation.recalled) is (count > 1)
        assert indexed(history) == said(history)


class TestOff:
    def test_nothing_changes(self, make: Histories, monkeypatch: pytest.MonkeyPatch, recall_first_turn: None) -> None:
        streams = []
        for recall in ("off", "auto"):
            history = make(recall)
            list(history.say("w3 w4"))
            fill(history, 8)
            events = list(history.say("w3 w11"))
            streams.append([*history.conversation.engine.tokens])
            assert any(isinstance(event, Recalled) for event in events) is (recall == "auto")
        plain = make("off")
        monkeypatch.setattr("h2o_stream.recall.recall.PassageIndex", None)  # it must not be opened
        list(plain.say("w3 w4"))
        fill(plain, 8)
        list(plain.say("w3 w11"))
        assert [*plain.conversation.engine.tokens] == streams[0] != streams[1]

    def test_switched_on_later(self, make: Histories) -> None:
        history = make("off")
        fill(history, 2)
        history.conversation.recall.mode = "auto"
        fill(history, 1)
        assert indexed(history) == said(history)


class TestIndexFollows:
    """What the conversations at random do not have: damage, and no history."""

    def test_a_damaged_index_is_rebuilt(self, make: Histories, own_home: Path) -> None:
        history, lines = make(), list[str]()
        fill(history, 2)
        history.fork("a")
        list(history.say("w11 w12"))
        history.close()
        path = own_home / "a" / "passages.sqlite"
        assert path.exists()
        path.write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 40)
        again = make()
        again.conversation.recall.notify = lines.append
        again.open("a")
        assert indexed(again) == said(again) != []
        assert len(lines) == 1
        assert "rebuilt" in lines[0]

    def test_without_a_history(self, make: Histories) -> None:
        conversation = make().conversation
        conversation.recall.source = None
        list(conversation.say("w11 w12"))
        state = conversation.state_dict()
        list(conversation.say("w13 w14"))
        found = {passage.turn for passage in conversation.recall._index.search(["w11", "w13"], 9)}
        assert found == {1, 2}
        conversation.load_state_dict(state)
        conversation.recall.synchronize()
        assert {passage.turn for passage in conversation.recall._index.search(["w11", "w13"], 9)} == {1}


def test_heads_with_small_windows_do_not_limit_what_is_read(served_embedded: LoadedModel) -> None:
    with Engine(served_embedded.model, served_embedded.tokenizer, CacheConfig("h2o", 256), SamplingConfig()) as engine:
        assert min(engine.cache.windows.sizes) < 128, "windows differ"
        recall = Conversation(engine, recall="auto").recall
        assert (recall.budget, recall.list_budget) == (64, 116)


@pytest.mark.parametrize("repeats", with_exhaustive([10], [12]))
def test_a_fact_is_told_after_it_was_evicted(served_embedded: LoadedModel, repeats: int) -> None:
    """The embedded model tells what it can no longer see, and says so with the event."""
    filler = "The weather in the north stays cold and windy, and trains run late on many lines. " * repeats
    replies = {}
    for recall in ("off", "auto"):
        cache, sampling = CacheConfig(window=128), SamplingConfig(temperature=0.0, max_tokens=24)
        with Engine(served_embedded.model, served_embedded.tokenizer, cache, sampling) as engine:
            conversation = Conversation(engine, recall=recall)
            list(conversation.feed_turn("The password of the garden gate is 4821.", "Thank you, I will remember it."))
            for _ in range(2):
                list(conversation.feed_turn(filler, "I see."))
            *_, turn = conversation.say("What is the password of the garden gate?")
            replies[recall] = turn
    assert "4821" in replies["auto"].text
    assert [candidate.passage.turn for candidate in replies["auto"].recalled] == [1]
    assert "4821" not in replies["off"].text
    assert replies["off"].recalled == ()


@pytest.mark.exhaustive
def test_a_list_is_told_after_it_was_evicted(served_embedded: LoadedModel) -> None:
    codes = {"garage": "3201", "boathouse": "2033", "wine cellar": "5179", "attic": "2931", "workshop": "8364"}
    filler = "The weather in the north stays cold and windy, and trains run late on many lines. " * 10
    with Engine(
        served_embedded.model, served_embedded.tokenizer, CacheConfig(), SamplingConfig(temperature=0.0, max_tokens=80)
    ) as engine:
        conversation = Conversation(engine, recall="auto")
        for place, code in codes.items():
            list(conversation.feed_turn(f"The code of the {place} is {code}.", "Thank you."))
        for _ in range(3):
            list(conversation.feed_turn(filler, "I see."))
        state = conversation.state_dict()
        *_, turn = conversation.say("List all the codes.")
        assert sum(code in turn.text for code in codes.values()) >= 4, turn.text
        conversation.load_state_dict(state)
        *_, turn = conversation.say("What are the codes of the garage and the attic?")
        assert [code in turn.text for code in codes.values()] == [True, False, False, True, False], turn.text


class TestWholes:
    CHAPTER = "Chapter 1.\n\n" + "\n\n".join("w3 w4 w5 w6. " * 8 for _ in range(4))

    @pytest.fixture
    def history(self, make: Histories, monkeypatch: pytest.MonkeyPatch) -> ConversationHistory:
        """A chapter of which most was evicted."""
        monkeypatch.setattr("h2o_stream.recall.recall.MIN_REPLY", 1)
        history = make()
        list(history.feed_turn(f"{self.CHAPTER}\n\nChapter 2.\n\nw8 w9", "w9"))
        fill(history, 2)
        return history

    def test_it_is_read_again_in_pieces(self, history: ConversationHistory) -> None:
        before = len(history.conversation.engine.tokens)
        first, *events, turn = history.say("Summarize chapter 1")
        assert " ".join(piece.excerpt for piece in first.candidates).split() == self.CHAPTER.split()
        assert len(first.candidates) > 1
        assert turn.recalled == first.candidates
        # one turn, of a paragraph for each piece that was answered
        assert 0 < turn.text.count("\n\n") < len(first.candidates)
        assert (
            turn.text == "".join(event.text for event in events if isinstance(event, Token)) == history.entries[-1].text
        )
        assert turn.timings.new_tokens == sum(isinstance(event, Token) for event in events)
        assert [span.turn for span in history.conversation.turn_spans] == [1, 2, 3, 4]
        # the pieces were read aside: the stream has the message and the reply
        tokenizer, tokens = history.conversation.engine.tokenizer, history.conversation.engine.tokens
        assert turn.counts.seen == len(tokens)
        assert tokenizer.decode(tokens[before:], skip_special_tokens=True).split()[-4:] == turn.text.split()[-4:]
        assert "w3" not in tokenizer.decode(tokens[before:])

    @pytest.mark.parametrize(("in_pieces", "min_reply"), [(True, 3), (False, 1)])
    def test_a_short_reply_and_a_server_have_no_pieces(
        self, history: ConversationHistory, monkeypatch: pytest.MonkeyPatch, in_pieces: bool, min_reply: int
    ) -> None:
        monkeypatch.setattr("h2o_stream.recall.recall.MIN_REPLY", min_reply)
        history.conversation.recall.in_pieces = in_pieces
        before = len(history.conversation.engine.tokens)
        first, *_, turn = history.say("Summarize chapter 1")
        assert [candidate.excerpt for candidate in first.candidates] == [self.CHAPTER.strip()]
        assert turn.timings.prompt_tokens + turn.timings.new_tokens == turn.counts.seen - before

    def test_a_turn_that_is_abandoned_between_pieces(self, make: Histories, history: ConversationHistory) -> None:
        events = history.say("Summarize chapter 1")
        texts = list[str]()
        while "\n\n" not in "".join(texts):
            event = next(events)
            if isinstance(event, Token):
                texts.append(event.text)
        events.close()
        assert (history.entries[-1].text, history.entries[-1].finish) == ("".join(texts), "interrupted")
        tokens, state = [*history.conversation.engine.tokens], history.conversation.state_dict()
        other = make()
        other.conversation.load_state_dict(state)
        assert [*other.conversation.engine.tokens] == tokens
        assert history.undo()[0].prompt == "Summarize chapter 1"

    def test_passages_of_it_are_enough_for_a_question(
        self, history: ConversationHistory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        passage = Passage(1, "user", "w3 w4 w5 w6.", 0, 2)
        found = [Candidate(passage, passage.text, 1.0, ("w3",), 0.0, 2, "recalled")]
        monkeypatch.setattr("h2o_stream.recall.recall.decide", lambda *_: found)
        assert next(history.say("In chapter 1 who is w3")) == Recalled(tuple(found))

    @pytest.mark.parametrize(("message", "mode", "gone"), [
        ("Summarize chapter 1", "off", "off"),
        ("Summarize chapter 7", "auto", "never given"),
        ("Summarize chapter 1", "auto", "too long"),
    ])  # fmt: skip
    def test_it_is_never_silent(
        self, history: ConversationHistory, monkeypatch: pytest.MonkeyPatch, message: str, mode: Any, gone: str
    ) -> None:
        monkeypatch.setattr("h2o_stream.recall.recall.MAX_WHOLE", 99)
        history.conversation.recall.mode = mode
        first = next(history.say(message))
        assert (first.gone, first.candidates) == (gone, ())

    def test_code_is_read_again_however_its_text_is_cut(self, make: Histories) -> None:
        """Regression: of code that begins within a passage nothing was found in the stream."""
        code = "class W5:\n    " + "w5\n    " * 20
        history = make()
        list(history.feed_turn("w3", f"w9 w9 w9 w9 w9 w9 w9 w9\n{code}\nw9"))
        fill(history, 8)
        first = next(history.say("Show me class W5 again"))
        assert [candidate.excerpt for candidate in first.candidates] == [code.rstrip()]

    def test_nothing_is_new_for_what_is_still_held(self, make: Histories) -> None:
        history = make()
        list(history.feed_turn("Chapter 1.\n\nw3", "w9"))
        assert not any(isinstance(event, Recalled) for event in history.say("Summarize chapter 1"))
