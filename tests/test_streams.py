"""Closed, narrow, ASCII or hung-up streams, and users without a home: no tracebacks and no stray files."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from h2o_stream.session.jsonl import JsonlWriter
from tests.commands import invoke
from tests.fixtures import written
from tests.in_turn import in_turn
from tests.preloaded import Preloaded, run
from tests.terminal import BIN, Pty

LINES: list[Any] = [
    {"version": 2, "width": 80, "height": 24},
    [0.0, "o", "modèle · h2o\r\n"],
    [0.01, "o", "[turn 1 · fragen] 日本\u2028語\u2029?\x85 \ud83d\r\n"],
    [0.02, "i", "x"],
    [0.03, "o", "Grüße\u2028👍\udcff\r\n"],
]
COMMANDS = ("h2o-chat", "h2o-stream", "h2o-compare")


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return written(tmp_path / "run.rec", LINES)


def shell(command: str, *arguments: object, closed: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    line = f'exec "$0" "$@" {closed}'
    return subprocess.run(
        ["sh", "-c", line, BIN / command, *map(str, arguments)], env={**os.environ, **environment},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, encoding="utf-8", timeout=120, check=False,
    )  # fmt: skip


def started_or_forked(command: str, *arguments: object, closed: str) -> subprocess.CompletedProcess[str]:
    """A new interpreter for ``h2o-chat --version``, which starts fast; a fork for everything else."""
    if (command, *arguments) == ("h2o-chat", "--version"):
        return shell(command, *arguments, closed=closed)
    streams = {"<&-": 0, ">&-": 1, "2>&-": 2}
    return run(command, *map(str, arguments), closed=[streams[stream] for stream in closed.split()])


class TestClosedStreams:
    @pytest.mark.every(2)
    @pytest.mark.parametrize("command", COMMANDS)
    @pytest.mark.parametrize(
        ("closed", "code"), [("<&-", 0), (">&-", 1), ("2>&-", 0), ("<&- 2>&-", 0), (">&- 2>&-", 1)]
    )
    def test_what_needs_no_model(self, command: str, closed: str, code: int) -> None:
        done = started_or_forked(command, "--version", closed=closed)
        assert (done.returncode, done.stderr) == (code, "")
        assert done.stdout.startswith("h2o_stream ") == (code == 0)

    @pytest.mark.parametrize(("closed", "code"), [(">&-", 1), ("<&- 2>&-", 0)])
    def test_replies(self, tiny_folder: Path, tmp_path: Path, closed: str, code: int) -> None:
        """A reply that cannot be written is an error: the exit code says so, as with a closed pipe."""
        records = tmp_path / "run.jsonl"
        done = started_or_forked("h2o-chat", "-m", tiny_folder, "-p", "hi", "-n", 3, "--jsonl", records, closed=closed)
        assert done.returncode == code
        assert "Traceback" not in done.stderr
        assert "unexpected" not in done.stderr
        assert bool(done.stdout.strip()) == (code == 0)
        assert '"run"' in records.read_text().splitlines()[0]

    def test_no_input_ends_the_chat(self, tiny_folder: Path) -> None:
        done = started_or_forked("h2o-chat", "-m", tiny_folder, closed="<&-")
        assert done.returncode == 0
        assert not done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_disk_that_is_full(recording: Path) -> None:
    for arguments in (["h2o-stream", "--help"], ["h2o-chat", "--sessions"], ["h2o-stream", "--replay", recording]):
        with Path("/dev/full").open("w") as full, Preloaded(arguments, stdout=full, stderr=subprocess.PIPE) as child:
            errors = child.stderr.read().decode()
            assert child.wait(60) == 1
        assert errors.endswith(f"{arguments[0]}: No space left on device (--debug shows where)\n")
        assert errors.count("\n") == 1 or "--replay" in arguments


ASCII: list[dict[str, str]] = [
    {"PYTHONIOENCODING": "ascii"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
]


class TestAscii:
    @pytest.mark.every(2)
    @pytest.mark.parametrize("environment", ASCII)
    def test_characters_it_cannot_encode_become_question_marks(
        self, recording: Path, environment: Mapping[str, str]
    ) -> None:
        done = shell("h2o-stream", "--replay", recording, **environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("Gr??e???\n")
        assert "[turn 1 ? fragen] ???" in done.stdout
        assert shell("h2o-chat", "--help", **environment).returncode == 0

    @pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
    def test_records_stay_exact(self, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
        record = {"text": "Grüße 日本\u2028\x1b[2J \udcff", "stop": ["\x85"]}
        out = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding))
        with JsonlWriter("-") as records:
            records.write(record)
        assert json.loads(out.getvalue().decode(encoding)) == record
        sys.stdout.detach()  # type: ignore[attr-defined]


class TestHangUps:
    """A closed terminal, in a chat and in a replay."""

    @pytest.mark.parametrize("when", ["loading", "waiting"])
    def test_a_chat(self, tiny_folder: Path, tmp_path: Path, when: str) -> None:
        scratch, home = tmp_path / "scratch", tmp_path / "home"
        scratch.mkdir()
        base = ["-m", str(tiny_folder), "-n", "4", "--session", "talk"]
        with Pty("h2o-chat", *base, home=home, environment={"TMPDIR": str(scratch)}) as pty:
            pty.until(lambda p: "Loading" in p.text and ">" in p.text)
            if when == "waiting":
                pty.until(lambda p: "seen" in p.text)
                pty.send("hello\r")
                pty.until(lambda p: "tokens, " in p.text)
            pty.hang_up()
            assert pty.process.wait(20) == 128 + signal.SIGHUP
        assert not [path for path in scratch.rglob("*") if path.is_file()]
        assert {path.name.partition("_")[0] for path in scratch.iterdir()} <= {"torchinductor"}, "torch makes it"
        session = home / "h2o-stream" / "sessions" / "talk"
        assert not list(session.glob("*.part"))
        if when == "waiting":
            assert '"hello"' in (session / "transcript.jsonl").read_text()

    def test_a_replay(self, tmp_path: Path) -> None:
        late = written(tmp_path / "late.rec", [*LINES, [600, "o", "late"]])
        with Pty("h2o-stream", "--replay", str(late)) as pty:
            pty.until(lambda p: "Gr" in p.text)
            pty.hang_up()
            assert pty.process.wait(20) == 128 + signal.SIGHUP

    @pytest.mark.every(2)
    @pytest.mark.parametrize("ignored", [True, False])
    def test_nohup(self, tmp_path: Path, ignored: bool) -> None:
        late = written(tmp_path / "late.rec", [*LINES, [0.5 if ignored else 60, "o", "late"]])
        line = ("trap '' HUP; " if ignored else "") + 'exec "$0" "$@"'
        with subprocess.Popen(
            ["sh", "-c", line, BIN / "h2o-stream", "--replay", late],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        ) as child:
            child.stdout.read(1)
            child.send_signal(signal.SIGHUP)
            assert child.wait(20) == (0 if ignored else 128 + signal.SIGHUP)


class TestPoorTerminals:
    @pytest.mark.parametrize("columns", [1, 3])
    def test_narrow_ones(self, recording: Path, columns: int) -> None:
        for command, arguments in (("h2o-stream", ["--replay", str(recording)]), ("h2o-chat", ["--list-prompts"])):
            with Pty(command, *arguments, columns=columns) as pty:
                assert pty.exit_code() == 0
                assert "Traceback" not in "".join(pty.output.split())

    def test_a_chat_in_one_column(self, tiny_folder: Path, tmp_path: Path) -> None:
        with Pty(
            "h2o-chat", "-m", str(tiny_folder), "-n", "5", "--temp", "0", columns=1, lines=3, home=tmp_path
        ) as pty:
            pty.send("hi\r")

            def letters(pty: Pty) -> str:
                return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\s", "", pty.output)  # each has its style

            pty.until(lambda p: "length" in letters(p))
            pty.send("/why\r/stats\r/sessions\r/help\r/nothing\r")
            pty.until(lambda p: "isnotacommand" in letters(p))
            assert pty.leave() == 0
            assert "unexpected" not in "".join(pty.output.split())


NOBODY = """
import os, pwd, sys
for name in [name for name in os.environ if name == "HOME" or name.startswith("XDG_")]:
    del os.environ[name]
