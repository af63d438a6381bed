"""What a person sees of recall: lines before a reply, /recall, records, recordings, /why, and long texts."""

import io
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from h2o_stream.cache.counts import CacheCounts
from h2o_stream.config import CacheConfig, ChatConfig, ModelConfig, RecallConfig, RecallMode, SamplingConfig, Settings
from h2o_stream.recall.passage import Candidate, Passage, Recalled, Verdict, Whole
from h2o_stream.session.conversation_state import TurnSpan
from h2o_stream.session.jsonl import JsonlWriter
from h2o_stream.session.retention import RetainedText, RetainedTurn
from h2o_stream.session.transcript import Entry
from h2o_stream.session.turn import Timings, Turn
from h2o_stream.ui.chat import Chat, open_chat
from h2o_stream.ui.documents import _REPLY, split_asking, split_question
from h2o_stream.ui.heatmap import heatmap
from h2o_stream.ui.recall import candidates_table, note_recalled, recalled_line
from h2o_stream.ui.screen import Screen
from h2o_stream.ui.terminal import PrefillStatus, SafeConsole, Terminal
from tests.commands import invoke, piped, records
from tests.fixtures import written

pytestmark = pytest.mark.usefixtures("own_home")

FACT, TALK, QUESTION = "The cellar code is 4711.", "word " * 80, "What is the cellar code?"
LINE = f"recalled from turn 1: {FACT}"

CLARA = Candidate(
    Passage(3, "user", "My sister Clara works as a dentist. We met in May.", 40, 53),
    "My sister Clara works\nas a dentist.", score=0.83127, terms=("Clara", "dentist"), held=0.04, tokens=9,
    verdict="recalled",
)  # fmt: skip


READING = "reading chapter 13 again,"
CHAPTER = Whole("chapter 13", 3, text="Chapter 13. It rained.", start=9)


def turn(*recalled: Candidate) -> Turn:
    counts = CacheCounts(seen=9, cached=8, sinks=1, pinned=2, heavy=2, recent=3, window=8, nbytes=100)
    return Turn(4, "Where?", "There.", Timings(), counts, 5, "stop", recalled=recalled)


def drawn(shown: object, width: int = 120) -> str:
    out = io.StringIO()
    SafeConsole(file=out, width=width, markup=False, emoji=False, highlight=False).print(shown)
    return out.getvalue()


class TestLines:
    def test_a_line(self) -> None:
        assert recalled_line(CLARA, 80) == "recalled from turn 3: My sister Clara works as a dentist."
        assert recalled_line(CLARA, 30) == "recalled from turn 3: My sist…"

    @pytest.mark.parametrize(("event", "line"), [
        (Recalled((CLARA,), CHAPTER), f"{READING} 9 tokens of turn 3: the cache no longer has it"),
        (Recalled((CLARA, CLARA), CHAPTER), f"{READING} 18 tokens of turn 3 in 2 pieces: the cache"),
        (Recalled((), CHAPTER, "off"), "chapter 13 is no longer in the cache as a whole; /recall auto"),
        (Recalled((), CHAPTER, "too long"), "chapter 13 is no longer in the cache as a whole, and too long"),
        (Recalled((), Whole("chapter 13"), "never given"), "chapter 13 was not found in what was said"),
    ])  # fmt: skip
    def test_what_is_gone_as_a_whole(self, event: Recalled, line: str, capsys: pytest.CaptureFixture[str]) -> None:
        note_recalled(Terminal(quiet=bool(event.gone)), event)
        assert " ".join(capsys.readouterr().err.split()).startswith(line)

    def test_on_the_screen(self) -> None:
        out, terminal = io.StringIO(), Terminal()
        terminal.console = SafeConsole(file=out, force_terminal=True, width=40, height=20, markup=False)
        with Screen(terminal, "model", None) as screen:
            screen.start_turn("turn 4", "Where?")
            screen.add_event(Recalled((CLARA,)))
            screen.add_event(turn(CLARA))
        assert "recalled from turn 3: My sister Cla…" in out.getvalue()

    @given(st.text(max_size=60), st.integers(1, 60))
    def test_it_fits(self, excerpt: str, width: int) -> None:
        line = recalled_line(replace(CLARA, excerpt=excerpt), width)
        assert cell_len(line) <= width
        assert "\n" not in line


