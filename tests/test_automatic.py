"""Chats that nobody named: they are kept, found, continued, and make room for each other."""

import io
import os
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from h2o_stream.cli.chat import ChatOptions
from h2o_stream.errors import DataError
from h2o_stream.session.automatic import automatic_folders, automatic_session, make_room
from h2o_stream.session.folders import (
    read_settings,
    remove_session,
    rename_session,
    session_folder,
    session_names,
    sessions_folder,
    similar_session,
)
from h2o_stream.session.search import MARKS, search
from h2o_stream.session.sessions import Session
from h2o_stream.session.state_files import StateFiles
from h2o_stream.session.transactions import NoStateError
from h2o_stream.session.transcript import Entry, Header
from h2o_stream.session.turn import Turn
from h2o_stream.ui.sessions import show_matches
from tests.commands import invoke, piped
from tests.fixtures import with_exhaustive
from tests.histories import Histories, said
from tests.terminal import Pty

pytestmark = pytest.mark.usefixtures("own_home")

HEADER = Header("a-model", "h2o", 256, None)


def kept(text: str, *more: str, reply: str = "ok", nbytes: int = 0) -> str:
    """A closed automatic session with these messages. Returns its name."""
    with automatic_session(text) as session:
        session.begin(HEADER)
        for turn, prompt in enumerate((text, *more), 1):
            session.add(Entry(turn, prompt, reply), None)
        (session_folder(session.name) / "state-00000002.safetensors").write_bytes(b"x" * nbytes)
        return session.name


def used_at(name: str, time: int) -> None:
    for file in session_folder(name).iterdir():
        os.utime(file, (time, time))