def unknown(number):
    raise KeyError(number)
pwd.getpwuid = pwd.getpwnam = unknown
sys.argv = sys.argv[1:]
from importlib import import_module
import_module("h2o_stream.cli." + sys.argv[0].removeprefix("h2o-")).main()
"""

IMPORTS = "h2o-chat -p hi -n 2 -q -m MODEL"
"""Started as a new interpreter, since imports of libraries look up the home folder too."""


class TestNoHome:
    @pytest.mark.parametrize(("arguments", "code", "words"), [
        *((f"{command} --version", 0, "") for command in COMMANDS),
        ("h2o-chat --list-prompts", 0, ""),
        ("h2o-stream --replay RECORDING", 0, ""),
        ("h2o-chat --sessions", 1, "set HOME or XDG_DATA_HOME"),
        ("h2o-chat --models", 1, "set HOME"),
        ("h2o-chat --session talk -p hi -n 2 -m MODEL", 1, "set HOME or XDG_DATA_HOME"),
        pytest.param(IMPORTS, 0, "", marks=pytest.mark.exhaustive),
    ])  # fmt: skip
    def test_what_needs_no_folder_works(
        self, arguments: str, code: int, words: str, recording: Path, tiny_folder: Path, tmp_path: Path
    ) -> None:
        typed = arguments.replace("RECORDING", str(recording)).replace("MODEL", str(tiny_folder))
        command = ["-c", NOBODY, *typed.split()]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        if arguments == IMPORTS:
            done = subprocess.run(
                [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
            )
        else:
            done = run(*command, cwd=tmp_path, env=environment)
        assert done.returncode == code, done.stderr
        assert words in done.stderr
        assert "unexpected" not in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "~").exists()


class TestReplays:
    def test_what_a_chat_records_can_be_shown(self, tiny_folder: Path, tmp_path: Path) -> None:
        file = tmp_path / "run.rec"
        prompt = "a\u2028b\u2029c\x85d\udce9"
        done = invoke("h2o-chat", "-m", tiny_folder, "-n", 2, "-p", prompt, "-s", "caf\udce9", "--record", file)
        assert done.exit_code == 0, done.stderr
        shown = invoke("h2o-stream", "--replay", file, "--pace", 1000)
        assert shown.exit_code == 0, shown.stderr
        assert shown.stdout.replace("\r", "") == done.output

    def test_halves_of_pairs_in_questions(self, tiny_folder: Path, tmp_path: Path) -> None:
        questions = tmp_path / "q.jsonl"
        questions.write_text('{"question_id": "\\udc00", "category": "\\ud800 \\ud83d\\ude00", "turns": ["\\udfff"]}\n')
        base = ["-m", tiny_folder, "-n", 2, "--questions", questions]
        done = invoke("h2o-stream", *base, "--record", tmp_path / "rec", "--jsonl", tmp_path / "jsonl")
        assert done.exit_code == 0, done.stderr
        assert invoke("h2o-stream", "--replay", tmp_path / "rec", "--pace", 1000).exit_code == 0
        assert "\U0001f600" in (tmp_path / "rec").read_text()

    @in_turn(
        "line",
        [*([at_s, "o", ""] for at_s in (None, [], "7", float("nan"), float("inf"), -1, 10**400, 1e300, True)),
         *([0, "o", text] for text in (None, [], 7)), [], [0, "o"], {}, 7, None],
    )  # fmt: skip
    def test_what_is_no_line(self, tmp_path: Path, line: Any) -> None:
        done = invoke("h2o-stream", "--replay", written(tmp_path / "bad.rec", [*LINES, line]))
        assert done.exit_code == 1
        assert f"line {len(LINES) + 1} is not a line of a recording" in done.stderr

    @in_turn("header", [{}, {"version": 1}, {"version": True}, [], None, 2])
    def test_what_is_no_header(self, tmp_path: Path, header: Any) -> None:
        done = invoke("h2o-stream", "--replay", written(tmp_path / "bad.rec", [header, *LINES[1:]]))
        assert done.exit_code == 1
        assert "not a recording in asciinema's format" in done.stderr