class TestTable:
    def test_every_verdict(self) -> None:
        found = [replace(CLARA, verdict=verdict) for verdict in get_args(Verdict)]
        shown = drawn(candidates_table(found))
        for words in (*get_args(Verdict), "0.83", "4%", "you", "Clara, dentist", "My sister Clara works as a dentist."):
            assert words in shown

    def test_what_was_found_without_its_words(self) -> None:
        (*_, row) = drawn(candidates_table([replace(CLARA, terms=())])).splitlines()
        assert "other words" in row

    def test_pieces_of_a_text_are_cut(self) -> None:
        assert "…" in drawn(candidates_table([replace(CLARA, excerpt="A chapter. " * 200)]))

    def test_nothing_is_cut_off_in_a_narrow_terminal(self) -> None:
        model = replace(CLARA, passage=replace(CLARA.passage, turn=120_000, role="assistant"), verdict="still held")
        words = " ".join(drawn(candidates_table([model]), width=80).split())
        assert "120000 0.83 4% still held model" in words
        for word in CLARA.excerpt.split():
            assert word in words


class TestRecords:
    def test_a_turn(self) -> None:
        assert turn(CLARA).record()["recalled"] == [
            {"turn": 3, "role": "user", "text": CLARA.excerpt, "score": 0.8313, "tokens": 9}
        ]
        assert turn().record()["recalled"] == []


class TestWhy:
    @pytest.mark.parametrize("recalled", [False, True])
    def test_what_was_read_again_is_underlined(self, recalled: bool) -> None:
        pieces = [RetainedText(0, "said", 1.0), RetainedText(1, "again", 1.0, recalled)]
        shown = heatmap([RetainedTurn(TurnSpan(1, 0, 2), 1.0, pieces)], "all layers")
        underlined = {shown.plain[span.start : span.end] for span in shown.spans if "underline" in str(span.style)}
        assert underlined == ({"again", "\nunderlined"} if recalled else set())
        assert ("underlined: read again by recall" in shown.plain) == recalled


class TestQuestions:
    @pytest.mark.parametrize(("text", "parts"), [
        ("One.\nTwo.", ("", "One.\nTwo.")),
        ("One.\n\nTwo?", ("One.", "Two?")),
        ("One.\n\nTwo.\n \n\t\nThree,\nreally?\n\n", ("One.\n\nTwo.", "Three,\nreally?")),
        ("One.\r\n\r\nTwo?", ("One.", "Two?")),
        ("", ("", "")),
    ])  # fmt: skip
    def test_the_last_paragraph(self, text: str, parts: tuple[str, str]) -> None:
        assert split_question(text) == parts

    @pytest.mark.parametrize(("text", "questions"), [
        ("One.\nTwo. Three?\n", ["Two. Three?", "Three?"]),
        (f"{TALK.strip()}\nWhat is it?", ["What is it?", f"{TALK.strip()}\nWhat is it?"]),
        ("Two?\nThree.", []),
        ("", []),
    ])  # fmt: skip
    def test_the_last_line_or_sentence_that_asks(self, text: str, questions: list[str]) -> None:
        split = split_asking(text)
        assert [question for _, question in split] == questions
        assert all(f"{body} {question}".split() == text.split() for body, question in split)

    @given(st.text("a \n"))
    def test_nothing_is_lost(self, text: str) -> None:
        body, question = split_question(text)
        assert f"{body}\n{question}".split() == text.split()
        assert question or not text.strip()


