"""The chat as used by people: keys in a real terminal, and the history of typed messages."""

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from h2o_stream.base import resources
from h2o_stream.ui import message_prompt
from h2o_stream.ui import message_prompt as module
from h2o_stream.ui.message_prompt import LimitedHistory, MessagePrompt, input_history
from tests.fixtures import with_exhaustive
from tests.terminal import Pty

pytestmark = pytest.mark.usefixtures("own_home")


class TestKeys:
    """In a real terminal."""

    @contextmanager
    def chat(self, model: Path, *options: str, columns: int = 80, lines: int = 24) -> Iterator[Pty]:
        """A chat that has come to its first prompt."""
        command = ("h2o-chat", "-m", str(model), "-n", "12", "--temp", "0", *options)
        with Pty(*command, columns=columns, lines=lines) as pty:
            pty.until(lambda p: "seen 0" in p.text)
            yield pty

    @pytest.mark.parametrize(("columns", "lines"), with_exhaustive([(80, 24)], [(160, 45), (40, 12)]))
    def test_a_chat(self, tiny_folder: Path, tmp_path: Path, columns: int, lines: int) -> None:
        file = tmp_path / "talk.json"
        with self.chat(tiny_folder, columns=columns, lines=lines) as pty:
            pty.send("first line\x1b\rsecond line\r")
            pty.until(lambda p: "evicted 0" in p.screen.display[-1] and "seen 0" not in p.text)
            pty.send('"""\rquoted\r\rlines\r"""\r')
            pty.until(lambda p: p.text.count("tokens, ") >= 2 or lines < 24)
            pty.send("\x1b[200~pasted\nblock\n  of three\x1b[201~")
            before = pty.screen.display[-1]
            pty.send("\r")
            pty.until(lambda p: "seen" in p.screen.display[-1] != before)
            pty.send("/exp\t")
            pty.until(lambda p: "/export" in p.text)
            pty.send(f" {file}\r")
            pty.until(lambda p: "written" in p.text)
            assert pty.leave() == 0
        said = [message["content"] for message in json.loads(file.read_text())["messages"] if message["role"] == "user"]
        assert said == ["first line\nsecond line", "quoted\n\nlines", "pasted\nblock\n  of three"]

    def test_a_full_cache_grows_against_the_context(self, tiny_folder: Path) -> None:
        """Regression: it had no bar."""
        with self.chat(tiny_folder, "--policy", "full") as pty:
            pty.send("hello " * 30 + "\r")
            pty.until(lambda p: re.match(r"▒+·+ seen [1-9]", p.screen.display[-1]) is not None)

    def test_history_is_kept_and_searched(self, tiny_folder: Path) -> None:
        with self.chat(tiny_folder) as pty:
            pty.send("/set seed 1234\r")
            pty.until(lambda p: "seed is now 1234" in p.text)
            assert pty.leave() == 0
        with self.chat(tiny_folder) as pty:
            pty.send("\x12seed")
            pty.until(lambda p: "/set seed 1234" in p.text)
            pty.send("\r\r")
            pty.until(lambda p: "seed is now 1234" in p.text)

    def test_an_editor(self, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        editor = tmp_path / "editor"
        editor.write_text('#!/bin/sh\nprintf "/set seed 77" > "$1"\n')
        editor.chmod(0o755)
        monkeypatch.setenv("EDITOR", str(editor))
        monkeypatch.setenv("VISUAL", str(editor))
        with self.chat(tiny_folder) as pty:
            pty.send("draft\x18\x05")
            pty.until(lambda p: "/set seed 77" in p.text)
            pty.send("\r")
            pty.until(lambda p: "seed is now 77" in p.text)

    @pytest.mark.exhaustive
    def test_vim(self, tiny_folder: Path) -> None:
        with self.chat(tiny_folder, "--vim") as pty:
            pty.send("/sxt seed 7\x1b")
            pty.until(lambda p: p.screen.cursor.x == len("> /sxt seed "))
            pty.send("0fxreA")
            pty.send("7\r")
            pty.until(lambda p: "seed is now 77" in p.text)

    def test_ctrl_c_twice_leaves(self, tiny_folder: Path) -> None:
        with self.chat(tiny_folder) as pty:
            pty.send("half a line\x03")
            pty.until(lambda p: p.screen.display[p.screen.cursor.y].rstrip() == ">")
            pty.send("\x03\x03")  # the first of them may come too late for the one before
            assert pty.exit_code() == 130

    def test_ctrl_c_twice_slowly_does_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pressed_at = iter([0.0, 0.0, 3.0, 3.0, 4.0])  # each press asks, and asks again if the chat goes on
        monkeypatch.setattr(message_prompt, "time", SimpleNamespace(monotonic=lambda: next(pressed_at)))
        with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
            prompt = MessagePrompt(lambda: FormattedText([]), False, InMemoryHistory(), lambda: "")
            keys.send_text("half a line\x03\x03\x03")
            with pytest.raises(KeyboardInterrupt):
                list(prompt.messages())
        assert list(pressed_at) == []

    def test_a_long_paste_is_a_line_that_is_sent_whole(self, tmp_path: Path) -> None:
        history = LimitedHistory(tmp_path / "history")
        lines, letters = "a line\n" * 466, "x" * 3000
        with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
            messages = MessagePrompt(lambda: FormattedText([]), False, history, lambda: "").messages()
            keys.send_text(f"\x1b[200~{lines}\x1b[201~ and \x1b[200~{letters}\x1b[201~ say?\r")
            assert next(messages) == f"{lines} and {letters} say?"
            keys.send_text("[pasted 9 lines] is what I typed\r")
            assert next(messages) == "[pasted 9 lines] is what I typed"
            keys.send_text("\x1b[200~short\nlines\x1b[201~\r")
            assert next(messages) == "short\nlines"
        kept = (tmp_path / "history").read_text()
        assert "a line" not in kept
        assert "xxx" not in kept
        assert "+and  say?" in kept
        assert "+short\n+lines" in kept

    def test_ctrl_c_stops_a_reply_and_what_was_said_stays(self, tiny_folder: Path) -> None:
        with self.chat(tiny_folder, "-n", "100000", "--window", "64") as pty:
            pty.send("hello\r")
            pty.until(lambda p: re.search(r"evicted [1-9]", p.text) is not None)
            pty.send("\x03")
            pty.until(lambda p: "interrupted" in p.text)
            pty.until(lambda p: "seen" in p.screen.display[-1] and "seen 0" not in p.text)
            pty.send("/why\r")
            pty.until(lambda p: "turn 1" in p.text)

    def test_ctrl_c_stops_a_command(self, tiny_folder: Path, tmp_path: Path) -> None:
        """Regression: it ended the chat."""
        os.mkfifo(tmp_path / "endless")
        with self.chat(tiny_folder) as pty:
            pty.send(f"/file {tmp_path / 'endless'}\r")
            pty.until(lambda p: "seen 0" not in p.text)
            pty.send("\x03")
            pty.until(lambda p: "stopped; the conversation goes on" in p.text and "seen 0" in p.text)

    def test_what_is_typed_during_a_reply_waits_for_the_prompt(self, tiny_folder: Path) -> None:
        """Regression: the terminal echoed it into the reply, whose lines then stood there twice."""
        with self.chat(tiny_folder, "-n", "1000", "--window", "64") as pty:
            pty.send("hello\r")
            pty.until(lambda p: "seen" in p.text and "seen 0" not in p.text)
            drawn = len(pty.output)
            os.write(pty.side, b"/set seed 77\r")
            pty.until(lambda p: "1000 tokens, " in p.text)
            assert "/set" not in pty.output[drawn:].partition("tokens, ")[0]
            pty.until(lambda p: "seed is now 77" in p.text)
            pty.send("/set seed 78")
            pty.until(lambda p: "/set seed 78" in p.text)

    def test_a_huge_paste(self, tiny_folder: Path) -> None:
        """A prompt of 200 kB stops long before its end; read in torch, which takes long enough."""
        with self.chat(tiny_folder, "--window", "64", "--engine", "eager") as pty:
            pty.send("\x1b[200~" + "word and another. " * 11_500 + "\x1b[201~\r")
            pty.until(lambda p: "reading" in p.text)
            os.write(pty.side, b"\x03")
            pty.until(lambda p: "interrupted" in p.text)
            pty.until(lambda p: "seen" in p.screen.display[-1])
            (seen,) = re.findall(r"seen ([\d,]+)", pty.screen.display[-1])
            assert int(seen.replace(",", "")) < 20_000, "of 46,000 tokens"
            assert "reading" not in pty.text, "that line is taken away"

    def test_markdown_is_drawn(self, tiny_folder: Path) -> None:
        with self.chat(tiny_folder) as pty:
            pty.send("hello\r")
            pty.until(lambda p: "tokens, " in p.text)
            assert "\x1b[?25l" in pty.output.partition("hello")[2]

    @pytest.mark.parametrize("environment", with_exhaustive([{"TERM": "dumb"}], [{"NO_COLOR": "1"}]))
    def test_poor_terminals(self, tiny_folder: Path, environment: dict[str, str]) -> None:
        with Pty("h2o-chat", "-m", str(tiny_folder), "-n", "8", environment=environment) as pty:
            pty.until(lambda p: "Ctrl-D leaves" in p.text.replace("\n", ""))
            pty.until(lambda p: p.screen.display[p.screen.cursor.y].rstrip() == ">")
            pty.send("hello\r")
            pty.until(lambda p: "tokens, " in p.text)
            assert pty.leave() == 0
            if "NO_COLOR" in environment:
                assert not re.search(r"\x1b\[3[1-7]m", pty.output)


def test_typed_messages_are_kept_only_if_wanted(tiny_folder: Path, tmp_path: Path) -> None:
    """And only the user may read them."""
    for option in ("--no-history", "--history"):
        with Pty("h2o-chat", "-m", str(tiny_folder), "-n", "4", option) as pty:
            pty.until(lambda p: "seen 0" in p.text)
            pty.send("hello\r")
            pty.until(lambda p: "tokens, " in p.text)
            pty.leave()
        history = tmp_path / "data" / "h2o-stream" / "history"
        assert history.exists() == (option == "--history")
    assert "+hello" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(resources, "data_folder", lambda: tmp_path / "data")
    return tmp_path / "data"


def messages(path: Path) -> list[str]:
    """Oldest first."""
    return list(FileHistory(str(path)).load_history_strings())[::-1]


def test_folder_and_file_are_private(data: Path) -> None:
    data.mkdir(mode=0o755)
    (data / "history").touch(0o644)
    input_history(True, pytest.fail).append_string("hello")
    assert stat.S_IMODE(data.stat().st_mode) == 0o700
    assert stat.S_IMODE((data / "history").stat().st_mode) == 0o600
    assert messages(data / "history") == ["hello"]


def test_the_oldest_messages_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MESSAGES", 3)
    path = tmp_path / "history"
    path.touch(0o600)
    history = LimitedHistory(path)
    for text in ("1", "2\n# 2\n\n+2", "a\n# b\n\n# c", "4\n", "5 ü"):
        history.append_string(text)
    assert messages(path) == ["a\n# b\n\n# c", "4\n", "5 ü"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["history"]


def test_bytes_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 1000)
    path = tmp_path / "history"
    path.touch()
    history = LimitedHistory(path)
    for number in range(20):
        history.append_string(f"{number} " + "x" * 90)
        assert path.stat().st_size <= 1000
    history.append_string("y" * 5000)
    assert [text.split()[0] for text in messages(path)][-1] == "19"
    assert len(messages(path)) > 3


def test_what_earlier_versions_kept_is_trimmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "history"
    unlimited = FileHistory(str(path))
    for number in range(30):
        unlimited.store_string(str(number))
    monkeypatch.setattr(module, "MAX_MESSAGES", 10)
    LimitedHistory(path)
    assert messages(path) == [str(number) for number in range(20, 30)]


def test_a_folder_that_cannot_be_written(data: Path) -> None:
    data.write_text("a file")
    said: list[str] = []
    assert isinstance(input_history(True, said.append), InMemoryHistory)
    assert len(said) == 1
    assert "no input history" in said[0]
