"""The chat as a person and as a script meet it: commands, keys, sessions, where settings come from."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from h2o_stream.cli import chat, run, stream
from tests.preloaded import Preloaded
from tests.preloaded import run as run_command
from tests.terminal import BIN, Pty
from tests.test_cli import invoke, records


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def piped(model: Path, lines: Sequence[str], *options: object) -> Any:
    """A chat whose messages come through a pipe."""
    return invoke("h2o-chat", "-m", model, "-n", 8, "--temp", 0, *options, typed="".join(f"{line}\n" for line in lines))


def texts(jsonl: str) -> list[str]:
    return [record["text"] for record in records(jsonl) if record["type"] == "turn"]


class TestCommands:
    def test_help_names_every_command(self, tiny_folder: Path) -> None:
        done = piped(tiny_folder, ["/help"])
        for name in (
            "/reset",
            "/system",
            "/set",
            "/show",
            "/stats",
            "/save",
            "/load",
            "/regen",
            "/undo",
            "/file",
            "/exit",
        ):
            assert name in done.stderr
        assert not done.stdout

    def test_what_is_none_is_an_error_and_never_said(self, tiny_folder: Path, tmp_path: Path) -> None:
        out = tmp_path / "run.jsonl"
        done = piped(tiny_folder, ["/hepl", "/undo x", "/pin", "/exit now", "/exit", "too late"], "--jsonl", out)
        assert done.exit_code == 0
        assert "/hepl is not a command" in done.stderr
        assert "/undo takes a number, not 'x'" in done.stderr
        assert "/pin needs TEXT" in done.stderr
        assert "/exit takes nothing" in done.stderr
        assert [record["type"] for record in records(out.read_text())] == ["run", "summary"]

    def test_paths_and_two_slashes_are_said(self, tiny_folder: Path, tmp_path: Path) -> None:
        out = tmp_path / "run.jsonl"
        piped(tiny_folder, ["/usr/bin is a folder", "//help me", "/ is the root"], "--jsonl", out)
        assert [record["type"] for record in records(out.read_text())].count("turn") == 3

    def test_undo_regen_recall_and_export(self, tiny_folder: Path, tmp_path: Path) -> None:
        file = tmp_path / "talk.json"
        lines = ["one", "two", "/undo", "three", "/regen", "/recall 1", "/recall 9", f"/export {file}", "/undo 9"]
        done = piped(tiny_folder, lines)
        assert "taken back: two" in done.stderr
        assert "turn 1 was read again: one" in done.stderr
        assert "there is no turn 9" in done.stderr
        assert "9 turns cannot be taken back, there are 3" in done.stderr
        said = [message["content"] for message in json.loads(file.read_text())["messages"] if message["role"] == "user"]
        assert said == ["one", "three", "one"]
        first, _, third, again = done.stdout.splitlines()
        assert third == again, "greedy"
        assert first != third

    def test_pins_are_refused_when_they_would_starve_the_window(self, tiny_folder: Path) -> None:
        done = piped(
            tiny_folder,
            ["/pin The code is 4711.", "/pins", f"/pin {'word ' * 80}", "/pins"],
            "--window",
            64,
            "-s",
            "Hi.",
        )
        assert done.stderr.count("1: The code is 4711.") == 2
        assert "raise --window to" in done.stderr
        assert done.exit_code == 0

    def test_why(self, tiny_folder: Path) -> None:
        done = piped(tiny_folder, ["/why", "hello there", "word " * 80, "/why", "/why 1", "/why 9"], "--window", 64)
        assert "nothing was said yet" in done.stderr
        assert len(re.findall(r"turn 1 · \d+% kept", done.stderr)) == 2
        assert "of the heads of layer 1" in done.stderr
        assert "there is no layer 9, the model has layers 0 to 1" in done.stderr
        assert "…" in done.stderr

    def test_settings(self, tiny_folder: Path) -> None:
        lines = [
            "/set max_tokens 3",
            "hello",
            "/set max_tokens many",
            "/set color red",
            "/set top_p 7",
            "/show",
            "/set temp",
        ]
        done = piped(tiny_folder, lines)
        assert "+ 3 tokens" in done.stderr
        assert "max_tokens takes a number, not 'many'" in done.stderr
        assert "color cannot be set; /set takes one of temperature" in done.stderr
        assert "--top-p must be above 0" in done.stderr
        assert re.search(r"max_tokens +3", done.stderr)
        assert "/set temperature needs a value" in done.stderr

    def test_another_system_prompt(self, tiny_folder: Path) -> None:
        done = piped(tiny_folder, ["/system", "hello", "/system Be kind.", "/system", "hello"], "-s", "Be brief.")
        assert "Be brief.\n" in done.stderr
        assert "anew" in done.stderr
        assert "\nBe kind.\n" in done.stderr

    def test_files(self, tiny_folder: Path, tmp_path: Path) -> None:
        (tmp_path / "note.txt").write_text("What the note says.")
        (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
        (tmp_path / "empty.txt").write_text(" ")
        out = tmp_path / "talk.md"
        lines = [f"/file {tmp_path}/{name}" for name in ("note.txt What is it?", "bad.txt", "empty.txt", "none.txt")]
        done = piped(tiny_folder, [*lines, f"/export {out}", f"/export {out}", "/export talk.pdf"])
        assert "note.txt:\n\nWhat the note says.\n\nWhat is it?" in out.read_text()
        assert "not UTF-8 at byte 0" in done.stderr
        assert "the file is empty" in done.stderr
        assert "No such file" in done.stderr
        assert "File exists" in done.stderr
        assert "neither in .md nor in .json" in done.stderr

    def test_names_of_files_may_have_spaces(self, tiny_folder: Path, tmp_path: Path) -> None:
        out = tmp_path / "talk.md"
        for name in ("my notes.txt", "my", "it's.txt"):
            (tmp_path / name).write_text(f"This is {name}.")
        lines = [
            f"/file {tmp_path}/my notes.txt",
            f"/file {tmp_path}/my notes.txt  What is it?",
            f"/file '{tmp_path}/my' notes.txt?",
            f'/file "{tmp_path}/my notes.txt" Why?',
            f"/file {tmp_path}/my note",
            f"/file {tmp_path}/it's.txt or it's not",
            '/file "no such file" What?',
            "/file no such file",
            "/file ~nobody-at-all/x",
            "/file a\0b",
            f"/file {'x' * 5000} y",
            f"/export {out}",
        ]
        done = piped(tiny_folder, lines)
        said = re.findall(r"\*\*You\*\*\n\n(.*?)\n\n\*\*Model", out.read_text(), re.DOTALL)
        assert [text.replace("\n\n", "|") for text in said] == [
            "my notes.txt:|This is my notes.txt.",
            "my notes.txt:|This is my notes.txt.|What is it?",
            "my:|This is my.|notes.txt?",
            "my notes.txt:|This is my notes.txt.|Why?",
            "my:|This is my.|note",
            "it's.txt:|This is it's.txt.|or it's not",
        ]
        for words in (
            "/file no such file: No such file",
            "/file no: No such file",
            "/file ~nobody-at-all/x: there is no home folder ~nobody-at-all",
            "null character",
            "File name too long",
        ):
            assert words in done.stderr
        assert "unexpected" not in done.stderr

    def test_save_load_fork(self, tiny_folder: Path) -> None:
        lines = [
            "one",
            "/save first",
            "two",
            "/fork second",
            "three",
            "/load first",
            "/undo 2",
            "/sessions",
            "/load no/t",
        ]
        done = piped(tiny_folder, lines)
        assert "session first goes on after turn 1: one" in done.stderr
        assert "2 turns cannot be taken back, there are 1" in done.stderr
        assert re.search(r"second +3 ", done.stderr)
        assert "cannot name a session" in done.stderr
        assert "second" in invoke("h2o-chat", "--sessions").stdout


class TestSessions:
    def test_it_goes_on_as_if_never_left(self, tiny_folder: Path, tmp_path: Path) -> None:
        talk = [f"question {number} " + "word " * 20 for number in range(6)]
        options = ("--window", 64, "--temp", 1, "--seed", 4)
        whole = piped(tiny_folder, talk, *options).stdout.splitlines()
        first = piped(tiny_folder, talk[:3], *options, "--session", "talk")
        assert "session talk begins" in first.stderr
        rest = piped(tiny_folder, talk[3:], *options, "--session", "talk")
        assert "session talk goes on after turn 3: question 2" in rest.stderr
        assert first.stdout.splitlines() + rest.stdout.splitlines() == whole
        file = tmp_path / "talk.md"
        assert invoke("h2o-chat", "--session", "talk", "--export", file).exit_code == 0
        assert file.read_text().count("**You**") == 6

    def test_another_policy(self, tiny_folder: Path) -> None:
        piped(tiny_folder, ["one", "two"], "--session", "talk")
        refused = piped(tiny_folder, ["three"], "--session", "talk", "--policy", "sink")
        assert refused.exit_code == 1
        assert "another policy" in refused.stderr
        assert "--retell feeds its transcript again" in refused.stderr
        again = piped(tiny_folder, ["three"], "--session", "talk", "--policy", "sink", "--retell")
        assert again.exit_code == 0
        assert "session talk goes on after turn 2: two" in again.stderr
        assert piped(tiny_folder, ["four"], "--session", "talk", "--policy", "sink").exit_code == 0

    @pytest.mark.parametrize(
        ("arguments", "code", "words"),
        [
            (["--session", "../x", "-p", "a"], 2, "cannot name a session"),
            (["--session", "none", "--export", "a.md"], 1, "there is no session none"),
            (["--export", "a.md"], 2, "needs the --session"),
        ],
    )
    def test_wrong_usage(self, tiny_folder: Path, arguments: list[str], code: int, words: str) -> None:
        done = invoke("h2o-chat", "-m", tiny_folder, *arguments)
        assert done.exit_code == code
        assert words in done.stderr

    def test_killed_at_any_moment_it_goes_on_exactly(self, tiny_folder: Path, tmp_path: Path) -> None:
        """SIGKILL at random moments of a scripted session, until it has come to its end."""
        talk = [f"question {number} " + "word " * 30 for number in range(20)]
        command = ["h2o-chat", "-m", tiny_folder, "-n", "24", "--temp", "0", "--window", "64"]
        whole = texts(piped(tiny_folder, talk, "-n", 24, "--window", 64, "--jsonl", "-").stdout)
        transcript = tmp_path / "data" / "h2o-stream" / "sessions" / "talk" / "transcript.jsonl"
        chance, kills = random.Random(7), 0

        def finished() -> list[str]:
            lines = transcript.read_text().splitlines() if transcript.exists() else []
            return [json.loads(line)["text"] for line in lines if line.endswith("}") and '"turn"' in line[:16]]

        while len(finished()) < len(talk):
            done = len(finished())
            with Preloaded(
                [*command, "--session", "talk", "-q"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
            ) as child:
                assert child.stdin is not None
                child.stdin.write("".join(f"{line}\n" for line in talk[done:]))
                child.stdin.flush()
                goal = done + chance.randint(0, 3)
                deadline = time.monotonic() + 60
                while len(finished()) <= goal < len(talk) and time.monotonic() < deadline:
                    time.sleep(0.005)
                if kills < 10:
                    time.sleep(chance.random() * 0.06)
                    child.send_signal(signal.SIGKILL)
                    kills += 1
                else:
                    child.stdin.close()
                child.wait(60)
            said = finished()
            assert said == whole[: len(said)]
        assert kills >= 5


class TestSettings:
    """Flag, environment, file, default: in this order."""

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "config" / "h2o-stream" / "config.toml"
        path.parent.mkdir(parents=True)
        return path

    def shown(self, monkeypatch: pytest.MonkeyPatch, model: Path, *options: str) -> dict[str, tuple[str, str]]:
        done = run_command("h2o-chat", "-m", model, *options, input="/show config\n")
        assert done.returncode == 0, done.stderr
        rows = re.findall(r"^(\w+) +(\S+) +(flag|environment|file|default) *$", done.stderr, re.M)
        return {name: (value, source) for name, value, source in rows}

    def test_the_order(self, monkeypatch: pytest.MonkeyPatch, tiny_folder: Path, file: Path) -> None:
        file.write_text(
            'window = 64\ntop-k = 5\nsinks = 2\nmode = "h2o"\n[h2o-chat]\nplain = true\n[h2o-stream]\nturns = 3\n'
        )
        monkeypatch.setenv("H2O_TOP_K", "6")
        monkeypatch.setenv("H2O_SINKS", "3")
        shown = self.shown(monkeypatch, tiny_folder, "--sinks", "1")
        assert shown["window"] == ("64", "file")
        assert shown["policy"] == ("h2o", "file")
        assert shown["plain"] == ("True", "file")
        assert shown["top_k"] == ("6", "environment")
        assert shown["sinks"] == ("1", "flag")
        assert shown["max_tokens"] == ("512", "default")

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("windou = 3", "windou is no option of h2o-chat"),
            ("turns = 3", "turns is no option of h2o-chat"),
            ("window = ", "config.toml: "),
            ("[h2o-chat]\nturns = 3", "turns is no option"),
        ],
    )
    def test_a_wrong_file_is_named(self, file: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
        file.write_text(text)
        with pytest.raises(SystemExit) as left:
            run.main("h2o-chat", chat.app)
        assert left.value.code == 2
        assert words in capsys.readouterr().err

    def test_a_wrong_value_is_one_of_the_option(self, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        file.write_text('window = "many"')
        monkeypatch.setattr("sys.argv", ["h2o-stream"])
        with pytest.raises(SystemExit) as left:
            run.main("h2o-stream", stream.app)
        assert left.value.code == 2
        assert "--window" in capsys.readouterr().err

    def test_named_prompts(self, tiny_folder: Path) -> None:
        listed = invoke("h2o-chat", "--list-prompts")
        assert listed.exit_code == 0
        assert re.search(r"^storyteller +You are a storyteller", listed.stdout, re.M)
        done = piped(tiny_folder, ["/system"], "--system", "storyteller")
        assert "You are a storyteller. You answer with vivid" in done.stderr


class TestKeys:
    """In a real terminal."""

    def chat(self, model: Path, *options: str, columns: int = 80, lines: int = 24) -> Pty:
        return Pty("h2o-chat", "-m", str(model), "-n", "12", "--temp", "0", *options, columns=columns, lines=lines)

    @pytest.mark.parametrize(("columns", "lines"), [(80, 24), (160, 45), (40, 12)])
    def test_a_chat(self, tiny_folder: Path, tmp_path: Path, columns: int, lines: int) -> None:
        file = tmp_path / "talk.json"
        with self.chat(tiny_folder, columns=columns, lines=lines) as pty:
            pty.until(lambda p: "seen 0" in p.text)
            pty.send("first line\x1b\rsecond line\r")
            pty.until(lambda p: "evicted 0" in p.screen.display[-1] and "seen 0" not in p.text)
            pty.send('"""\rquoted\r\rlines\r"""\r')
            pty.until(lambda p: p.text.count("tokens, ") >= 2 or lines < 24)
            pty.send("\x1b[200~pasted\nblock\n  of three\x1b[201~")
            pty.send("\r")
            time.sleep(1)
            pty.until(lambda p: "seen" in p.screen.display[-1])
            pty.send("/exp\t")
            pty.until(lambda p: "/export" in p.text)
            pty.send(f" {file}\r")
            pty.until(lambda p: "written" in p.text)
            pty.send("\x04")
            assert pty.exit_code() == 0
        said = [message["content"] for message in json.loads(file.read_text())["messages"] if message["role"] == "user"]
        assert said == ["first line\nsecond line", "quoted\n\nlines", "pasted\nblock\n  of three"]

    def test_history_is_kept_and_searched(self, tiny_folder: Path) -> None:
        with self.chat(tiny_folder) as pty:
            pty.until(lambda p: "seen 0" in p.text)
            pty.send("/set seed 1234\r")
            pty.until(lambda p: "seed is 1234" in p.text)
            pty.send("\x04")
            assert pty.exit_code() == 0
        with self.chat(tiny_folder) as pty:
            pty.until(lambda p: "seen 0" in p.text)
            pty.send("\x12seed")
            pty.until(lambda p: "/set seed 1234" in p.text)
            pty.send("\r\r")
            pty.until(lambda p: "seed is 1234" in p.text)

    def test_an_editor(self, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        editor = tmp_path / "editor"
        editor.write_text('#!/bin/sh\nprintf "/set seed 77" > "$1"\n')
        editor.chmod(0o755)
        monkeypatch.setenv("EDITOR", str(editor))
        monkeypatch.setenv("VISUAL", str(editor))
        with self.chat(tiny_folder) as pty:
            pty.until(lambda p: "seen 0" in p.text)
            pty.send("draft\x18\x05")
            pty.until(lambda p: "/set seed 77" in p.text)
            pty.send("\r")
            pty.until(lambda p: "seed is 77" in p.text)

    def test_vim(self, tiny_folder: Path) -> None:
        with self.chat(tiny_folder, "--vim") as pty:
            pty.until(lambda p: "seen 0" in p.text)
            pty.send("/sxt seed 7\x1b")
            time.sleep(0.7)
            pty.send("0fxreA")
            pty.send("7\r")
            pty.until(lambda p: "seed is 77" in p.text)

    def test_ctrl_c_twice_leaves(self, tiny_folder: Path) -> None:
        with self.chat(tiny_folder) as pty:
            pty.until(lambda p: "seen 0" in p.text)
            pty.send("half a line\x03")
            time.sleep(2.2)
            pty.send("\x03")
            time.sleep(0.3)
            pty.send("\x03")
            assert pty.exit_code() == 130

    def test_ctrl_c_stops_a_reply_and_what_was_said_stays(self, tiny_folder: Path) -> None:
        with self.chat(tiny_folder, "-n", "100000", "--window", "64") as pty:
            pty.until(lambda p: "seen 0" in p.text)
            pty.send("hello\r")
            time.sleep(1.5)
            pty.send("\x03")
            pty.until(lambda p: "interrupted" in p.text, 10)
            pty.until(lambda p: "seen" in p.screen.display[-1] and "seen 0" not in p.text)
            pty.send("/why\r")
            pty.until(lambda p: "turn 1" in p.text)

    def test_a_huge_paste(self, tiny_folder: Path) -> None:
        """200 kB, stopped within half a second."""
        with self.chat(tiny_folder, "--window", "64") as pty:
            pty.until(lambda p: "seen 0" in p.text)
            pty.send("\x1b[200~" + "word and another. " * 11_500 + "\x1b[201~\r")
            pty.until(lambda p: "reading" in p.text, 60)
            begun = time.monotonic()
            pty.send("\x03")
            pty.until(lambda p: "interrupted" in p.text, 10)
            assert time.monotonic() - begun < 2, "half a second, and what a busy machine takes"
            pty.until(lambda p: "seen" in p.screen.display[-1])
            assert "reading" not in pty.text, "that line is taken away"

    def test_plain_and_markdown(self, tiny_folder: Path) -> None:
        for options, shown in ((("--plain",), False), ((), True)):
            with self.chat(tiny_folder, *options) as pty:
                pty.until(lambda p: "seen 0" in p.text)
                pty.send("hello\r")
                pty.until(lambda p: "tokens, " in p.text)
                assert ("\x1b[?25l" in pty.output.partition("hello")[2]) or not shown

    @pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"NO_COLOR": "1"}])
    def test_poor_terminals(self, tiny_folder: Path, environment: dict[str, str]) -> None:
        with Pty("h2o-chat", "-m", str(tiny_folder), "-n", "8", environment=environment) as pty:
            pty.until(lambda p: "Ctrl-D leaves" in p.text.replace("\n", ""))
            time.sleep(1)
            pty.send("hello\r")
            pty.until(lambda p: "tokens, " in p.text)
            pty.send("\x04")
            assert pty.exit_code() == 0
            if "NO_COLOR" in environment:
                assert not re.search(r"\x1b\[3[1-7]m", pty.output)


class TestRecordings:
    def test_a_run_is_shown_again_without_the_model(self, tiny_folder: Path, tmp_path: Path) -> None:
        file = tmp_path / "run.rec"
        first = piped(tiny_folder, ["one", "two"], "--record", file)
        done = run_command("h2o-stream", "--replay", file, "--pace", "100")
        assert done.returncode == 0, done.stderr
        assert done.stdout == first.stdout
        assert "] one" in done.stderr
        assert piped(tiny_folder, ["one"], "--record", file).exit_code == 1
        code = (
            "import sys; sys.argv = ['h2o-stream', '--replay', sys.argv[1], '--pace', '100']\n"
            "from h2o_stream.cli.stream import main\n"
            "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules\n"
        )
        subprocess.run([BIN / "python", "-c", code, file], capture_output=True, check=True)

    def test_it_keeps_its_pace(self, tiny_folder: Path, tmp_path: Path) -> None:
        file = tmp_path / "run.rec"
        piped(tiny_folder, ["one"], "--record", file)
        last = json.loads(file.read_text().splitlines()[-1])["at_s"]
        begun = time.monotonic()
        invoke("h2o-stream", "--replay", file, "--pace", last / 0.5 if last else 1)
        assert time.monotonic() - begun >= 0.45

    @pytest.mark.parametrize("text", ["", "{}", "nonsense", '{"type": "asked", "at_s": 0}', '{"type":"turn","at_s":1}'])
    def test_what_is_no_recording(self, tmp_path: Path, text: str) -> None:
        file = tmp_path / "run.rec"
        file.write_text(text + "\n")
        done = invoke("h2o-stream", "--replay", file)
        assert done.exit_code == 1
        assert "recording" in done.stderr

    def test_on_the_screen(self, tiny_folder: Path, tmp_path: Path) -> None:
        file = tmp_path / "run.rec"
        piped(tiny_folder, ["hello there"], "--record", file)
        with Pty("h2o-stream", "--replay", str(file), "--pace", "0.5") as pty:
            pty.until(lambda p: "> hello there" in p.text and "recent" in p.text)
            assert pty.exit_code() == 0


class TestSideBySide:
    @pytest.fixture
    def questions(self, tmp_path: Path) -> Path:
        file = tmp_path / "questions.jsonl"
        file.write_text(json.dumps({"question_id": 1, "category": "test", "turns": ["first " * 60, "then"]}) + "\n")
        return file

    def test_where_they_part(self, tiny_folder: Path, questions: Path, tmp_path: Path) -> None:
        out = tmp_path / "run.jsonl"
        options = ("-m", tiny_folder, "--questions", questions, "-n", 12, "--seed", 3, "--window", 64)
        done = invoke("h2o-stream", *options, "--compare", "full,h2o", "--jsonl", out)
        assert done.exit_code == 0
        assert re.search(r"they part after \d+ characters|both say the same", done.stderr)
        assert re.search(r"full: \d+ tokens seen", done.stderr)
        turns = [record for record in records(out.read_text()) if record["type"] == "turn"]
        assert [turn["policy"] for turn in turns] == ["full", "h2o"] * 2
        for policy in ("full", "h2o"):
            alone = invoke("h2o-stream", *options, "--policy", policy, "--jsonl", "-")
            assert alone.exit_code == 0, alone.stderr
            assert texts(alone.stdout) == [turn["text"] for turn in turns if turn["policy"] == policy]
        same = invoke("h2o-stream", *options, "--compare", "h2o,h2o")
        assert same.stderr.count("both say the same") == 2

    @pytest.mark.parametrize("policies", ["full", "full,best", "full,h2o,sink", ""])
    def test_it_takes_two(self, policies: str) -> None:
        done = invoke("h2o-stream", "--compare", policies)
        assert done.exit_code == 2
        assert "--compare takes two of" in done.stderr

    @pytest.mark.parametrize(("columns", "lines"), [(80, 24), (160, 45)])
    def test_in_two_panes(self, tiny_folder: Path, questions: Path, columns: int, lines: int) -> None:
        with Pty(
            "h2o-stream", "-m", str(tiny_folder), "--questions", str(questions), "-n", "40", "--seed", "3",
            "--window", "64", "--compare", "full,h2o", "--loop", columns=columns, lines=lines,
        ) as pty:  # fmt: skip
            pty.until(lambda p: "≠" in p.text and p.text.count("tok/s") == 2)
            assert pty.screen.display[1].count("╭") == 2
            assert all(len(line.rstrip()) <= columns for line in pty.screen.display)
            pty.send("\x03")
            assert pty.exit_code() == 130


def test_files_are_private(tiny_folder: Path, tmp_path: Path) -> None:
    with Pty("h2o-chat", "-m", str(tiny_folder), "-n", "4") as pty:
        pty.until(lambda p: "seen 0" in p.text)
        pty.send("/exit\r")
        pty.exit_code()
    history = tmp_path / "data" / "h2o-stream" / "history"
    assert history.stat().st_mode & 0o077 == 0