class TestHistories:
    def test_a_turn_costs_a_line_and_the_end_its_states(
        self,
        make_history: Histories,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        history = make_history()
        history.keep(automatic_session)
        assert session_names() == []
        with monkeypatch.context() as patch:
            patch.setattr(StateFiles, "write", None)
            replies = said(history, "Tell me about the sea.", "And the tower?", "Go on.")
            history.undo(1)
            assert said(history, "Go on.") == replies[2:]
        history.close()
        (name,) = session_names()
        assert name == "tell-me-about-the-sea"
        assert len(list(session_folder(name).glob("state-*"))) == 2
        further = make_history()
        assert further.open(name, create=False)
        assert [entry.prompt for entry in further.undo(1)] == ["Go on."]
        assert said(further, "Go on.") == replies[2:]
        further.close()

    def test_a_crash_costs_the_states(self, make_history: Histories) -> None:
        history = make_history()
        history.keep(automatic_session)
        said(history, "one", "two")
        assert history.session is not None
        history.session.close()  # without its states
        further = make_history()
        with pytest.raises(NoStateError):
            further.open("one", create=False)
        for _ in further.replay("one"):
            pass
        assert [entry.prompt for entry in further.entries] == ["one", "two"]
        further.close()

    def test_a_new_conversation_is_a_new_session(self, make_history: Histories) -> None:
        history = make_history()
        history.keep(automatic_session)
        said(history, "one")
        history.reset()
        assert history.session is None
        said(history, "two")
        history.fork("named")
        said(history, "three")
        history.close()
        assert {name: Session(name).transcript.entries[-1].prompt for name in session_names()} == {
            "one": "one", "two": "two", "named": "three",
        }  # fmt: skip
        assert {folder.name for folder, _ in automatic_folders()} == {"one", "two"}

    def test_what_cannot_be_kept_is_said_once_and_kept_later(
        self,
        make_history: Histories,
    ) -> None:
        history, broken = make_history(), True

        def start(text: str) -> Session:
            if broken:
                raise DataError("the disk is full")
            return automatic_session(text)

        history.keep(start)
        details = [
            next(event.detail for event in history.say(text) if isinstance(event, Turn)) for text in ("one", "two")
        ]
        assert details == ["this chat is not kept, which is tried again after every turn: the disk is full", ""]
        broken = False
        said(history, "three")
        assert history.session is not None
        assert [entry.prompt for entry in history.session.transcript.entries] == ["one", "two", "three"]
        history.close()

    @pytest.mark.parametrize("keep", with_exhaustive([True], [False]))
    def test_back_beyond_the_states(self, make_history: Histories, keep: bool) -> None:
        history = make_history()
        if keep:
            history.keep(automatic_session)
        replies = said(history, *(f"question {number}" for number in range(10)))
        with pytest.raises(NoStateError):
            history.undo(9)
        for _ in history.rewind(1):
            pass
        assert [entry.text for entry in history.entries] == replies[:1]
        said(history, "another")
        history.close()
        if keep:
            entries = Session("question-0").transcript.entries
            assert [entry.prompt for entry in entries] == ["question 0", "another"]


class TestFolders:
    @pytest.mark.parametrize(("text", "name"), [
        ("What is 2+2?", "what-is-2-2"), ("¿?!", "chat"), ("../../etc", "etc"), ("x" * 99, "x" * 32),
        ("das ist ein langer Satz, von dem nur der Anfang bleibt", "das-ist-ein-langer-satz-von-dem"),
        ("何ですか。 これ", "何ですか-これ"),
    ])  # fmt: skip
    def test_names(self, text: str, name: str) -> None:
        assert [kept(text), kept(text)] == [name, f"{name}-2"]

    def test_room_is_made_by_the_oldest(self) -> None:
        names = [kept(text, nbytes=1000) for text in ("old", "open", "new")]
        for time, name in enumerate(names):
            used_at(name, time)
        rename_session(kept("named", nbytes=1000), "mine")
        with Session("open"):
            make_room(3000)
            assert not list(session_folder("old").glob("state-*")), "its text is there"
            assert list(session_folder("new").glob("state-*"))
            make_room(0)
        assert sorted(session_names()) == ["mine", "open"]

    def test_renamed_removed_and_nearly_named(self) -> None:
        kept("novel")
        kept("day 1")
        assert similar_session("novl") == "novel"
        assert similar_session("day-2") is None, "that is no slip"
        with pytest.raises(DataError, match="there is no session novl; did you mean novel?"):
            Session("novl", create=False)
        with pytest.raises(DataError, match="already exists"):
            rename_session("novel", "day-1")
        with Session("novel"), pytest.raises(DataError, match="open in another process"):
            remove_session("novel")
        rename_session("novel", "book")
        remove_session("day-1")
        assert session_names() == ["book"]
        assert automatic_folders() == []


class TestSearch:
    def found(self, words: str) -> list[tuple[str, int]]:
        return [(match.session, match.turn) for match in search(words, 9)]

    def test_it_follows_the_sessions(self) -> None:
        kept("The ship burns.", "A lighthouse")
        kept("nothing", reply="It was a burning ship.")
        assert sorted(self.found("ships burn")) == [("nothing", 1), ("the-ship-burns", 1)]
        with Session("nothing") as session:
            session.undo(0)
        remove_session("the-ship-burns")
        kept("沈む船の話")
        assert self.found("ships burn") == []
        (match,) = search("船", 9)
        assert match.excerpt == f"沈む{MARKS[0]}船{MARKS[1]}の話 ok"
        with pytest.raises(DataError, match="no word"):
            search("?!", 9)

    @pytest.mark.parametrize("content", [b"rubbish " * 999, None])
    def test_the_index_can_be_made_again(self, content: bytes | None) -> None:
        kept("A lighthouse")
        path = sessions_folder() / "search.sqlite"
        if content is None:
            with sqlite3.connect(path) as other:
                other.execute("PRAGMA user_version = 99")
        else:
            path.write_bytes(content)
        assert self.found("lighthouse") == [("a-lighthouse", 1)]

    def test_without_a_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kept("A lighthouse")

        def refused(*_: Any) -> None:
            raise PermissionError

        monkeypatch.setattr("h2o_stream.session.search.os.open", refused)
        assert self.found("lighthouse") == [("a-lighthouse", 1)]

    def test_texts_without_spaces_are_shown_whole(self) -> None:
        """Regression: what was wider than its column ended with an ellipsis."""
        kept("a ship", reply=(text := "海の上で沈む船の長い話がここにあります。"))
        show_matches(Console(file=(shown := io.StringIO()), width=40), "船")
        assert "".join(filter(text.__contains__, shown.getvalue())) == text


class TestCommands:
    def test_continued_with_its_settings(self, tiny_folder: Path) -> None:
        first = invoke("h2o-chat", "-m", tiny_folder, "--session", "t", "--window", 64, typed="/set n 3\nhi\n")
        assert "+ 3 tokens" in first.stderr
        second = invoke("h2o-chat", "-c", typed="/show config\n")
        assert "session t resumed after turn 1: hi" in second.stderr
        assert re.search(r"^window +64 +session", second.stderr, re.M)
        assert re.search(r"^max_tokens +3 +session", second.stderr, re.M)
        assert read_settings("t") == {"model": str(tiny_folder), "policy": "h2o", "window": "64", "max_tokens": 3}
        third = invoke("h2o-chat", "-c", "-n", 2, "and", "now?")
        assert "+ 2 tokens" in third.stderr
        assert read_settings("t")["max_tokens"] == 2
        assert "now " in invoke("h2o-chat", "-c", typed="/window 48\n").stderr
        assert "window 48" in invoke("h2o-chat", "-c", typed="").stderr
        loaded = invoke("h2o-chat", "-m", tiny_folder, "--window", 48, typed="/load t\nhi\n")
        assert "+ 2 tokens" in loaded.stderr
        assert "t " in invoke("h2o-chat", "--sessions").stdout
        assert "and now?" in invoke("h2o-chat", "--search", "now").stdout.replace(MARKS[0], "")
        assert invoke("h2o-chat", "--search", "never", "said").exit_code == 1
        assert invoke("h2o-chat", "--rename", "t", "u").exit_code == 0
        assert "did you mean" not in invoke("h2o-chat", "--remove", "u").stderr
        assert "no conversation to continue" in invoke("h2o-chat", "-c").stderr

    def test_pipes_keep_nothing(self, tiny_folder: Path) -> None:
        assert piped(tiny_folder, ["hello"]).exit_code == 0
        assert invoke("h2o-chat", "-m", tiny_folder, "-n", 2, "hello").exit_code == 0
        assert session_names() == []

    def test_a_name_that_nearly_exists(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kept("novel")
        monkeypatch.setattr("typer.confirm", lambda question, **_: "did you mean novel?" in question)
        assert ChatOptions(session="novl").meant_session(ask=True) == "novel"
        assert ChatOptions(session="novl").meant_session(ask=False) == "novl"
        assert ChatOptions(session="story").meant_session(ask=True) == "story"

    def test_private(self) -> None:
        assert not ChatOptions(private=True).checked().history

    @pytest.mark.parametrize(("arguments", "words"), [
        (["a", "-p", "b"], "both given"), (["--private", "-c"], "--private keeps nothing"),
        (["-c", "--session", "x"], "leave one of them out"),
    ])  # fmt: skip
    def test_contradictions(self, arguments: list[str], words: str) -> None:
        done = invoke("h2o-chat", *arguments)
        assert done.exit_code == 2
        assert words in done.stderr

    def test_at_a_terminal(self, tiny_folder: Path) -> None:
        options = ("-m", str(tiny_folder), "-n", "8", "--temp", "0")
        with Pty("h2o-chat", *options) as pty:
            pty.until(lambda p: "seen 0" in p.text)
            pty.send("hello there\r")
            pty.until(lambda p: "tokens, " in p.text)
            pty.send("/edit\r")
            pty.until(lambda p: "> hello there" in p.text.partition("takes the place")[2])
            pty.send("!\r")
            pty.until(lambda p: p.text.count("tokens, ") == 2)
            pty.send("/edit\r")
            pty.until(lambda p: "> hello there!" in p.text.rpartition("takes the place")[2])
            pty.send("\x03")
            pty.until(lambda p: "nothing was edited" in p.text)
            pty.send("/copy\r")
            pty.until(lambda p: "copied" in p.text)
            assert "\x1b]52;c;" in pty.output
            pty.hang_up()
            pty.ended()
        assert session_names() == ["hello-there"]
