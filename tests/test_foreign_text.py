"""No untrusted text sends control sequences to the terminal: models, users, files, folders, headers, times, errors."""

import ast
import io
import json
import shutil
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.layout import Layout
from rich.live import Live
from rich.markdown import Markdown
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import h2o_stream
from h2o_stream.base.progress import Progress
from h2o_stream.cli import chat, run
from h2o_stream.models import other_tools as stores
from h2o_stream.models.other_tools import StoredModel
from h2o_stream.recall.passage import Candidate, Passage, Recalled
from h2o_stream.session.conversation_state import TurnSpan
from h2o_stream.session.report import RunReport
from h2o_stream.session.retention import RetainedText, RetainedTurn
from h2o_stream.ui.comparison import print_page, progress_bars
from h2o_stream.ui.heatmap import heatmap
from h2o_stream.ui.loading import LoadingLine
from h2o_stream.ui.pages import Page, TableData
from h2o_stream.ui.recall import candidates_table, note_recalled
from h2o_stream.ui.reply import MarkdownReply, PlainReply
from h2o_stream.ui.tables import print_report
from h2o_stream.ui.terminal import SafeConsole, Terminal, one_line, printable
from tests.commands import invoke
from tests.fixtures import written
from tests.in_turn import in_turn
from tests.terminal import Pty
from tests.test_streams import LINES

pytestmark = pytest.mark.usefixtures("own_home", "own_cache")

SOURCE = Path(h2o_stream.__file__).parent

EVIL = "\x1b[66mE\x1b]0;V\x07\x9b66mI\x1b_L\x1b\\\x00\b!"
"""Sequences that we never send."""

NAME = EVIL.replace("\x00", "")
"""The same as the name of a file or folder."""

SPEAKS = ("\x1b[66m", "\x1b]", "\x1b_", "\x1b\\", "\x07", "\x9b", "\x00")


def spoken(shown: str, live: bool = False) -> list[str]:
    """Control characters and sequences in the output that are not ours."""
    found = [sequence for sequence in SPEAKS if sequence in shown]
    return found if live else [*found, *(c for c in shown if not c.isprintable() and c not in "\n\t\u2028\u2029\xad")]


@pytest.fixture
def evil_folder(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / f"model{NAME}"))


@pytest.fixture
def evil_questions(tmp_path: Path) -> Path:
    file = tmp_path / f"q{NAME}.jsonl"
    lines = [{"question_id": f"id{EVIL}", "category": f"c{EVIL}", "turns": [f"ask{EVIL}", f"again{EVIL}"]}]
    return written(file, lines)


