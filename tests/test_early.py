"""Input typed while the model loads, and the display of its progress."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

import h2o_stream.ui.chat
import h2o_stream.ui.start
from h2o_stream.base.progress import Progress
from h2o_stream.config import ChatConfig, Settings
from h2o_stream.errors import ModelNotFoundError
from h2o_stream.session.jsonl import JsonlWriter
from h2o_stream.ui import loading
from h2o_stream.ui.loading import LoadingLine, show_loading
from h2o_stream.ui.loading_chat import BackgroundLoader, LoadingChat
from h2o_stream.ui.terminal import Terminal
from tests.terminal import Pty

pytestmark = pytest.mark.usefixtures("own_home")

GIB = 1 << 30


class Early:
    """An early chat with keys from a pipe, whose model finishes loading on the test's command."""

    def __init__(self, keys: PipeInput, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys, self.said, self.noted = keys, [], []
        self.loaded = threading.Event()
        self.error: Exception | None = None
        self.times_opened = 0
        self.opened_in: threading.Thread | None = None
        monkeypatch.setattr(h2o_stream.ui.start, "load_conversation", self._prepare)
        monkeypatch.setattr(h2o_stream.ui.chat, "open_chat", self._opened)
        monkeypatch.setattr("h2o_stream.ui.loading_chat._FRAME_S", 0.01)
        self.chat = LoadingChat(Settings(), ChatConfig(), Terminal(), JsonlWriter(None), {})
        self.prompt = self.chat._prompt

    def _prepare(self, settings: Settings, notify: Callable[[str], None], progress: Any) -> object:
        while not self.loaded.wait(0.01):
            progress(Progress("packing", 1, 2))
        notify("almost there")
        if self.error:
            raise self.error
        return object()

    @contextmanager
    def _opened(self, *args: object) -> Iterator[Any]:
        self.opened_in = threading.current_thread()
        self.times_opened += 1

        def run(messages: Iterator[str]) -> None:
            self.said = list(messages)

        yield SimpleNamespace(toolbar=lambda: "ready", starting_text=str, run=run)

    def later(self, *steps: Callable[[], object]) -> None:
        """Run steps one after another while the chat runs; one that returns False is repeated."""

        def carry_out() -> None:
            for step in steps:
                while step() is False:
                    time.sleep(0.005)

        threading.Thread(target=carry_out, daemon=True).start()

    def types(self, keys: str) -> Callable[[], None]:
        """The step that presses keys."""
        return lambda: self.keys.send_text(keys)

    def shows(self, draft: str, waiting: bool) -> Callable[[], bool]:
        """The step that waits until the prompt has this draft, sent or not."""
        return lambda: (
            self.prompt._session.app.is_running and (self.prompt.draft, self.prompt.waiting) == (draft, waiting)
        )

    def is_ready(self) -> bool:
        """Whether the model is there and the prompt knows it."""
        return self.prompt._background is None

    def run(self) -> None:
        with self.chat:
            self.chat.run()


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> Iterator[Early]:
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        yield Early(keys, monkeypatch)


class TestEarlyChat:
    def test_a_message_waits_for_the_model(self, early: Early, capsys: pytest.CaptureFixture[str]) -> None:
        early.keys.send_text("hello\r")
        early.later(early.shows("hello", True), early.loaded.set, early.is_ready, early.types("again\r\x04"))
        early.run()
        assert early.said == ["hello", "again"]
        assert early.opened_in is threading.main_thread()
        assert "almost there" in capsys.readouterr().err

    def test_a_message_that_waits_can_still_be_changed(self, early: Early) -> None:
        early.keys.send_text("hello\r")
        early.later(
            early.shows("hello", True), early.types(" there"), early.shows("hello there", False),
            early.loaded.set, early.is_ready, early.types("!\r\x04"),
        )  # fmt: skip
        early.run()
        assert early.said == ["hello there!"]

    def test_what_is_half_typed_when_the_model_is_there_stays(self, early: Early) -> None:
        early.keys.send_text("/he")
        early.later(early.shows("/he", False), early.loaded.set, early.is_ready, early.types("lp\r\x04"))
        early.run()
        assert early.said == ["/help"]

    @pytest.mark.parametrize("loaded", ["in the editor", "after it"])
    def test_an_editor_is_left_alone(self, early: Early, tmp_path: Path, monkeypatch: Any, loaded: str) -> None:
        editor, opened, closed = (tmp_path / name for name in ("editor", "opened", "closed"))
        wait = f'touch "{opened}"; while [ ! -e "{closed}" ]; do sleep 0.01; done'
        editor.write_text(f'#!/bin/sh\n{wait}\nprintf "from the editor" > "$1"\n')
        editor.chmod(0o755)
        monkeypatch.setenv("VISUAL", str(editor))
        early.keys.send_text("draft\x18\x05")
        if loaded == "in the editor":
            steps = early.loaded.set, early.chat._loader.result.done, lambda: time.sleep(0.1), closed.touch
        else:
            steps = closed.touch, early.shows("from the editor", True), early.loaded.set
        early.later(opened.exists, *steps, early.is_ready, early.types("\x04"))
        early.run()
        assert early.said == ["from the editor"]
        assert early.times_opened == 1

    @pytest.mark.parametrize(
        ("typed", "key"), [("", "\x03"), ("hello", "\x03"), ("hello\r", "\x03"), ("", "\x04"), ("hello\r", "\x04")]
    )
    def test_ctrl_c_and_ctrl_d_leave_at_once(self, early: Early, typed: str, key: str) -> None:
        early.keys.send_text(typed)
        early.later(early.shows(typed.strip(), "\r" in typed), early.types(key))
        with pytest.raises(KeyboardInterrupt) if key == "\x03" else nullcontext():
            early.run()
        assert not early.loaded.is_set()
        assert not early.said

    @pytest.mark.parametrize("typed", ["my question", "my question\r", "my\x1b\rquestion \x1b"])
    def test_what_was_typed_is_not_lost_with_the_model(self, early: Early, typed: str, capsys: Any) -> None:
        early.error = ModelNotFoundError("no such model")
        early.keys.send_text(typed)
        early.later(early.shows(typed.replace("\x1b\r", "\n").strip("\r\x1b"), typed[-1] == "\r"), early.loaded.set)
        with pytest.raises(ModelNotFoundError, match="no such model"):
            early.run()
        err = capsys.readouterr().err
        assert "Not sent: my" in err
        assert "question" in err


class TestLoader:
    def test_stopping_it_ends_it_at_its_next_progress(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cleaned = []

        def load_conversation(settings: Settings, notify: object, progress: Callable[[Progress], None]) -> None:
            try:
                for done in range(10_000):
                    progress(Progress("writing", done, 10_000))
                    time.sleep(0.01)
            finally:
                cleaned.append(True)

        monkeypatch.setattr(h2o_stream.ui.start, "load_conversation", load_conversation)
        heard: list[Progress] = []
        loader = BackgroundLoader(Settings(), heard.append)
        loader.start()
        while not heard:
            time.sleep(0.01)
        loader.stop()
        assert cleaned
        assert isinstance(loader.result.exception(1), KeyboardInterrupt)

    def test_one_that_never_began(self) -> None:
        BackgroundLoader(Settings(), lambda progress: None).stop()


class TestLoadingLine:
    def test_words_bar_and_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = 100.0
        monkeypatch.setattr(loading.time, "monotonic", lambda: now)
        line = LoadingLine("some/folder/llama-3-8b")
        assert line.text(80) == "Loading llama-3-8b ... 0 s"
        line(Progress("reading", 0, 15 * GIB))
        now += 10
        line(Progress("reading", 5 * GIB, 15 * GIB))
        assert line.text(80) == "Reading llama-3-8b  5.0/15.0 GiB " + ("━" * 10 + "╸").ljust(30) + "  20 s left"
        assert [len(line.text(width)) <= width for width in range(90)] == [True] * 90
        line(Progress("packing", 1 * GIB, 15 * GIB))
        assert "left" not in line.text(80), "a new phase has a speed of its own"
        now += 10
        line(Progress("packing", 2 * GIB, 15 * GIB))
        assert line.text(80).endswith("  2 min left")
        line(Progress("packing", 15 * GIB, 15 * GIB))
        assert line.text(80).startswith("Loading llama-3-8b ... ")

    @pytest.mark.parametrize("progress", [Progress("reading", 0, 0), Progress("reading", 5, 3), Progress("x", 1, 10)])
    def test_odd_figures(self, progress: Progress) -> None:
        line = LoadingLine("x\x1b[2J")
        line(progress)
        assert "\x1b" not in line.text(60)
        assert len(line.text(60)) <= 60

    def test_without_a_terminal_it_is_a_line_now_and_then(self, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        now = 0.0
        monkeypatch.setattr(loading.time, "monotonic", lambda: now)
        for quiet in (False, True):
            with show_loading("model", Terminal(quiet=quiet)) as progress:
                for _ in range(25):
                    now += 1.0
                    progress(Progress("packing", 1, 1000))
            assert capsys.readouterr().err.count("Packing model  1/1000 B") == (0 if quiet else 2)


HELD = """
import sys, time
from pathlib import Path

class Held:
    def find_spec(self, name, *more):
        while name == "{module}" and not Path("{file}").exists():
            time.sleep(0.01)

sys.meta_path.insert(0, Held())
from h2o_stream.cli import chat
sys.argv[0] = "h2o-chat"
chat.main()
"""
"""A chat whose loading waits, at the import of a module, until a file is there."""


class TestInATerminal:
    @pytest.fixture
    def go(self, tmp_path: Path) -> Path:
        """The file that is waited for."""
        return tmp_path / "go"

    def held(self, go: Path, *arguments: str, module: str = "h2o_stream.ui.start") -> Pty:
        return Pty("python", "-c", HELD.format(module=module, file=go), *arguments, started=True)

    def test_a_question_before_the_model(self, tiny_folder: Path, go: Path) -> None:
        with self.held(go, "-m", str(tiny_folder), "-n", "4", "--temp", "0") as pty:
            pty.until(lambda p: "Loading" in p.screen.display[-1])
            pty.send("hello\r")
            pty.until(lambda p: "your message waits" in p.screen.display[-1])
            go.touch()
            pty.until(lambda p: "+ 4 tokens" in p.text)
            assert pty.leave() == 0
        assert pty.output.count("Ctrl-D leaves") == 1

    def test_leaving_does_not_wait_for_imports(self, tiny_folder: Path, go: Path) -> None:
        with self.held(go, "-m", str(tiny_folder), "--engine", "eager", module="torch") as pty:
            pty.until(lambda p: "Loading" in p.screen.display[-1])
            pty.send("\x03")
            assert pty.exit_code() == 130