class TestInAChat:
    def test_a_line_before_the_reply_and_a_record(self, tiny_folder: Path, tmp_path: Path) -> None:
        out = tmp_path / "run.jsonl"
        done = piped(tiny_folder, [FACT, TALK, QUESTION], "--window", 64, "--jsonl", out)
        assert done.exit_code == 0, done.stderr
        shown = done.stderr.splitlines()
        assert "tokens, " in shown[shown.index(LINE) - 1]
        assert "tokens, " in shown[shown.index(LINE) + 1]
        *earlier, last = [record["recalled"] for record in records(out.read_text()) if record["type"] == "turn"]
        assert earlier == [[], []]
        assert [(passage["turn"], passage["role"], passage["text"]) for passage in last] == [(1, "user", FACT)]
        assert not piped(tiny_folder, [FACT, TALK, QUESTION], "--window", 64, "-q").stderr

    def test_switched_off(self, tiny_folder: Path, tmp_path: Path) -> None:
        out = tmp_path / "run.jsonl"
        lines = [FACT, TALK, QUESTION, "/recall", f"/recall {QUESTION}", "/recall auto", "word", QUESTION]
        done = piped(tiny_folder, lines, "--window", 64, "--recall", "off", "--jsonl", out)
        assert done.stderr.count("recall is off; /recall auto switches it on") == 2
        assert "\nrecall is auto\n" in done.stderr
        counts = [len(record["recalled"]) for record in records(out.read_text()) if record["type"] == "turn"]
        assert counts == [0, 0, 0, 0, 1], "the turns from before are known"

    def test_the_command(self, tiny_folder: Path) -> None:
        lines = ["/recall", FACT, "/recall off", TALK, "/recall auto", f"/recall {QUESTION}", "/recall"]
        done = piped(tiny_folder, [*lines, "/recall purple", QUESTION, "/recall", "/recall 1"], "--window", 64)
        assert done.stderr.count("no passage was found for the last message") == 2, "asking says nothing"
        assert "nothing would be recalled: no passage has these words" in done.stderr
        assert len(re.findall(r"^ +1 +\d\.\d\d +\d+% +recalled +you .*cellar.* The cellar", done.stderr, re.M)) == 2
        assert f"turn 1 was read again: {FACT}" in done.stderr

    def test_a_damaged_index_is_rebuilt_with_a_notice(self, tiny_folder: Path, tmp_path: Path) -> None:
        options = ("--window", 64, "--session", "talk")
        piped(tiny_folder, [FACT, TALK], *options)
        [index] = (tmp_path / "data").rglob("*.sqlite")
        index.write_bytes(b"nonsense" * 1000)
        done = piped(tiny_folder, [QUESTION], *options)
        assert len(re.findall(r"^.*\bindex\b.*$", done.stderr, re.M)) == 1
        assert LINE in done.stderr


class TestInARun:
    @pytest.fixture
    def questions(self, tmp_path: Path) -> Path:
        question = {"question_id": 1, "category": "any", "turns": [FACT, TALK, QUESTION]}
        return written(tmp_path / "questions.jsonl", [question])

    def run(self, tiny_folder: Path, questions: Path, *options: object) -> Any:
        base = ("-m", tiny_folder, "-n", 8, "--temp", 0, "--window", 64, "--questions", questions)
        done = invoke("h2o-stream", *base, *options)
        assert done.exit_code == 0, done.stderr
        return done

    def test_it_is_off_by_default(self, tiny_folder: Path, questions: Path, tmp_path: Path) -> None:
        done = self.run(tiny_folder, questions, "--jsonl", tmp_path / "run.jsonl")
        assert "recalled" not in done.stderr
        run, *turns, _ = records((tmp_path / "run.jsonl").read_text())
        assert run["recall"] == "off"
        assert [turn["recalled"] for turn in turns] == [[], [], []]

    def test_records_and_recordings(self, tiny_folder: Path, questions: Path, tmp_path: Path) -> None:
        out, recording = tmp_path / "run.jsonl", tmp_path / "run.rec"
        done = self.run(tiny_folder, questions, "--recall", "auto", "--jsonl", out, "--record", recording)
        assert LINE in done.stderr
        assert [len(record.get("recalled", ())) for record in records(out.read_text())] == [0, 0, 0, 1, 0]
        replayed = invoke("h2o-stream", "--replay", recording, "--pace", 1000)
        assert replayed.exit_code == 0, replayed.stderr
        assert LINE in replayed.stdout

    def test_two_policies(self, tiny_folder: Path, questions: Path) -> None:
        done = self.run(tiny_folder, questions, "--recall", "auto", "--compare", "full,recent")
        assert done.stderr.count(LINE) == 1, "the full cache holds everything"


@contextmanager
def chatting(tiny_folder: Path, recall: RecallMode = "auto") -> Iterator[Chat]:
    """A chat with a window of 64."""
    model, cache = ModelConfig(str(tiny_folder)), CacheConfig(window=64)
    sampling = SamplingConfig(temperature=0.0, max_tokens=4)
    settings = Settings(model, cache, sampling, recall=RecallConfig(recall))
    with open_chat(settings, ChatConfig(), Terminal(), JsonlWriter(None), {}) as chat:
        yield chat


def entries(chat: Chat) -> list[tuple[str, str, str]]:
    found: list[Entry] = chat._context.history.entries
    return [(entry.kind, entry.prompt, entry.finish) for entry in found]