class TestOnePlace:
    def test_only_one_module_writes_to_the_terminal(self) -> None:
        """No other module uses unsafe consoles or writes to the terminal directly."""
        found = set()
        for path in SOURCE.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    called = ast.unparse(node.func)
                    if called.rpartition(".")[2] in ("print", "Console", "echo", "write", "writelines"):
                        found.add((path.relative_to(SOURCE).as_posix(), called))
        ours = {call for call in found if not call[1].endswith(("console.print", "page.print", "_console.print"))}
        assert {call for call in ours if "write" not in call[1]} == {
            ("cli/options.py", "typer.echo"),  # bundled prompts, version
            ("cli/run.py", "print"),  # text sanitized by `one_line`
        }
        assert {call[0] for call in ours if "std" in call[1]} == {"ui/terminal.py"}
        assert all("Safe" in call for call in (name for _, name in found if name.endswith("Console")))

    @given(st.text(st.characters(), max_size=40))
    def test_whatever_is_drawn(self, text: str) -> None:
        """Any characters in any rich renderable; without a terminal, only plain text is written."""
        out = io.StringIO()
        console = SafeConsole(file=out, width=60, height=30, markup=False, emoji=False, highlight=False)
        table = Table(text, title=text, caption=text)
        table.add_row(text)
        drawn: list[Any] = [text, Text(text), table, Markdown(text), Panel(text, title=text, subtitle=text)]
        for thing in (*drawn, Layout(Text(text))):
            console.print(thing)
            console.print(thing, soft_wrap=True)
        console.out(text)
        assert not [c for c in out.getvalue() if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t"]

    @in_turn("text", [
        EVIL, f"[{EVIL}](http://{EVIL})", f"```{EVIL}\n{EVIL}\n```", "&#27;[66m", "&#x9b;66m", "a&#13;b",
        f"![{EVIL}](a)",
    ])  # fmt: skip
    def test_markdown_on_a_terminal(self, text: str) -> None:
        out = io.StringIO()
        console = SafeConsole(file=out, width=60, force_terminal=True, color_system="truecolor", legacy_windows=False)
        with MarkdownReply(lambda width: Text(text), console) as reply:
            for letter in text:
                reply.push(letter)
                reply._live.refresh()
        with Live(Panel(text), console=console, screen=True):
            pass
        links = out.getvalue().replace("\x1b]8;", "").replace("\x1b\\", "")  # our own hyperlinks
        assert not spoken(links, live=True)
        assert "a\rb" not in out.getvalue()

    def test_names_are_on_one_line(self) -> None:
        assert one_line(f" a\n\tb\r\u2028c\u202egnp.exe\u2066{EVIL}") == "a b cgnp.exe[66mE]0;V66mI_L\\!"
        assert one_line(7) == "7"
        assert printable("\udcff\ud800 a\u2028\n") == "\ufffd\ufffd a\u2028\n"


class TestDrawings:
    """Every table, bar and line, drawn with hostile names."""

    @pytest.fixture
    def terminal(self, capsys: pytest.CaptureFixture[str]) -> Terminal:
        return Terminal()

    def test_all(self, terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
        terminal.note(EVIL)
        terminal.error(EVIL)
        terminal.reply(EVIL)
        with PlainReply(terminal) as reply:
            reply.push(EVIL)
        print_report(terminal, RunReport(), EVIL)
        print_page(Page(EVIL, EVIL, [TableData(EVIL, ("policy", EVIL), [(EVIL, EVIL)])]), terminal)
        pieces = [RetainedText(0, EVIL, 0.4), RetainedText(1, EVIL, 1.0, recalled=True)]
        passage = RetainedTurn(TurnSpan(1, 0, 2), 0.5, pieces)
        terminal.console.print(heatmap([passage], EVIL))
        recalled = Candidate(Passage(1, "user", EVIL, 0, 2), EVIL, 1.0, (EVIL,), 0.0, 2, "recalled")
        note_recalled(terminal, Recalled((recalled,)))
        terminal.console.print(candidates_table([recalled]))
        line = LoadingLine(f"/models/{EVIL}")
        line(Progress("reading", 1, 9))
        terminal.console.print(line.text(60))
        shown = capsys.readouterr()
        assert shown.out.count("[66m") == 2
        assert shown.err.count("[66m") > 11
        assert not spoken(shown.out + shown.err)

    def test_progress_bars(self, terminal: Terminal) -> None:
        out = io.StringIO()
        terminal.live, terminal.console = True, SafeConsole(file=out, force_terminal=True, width=60, markup=False)
        with progress_bars(terminal) as bars:
            bars.add_task(EVIL, total=3)
        assert "[66m" in out.getvalue()
        assert not spoken(out.getvalue(), live=True)


class TestCommands:
    @pytest.fixture
    def sessions(self, own_home: Path) -> Path:
        header = {"model": f"a/{EVIL}", "policy": EVIL, "window": 8, "system": None, "created": EVIL}
        turn = {"turn": 1, "prompt": EVIL, "text": EVIL, "kind": "said", "finish": EVIL}
        for name, time, model in (
            (f"s{NAME}", EVIL, None),
            ("number", 7, None),
            ("nothing", None, 7),
            ("list", [1], []),
        ):
            (own_home / name).mkdir(parents=True)
            first = header if model is None else header | {"model": model}
            written(
                own_home / name / "transcript.jsonl",
                [{"type": "session"} | first, {"type": "turn", "time": time} | turn],
            )
        return own_home

    def test_lists(self, sessions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stores, "stored_models", lambda: [StoredModel(EVIL, 5, EVIL)])
        for option in ("--sessions", "--models"):
            done = invoke("h2o-chat", option)
            assert done.exit_code == 0, done.output
            assert "[66m" in done.stdout
            assert not spoken(done.output)
        assert invoke("h2o-chat", "--sessions").stdout.count("\n") == 2, "those with fields of a wrong type are damaged"

    def test_a_chat(self, evil_folder: Path, sessions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / NAME).write_text(EVIL)
        typed = (
            f"{EVIL}", f"/file {NAME}", "/why", "/stats", f"/pin {EVIL}", "/pins", f"/system {EVIL}", "/system", "hi",
            "/undo", f"/set {EVIL} 1", f"/set temp {EVIL}", f"/set stop {EVIL}", "/show", "/show config",
            f"/show {EVIL}", "/sessions",
            f"/load {EVIL}", f"/save {EVIL}", f"/fork {EVIL}", f"/export {EVIL}.md",
            f"/export {NAME}.md", f"/recall {EVIL}", "/recall", f"/help {EVIL}", f"/x {EVIL}", f"/file none{NAME}",
            "/file ~none/x", f"/why {EVIL}", "/regen",
        )  # fmt: skip
        lines = "".join(line.replace("\n", " ") + "\n" for line in typed)
        done = invoke("h2o-chat", "-m", evil_folder, "-n", 4, "-s", f"Be {EVIL}", "-v", typed=lines)
        assert done.exit_code == 0, done.stderr
        assert "unexpected " not in done.stderr, "an error of our own; the model may say any word"
        assert done.stderr.count("[66m") > 15
        assert not spoken(done.output)

    @pytest.mark.parametrize("more", [[], ["--compare", "full,recent"]])
    def test_replays_of_questions(self, evil_folder: Path, evil_questions: Path, more: list[str]) -> None:
        done = invoke("h2o-stream", "-m", evil_folder, "-n", 4, "--questions", evil_questions, *more)
        assert done.exit_code == 0, done.stderr
        assert done.stderr.count("[66m") > 4
        assert not spoken(done.output)

    def test_a_comparison(self, evil_folder: Path, tmp_path: Path) -> None:
        text = tmp_path / f"text{NAME}.txt"
        text.write_text("words " * 60)
        done = invoke("h2o-compare", "nll", "-m", evil_folder, "--text", text, "--tokens", 40, "--policies", "full")
        assert done.exit_code == 0, done.stderr
        assert "[66m" in done.stderr
        assert not spoken(done.output)

    @in_turn("arguments", [
        ["h2o-chat", "-m", NAME], ["h2o-chat", "-m", f"/none/{NAME}.gguf", "--debug"],
        ["h2o-chat", "--prompt-file", NAME], ["h2o-chat", f"--{NAME}"], ["h2o-chat", NAME, "-p", "a"],
        ["h2o-chat", "--policy", NAME], ["h2o-chat", "--engine", NAME], ["h2o-chat", "--forget", NAME],
        ["h2o-chat", "--session", NAME, "--export", NAME], ["h2o-stream", "--questions", NAME],
        ["h2o-stream", "--compare", NAME], ["h2o-stream", "--replay", NAME],
        ["h2o-stream", "--jsonl", f"/none/{NAME}"], ["h2o-compare", NAME], ["h2o-compare", "report", NAME],
        ["h2o-compare", "nll", "--text", NAME], ["h2o-compare", "nll", "--text", __file__, "--policies", NAME],
        ["h2o-compare", "nll", "--text", __file__, "--windows", NAME],
    ])  # fmt: skip
    def test_errors(self, arguments: list[str]) -> None:
        done = invoke(*arguments)
        assert done.exit_code in (1, 2)
        assert "66m" in done.stderr
        assert not spoken(done.output)

    def test_errors_in_files(self, tiny_folder: Path, evil_folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
        (evil_folder / "chat_template.jinja").write_text("{{ raise_exception('no \x1b[66m') }}")
        config = json.loads((evil_folder / "config.json").read_text())
        other = Path(shutil.copytree(evil_folder, tmp_path / "other"))
        (other / "config.json").write_text(json.dumps(config | {"model_type": EVIL, "architectures": [EVIL]}))
        questions = written(tmp_path / "q.jsonl", [{"question_id": 1, "category": "c", "turns": EVIL}])
        recording = tmp_path / f"{NAME}.rec"
        recording.write_text(EVIL)
        options = tmp_path / "config" / "h2o-stream" / "config.toml"
        for arguments, words in (
            (["h2o-chat", "-m", evil_folder, "-p", "hi"], "the chat template fails"),
            (["h2o-chat", "-m", evil_folder, "-p", "hi", "--debug"], "Traceback"),
            (["h2o-chat", "-m", other, "-p", "hi"], "66m"),
            (["h2o-stream", "-m", tiny_folder, "--questions", questions], "turns must be"),
            (["h2o-stream", "--replay", recording], "66m"),
        ):
            done = invoke(*arguments)  # type: ignore[arg-type]
            assert done.exit_code == 1, done.stderr
            assert words in done.stderr
            assert not spoken(done.output)
        options.parent.mkdir(parents=True)
        options.write_text(f'"{NAME.encode("unicode_escape").decode()}" = 1'.replace("\\x", "\\u00"))
        for name in ("handle_termination", "prepare_stdio"):
            monkeypatch.setattr(run, name, lambda *arguments: None)
        monkeypatch.setattr(sys, "stderr", out := io.StringIO())
        with pytest.raises(SystemExit):
            run.main("h2o-chat", chat.app)
        assert "66m" in out.getvalue()
        assert not spoken(out.getvalue())


class TestTerminals:
    """The same in a real terminal: screens, panes, prompt, toolbar and completions."""

    def test_a_screen(self, tmp_path: Path) -> None:
        lines = [*LINES, [0.5, "o", EVIL], [1.0, "o", "end"]]
        with Pty("h2o-stream", "--replay", str(written(tmp_path / "evil.rec", lines)), "--pace", "4") as pty:
            pty.until(lambda p: "66m" in p.text)
            assert pty.exit_code() == 0
        assert not spoken(pty.output, live=True)

    def test_panes(self, evil_folder: Path, evil_questions: Path) -> None:
        base = ["-m", str(evil_folder), "-n", "4", "--questions", str(evil_questions)]
        with Pty("h2o-stream", *base, "--compare", "full,recent") as pty:
            assert pty.exit_code() == 0
        assert "66m" in pty.output
        assert not spoken(pty.output, live=True)

    def test_a_prompt(self, evil_folder: Path, tmp_path: Path) -> None:
        for number in (1, 2):
            (tmp_path / f"file-{number}{NAME}").write_text(EVIL)
        with Pty("h2o-chat", "-m", str(evil_folder), "-n", "4", "--session", "talk", home=tmp_path) as pty:
            pty.until(lambda p: "Loading" in p.text)
            pty.until(lambda p: "seen 0" in p.text)
            pty.send(f"/file {tmp_path}/fi\t\t")
            pty.until(lambda p: "file-2" in p.text)
            pty.send("\t\r")
            pty.until(lambda p: "tokens, " in p.text)
            pty.send(b"\x16\x1b \xe9\xc2\x9b66m \x16\x07 hi\r")  # Ctrl-V inserts the next key literally
            pty.until(lambda p: p.text.count("tokens, ") == 2)
            pty.send("/sessions\r")
            pty.until(lambda p: "first words" in p.text)
            assert pty.leave() == 0
        assert not spoken(pty.output, live=True)