class TestLongTexts:
    @pytest.fixture
    def book(self, tmp_path: Path) -> Path:
        path = tmp_path / "book.txt"
        path.write_text(f"\n{FACT}\n\n{TALK}\n\nThe end.\n")
        return path

    def test_a_file_is_read_first(self, tiny_folder: Path, book: Path, tmp_path: Path, capsys: Any) -> None:
        short = tmp_path / "short.txt"
        short.write_text("word " * 20)
        with chatting(tiny_folder) as chat:
            chat.run(iter([f"/file {book}", f"/file {short} Why?", f"/file {book} {QUESTION}"]))
            first, second, third, last = chat._context.history.entries
        content = f"book.txt:\n\n{book.read_text().strip()}"
        assert (first.kind, first.prompt, first.text) == ("told", content, _REPLY)
        assert (second.kind, second.prompt) == ("said", f"short.txt:\n\n{'word ' * 20}\n\nWhy?".replace(" \n", "\n"))
        assert (third.kind, third.prompt) == ("told", content)
        assert (last.kind, last.prompt) == ("said", QUESTION)
        shown = capsys.readouterr().err
        assert len(re.findall(r"^read \d{3} tokens of book\.txt; ask about it$", shown, re.M)) == 1
        assert len(re.findall(r"^read \d{3} tokens$", shown, re.M)) == 1
        assert re.search(rf"^recalled from turn 3: .*{FACT}", shown, re.M)

    @pytest.mark.parametrize("recall", ["auto", "off"])
    def test_a_message(self, tiny_folder: Path, recall: RecallMode) -> None:
        """The last paragraph is the question, if it is short and the message longer than the window."""
        long = f"{TALK.strip()}\n\nmore"
        messages = [f"{long}\n\nWhy?", f"//{long}\n\nWhy?", "word\n\nWhy?", f"Why?\n\n{TALK.strip()}", TALK.strip()]
        with chatting(tiny_folder, recall) as chat:
            chat.run(iter(messages))
            said = [(kind, prompt) for kind, prompt, _ in entries(chat)]
        if recall == "off":
            assert said == [("said", message.replace("//", "/")) for message in messages]
        else:
            split = [("told", long), ("said", "Why?"), ("told", f"/{long}"), ("said", "Why?")]
            assert said == [*split, *(("said", message) for message in messages[2:])]

    @pytest.mark.parametrize("recall", ["auto", "off"])
    def test_a_prompt_that_is_piped(self, tiny_folder: Path, recall: RecallMode) -> None:
        """With recall its question, in the last line, is asked after the rest was read."""
        done = invoke(
            *("h2o-chat", "-m", tiny_folder, "--window", 64, "-n", 2, "--recall", recall, "-p", "-"),
            typed=f"{TALK.strip()}.\n{FACT}\n{TALK.strip().capitalize()}.\n{QUESTION}",
        )
        assert done.exit_code == 0, done.stderr
        assert (LINE in done.stderr) is (recall == "auto")

    @pytest.mark.parametrize(("interactive", "terminated"), [(True, False), (True, True), (False, False)])
    @pytest.mark.parametrize("as_file", [True, False])
    def test_ctrl_c_keeps_what_was_read(
        self,
        tiny_folder: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        request: pytest.FixtureRequest,
        interactive: bool,
        terminated: bool,
        as_file: bool,
    ) -> None:
        previous = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        request.addfinalizer(lambda: signal.signal(signal.SIGTERM, previous))
        (tmp_path / "book.txt").write_text("word " * 3000)
        messages = [f"/file {tmp_path}/book.txt Why?" if as_file else f"{'word ' * 3000}\n\nWhy?", "/stats"]
        with chatting(tiny_folder) as chat:
            interrupts, chat._terminal.interactive = chat._context.loaded.interrupts, interactive

            def press(status: PrefillStatus, done: int, total: int) -> None:
                interrupts.requested = True
                if terminated:
                    signal.raise_signal(signal.SIGTERM)

            monkeypatch.setattr(PrefillStatus, "show", press)
            if interactive and not terminated:
                chat.run(iter(messages))
            else:
                with pytest.raises(SystemExit if terminated else KeyboardInterrupt):
                    chat.run(iter(messages))
            [(kind, prompt, finish)] = entries(chat)
            assert (kind, finish) == ("told", "interrupted")
            assert prompt.count("word") == 3000
        shown, stays = capsys.readouterr().err, interactive and not terminated
        assert ("\n1,024 tokens were read and stay in the conversation" in shown) == stays
        assert ("now █ sinks 4" in shown) == stays
