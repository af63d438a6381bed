"""The chat as used by scripts: commands, sessions."""

import json
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from h2o_stream.ui import chat
from tests.commands import invoke, piped, records, texts
from tests.fixtures import with_exhaustive
from tests.preloaded import Preloaded
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("own_home")


class TestCommands:
    def test_help_names_every_command(self, tiny_folder: Path) -> None:
        done = piped(tiny_folder, ["/help"])
        for name in ["reset", "system", "set", "show", "stats", "save", "load", "regen", "undo", "file", "exit"]:
            assert f"/{name}" in done.stderr
        assert not done.stdout

    def test_what_is_none_is_an_error_and_never_said(self, tiny_folder: Path, tmp_path: Path) -> None:
        out = tmp_path / "run.jsonl"
        long = [f"/{name} {'9' * 5000}" for name in ("undo", "why", "think", "recall", "window", "copy", "edit")]
        lines = ["/hepl", "/undo x", "/pin", *long, "/exit now", "/exit", "too late"]
        done = piped(tiny_folder, lines, "--jsonl", out)
        assert done.exit_code == 0
        assert "/hepl is not a command; did you mean /help?" in done.stderr
        assert "/undo takes a number, not 'x'" in done.stderr
        assert "/pin needs TEXT" in done.stderr
        assert "/exit takes no argument" in done.stderr
        assert [record["type"] for record in records(out.read_text())] == ["run", "summary"]

    def test_ctrl_c_that_comes_after_the_end_of_a_reply_ends_nothing(
        self, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Regression: it ended the chat while the line about the turn was written."""
        monkeypatch.setattr(chat, "turn_line", lambda turn: signal.raise_signal(signal.SIGINT) or f"turn {turn.number}")
        done = piped(tiny_folder, ["one", "two"])
        assert (done.exit_code, done.stderr.count("turn 2")) == (0, 1)

    def test_paths_and_double_slashes_are_messages(self, tiny_folder: Path, tmp_path: Path) -> None:
        out = tmp_path / "run.jsonl"
        piped(tiny_folder, ["/usr/bin is a folder", "//help me", "/ is the root"], "--jsonl", out)
        assert [record["type"] for record in records(out.read_text())].count("turn") == 3

    def test_undo_regen_recall_and_export(self, tiny_folder: Path, tmp_path: Path) -> None:
        file = tmp_path / "talk.json"
        lines = ["one", "two", "/undo", "three", "/retry", "/recall 1", "/recall 9", f"/export {file}", "/undo 9"]
        done = piped(tiny_folder, lines)
        assert "undone: two" in done.stderr
        assert "turn 1 was read again: one" in done.stderr
        assert "there is no turn 9" in done.stderr
        assert "cannot undo 9 turns, there are 3" in done.stderr
        said = [message["content"] for message in json.loads(file.read_text())["messages"] if message["role"] == "user"]
        assert said == ["one", "three", "one"]
        first, _, third, again = done.stdout.splitlines()
        assert third == again, "greedy"
        assert first != third

    def test_pins_are_refused_when_the_context_is_too_small_for_them(self, tiny_folder: Path, tmp_path: Path) -> None:
        lines = ["/pin The code is 4711.", "/pins", f"/pin {'word ' * 400}", "/pins", f"/pin {'word ' * 20}"]
        done = piped(tiny_folder, lines, "--window", 64, "-s", "Hi.", "--jsonl", tmp_path / "run")
        assert done.stderr.count("1: The code is 4711.") == 2
        assert "positions that the model was trained for" in done.stderr
        assert "pinned; window 64 + " in done.stderr
        changes = [record for record in records((tmp_path / "run").read_text()) if record["type"] == "change"]
        assert [change["window"] > 64 for change in changes] == [True] * done.stderr.count("pinned; window 64 + ")
        assert done.exit_code == 0

    def test_why(self, tiny_folder: Path) -> None:
        done = piped(
            tiny_folder,
            ["/why", "/undo", "/regen", "/edit", "hello there", "word " * 80, "/why", "/why 1", "/why 9"],
            "--window",
            64,
        )
        assert done.stderr.count("nothing was said yet") == 4
        assert len(re.findall(r"turn 1 · \d+% kept", done.stderr)) == 2
        assert "of the heads of layer 1" in done.stderr
        assert "there is no layer 9, the model has layers 0 to 1" in done.stderr
        assert "…" in done.stderr

    def test_settings(self, tiny_folder: Path) -> None:
        lines = [
            "/set max_tokens 3", "hello", "/set max_tokens many", "/set color red", "/set top_p 7", "/show",
            "/set temp",
        ]  # fmt: skip
        done = piped(tiny_folder, lines)
        assert "+ 3 tokens" in done.stderr
        assert "max_tokens takes a number, not 'many'" in done.stderr
        assert "color cannot be set; /set takes one of temperature" in done.stderr
        assert "--top-p must be above 0" in done.stderr
        assert re.search(r"max_tokens +3", done.stderr)
        assert re.search(r"top_p +0.95 +default", done.stderr)
        assert "/set temperature needs a value" in done.stderr

    def test_another_system_prompt(self, tiny_folder: Path) -> None:
        done = piped(tiny_folder, ["/system", "hello", "/system Be kind.", "/system", "hello"], "-s", "Be brief.")
        assert "Be brief.\n" in done.stderr
        assert "Started a new conversation" in done.stderr
        assert "\nBe kind.\n" in done.stderr

    def test_files(self, tiny_folder: Path, tmp_path: Path) -> None:
        (tmp_path / "note.txt").write_text("What the note says.")
        (tmp_path / "bad.txt").write_bytes(b"\xff\xfd")
        (tmp_path / "empty.txt").write_text(" ")
        out = tmp_path / "talk.md"
        lines = [f"/file {tmp_path}/{name}" for name in ("note.txt What is it?", "bad.txt", "empty.txt", "none.txt")]
        done = piped(tiny_folder, [*lines, f"/export {out}", f"/export {out}", "/export talk.pdf"])
        assert "note.txt:\n\nWhat the note says.\n\nWhat is it?" in out.read_text()
        assert "not UTF-8 at byte 0" in done.stderr
        assert "the file is empty" in done.stderr
        assert "No such file" in done.stderr
        assert "File exists" in done.stderr
        assert "must end in .md or .json" in done.stderr

    def test_names_of_files_may_have_spaces(self, tiny_folder: Path, tmp_path: Path) -> None:
        out = tmp_path / "talk.md"
        for name in ("my notes.txt", "my", "it's.txt"):
            (tmp_path / name).write_text(f"This is {name}.")
        lines = [
            f"/file {tmp_path}/my notes.txt", f"/file {tmp_path}/my notes.txt  What is it?",
            f"/file '{tmp_path}/my' notes.txt?", f'/file "{tmp_path}/my notes.txt" Why?',
            f"/file {tmp_path}/my note", f"/file {tmp_path}/it's.txt or it's not", '/file "no such file" What?',
            "/file no such file", "/file ~nobody-at-all/x", "/file a\0b", f"/file {'x' * 5000} y",
            f"/export {out}",
        ]  # fmt: skip
        done = piped(tiny_folder, lines)
        said = re.findall(r"\*\*You\*\*\n\n(.*?)\n\n\*\*Model", out.read_text(), re.DOTALL)
        assert [text.replace("\n\n", "|") for text in said] == [
            "my notes.txt:|This is my notes.txt.", "my notes.txt:|This is my notes.txt.|What is it?",
            "my:|This is my.|notes.txt?", "my notes.txt:|This is my notes.txt.|Why?", "my:|This is my.|note",
            "it's.txt:|This is it's.txt.|or it's not",
        ]  # fmt: skip
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
            "one", "/save first", "two", "/fork second", "three", "/load first", "/undo 2", "/sessions", "/load no/t",
        ]  # fmt: skip
        done = piped(tiny_folder, lines)
        assert "session first resumed after turn 1: one" in done.stderr
        assert "cannot undo 2 turns, there are 1" in done.stderr
        assert re.search(r"second +3 ", done.stderr)
        assert "cannot name a session" in done.stderr
        assert "second" in invoke("h2o-chat", "--sessions").stdout


class TestSessions:
    def test_kept_options(self, tiny_folder: Path, own_home: Path) -> None:
        """Regression: a stop string with a space was two of them after /load, and what was damaged was a TypeError."""
        piped(tiny_folder, ["one"], "--session", "talk", "--stop", "a b", "--stop", "c")
        assert "('a b', 'c')" in piped(tiny_folder, ["/load talk", "/show"]).stderr
        file = own_home / "talk" / "settings.json"
        for name, value in (("top_k", "x"), ("stop", "a"), ("decay", [1]), ("think", 5), ("recall", []), ("chunk", {})):
            file.write_text(json.dumps({name: value}))
            done = piped(tiny_folder, ["two"], "--session", "talk")
            assert done.exit_code == 2
            assert f"session talk: --{name.replace('_', '-')} is {value!r}; " in done.stderr
            assert "no one" not in piped(tiny_folder, ["/load talk", "/show"]).stderr
        file.write_text(json.dumps({"think": "loudly"}))
        assert "--think takes" in piped(tiny_folder, ["/load talk"]).stderr

    def test_another_policy(self, tiny_folder: Path) -> None:
        piped(tiny_folder, ["one", "two"], "--session", "talk")
        refused = piped(tiny_folder, ["three"], "--session", "talk", "--policy", "sink")
        assert refused.exit_code == 1
        assert "another policy" in refused.stderr
        assert "--retell feeds its transcript again" in refused.stderr
        again = piped(tiny_folder, ["three"], "--session", "talk", "--policy", "sink", "--retell")
        assert again.exit_code == 0
        assert "session talk resumed after turn 2: two" in again.stderr
        assert piped(tiny_folder, ["four"], "--session", "talk", "--policy", "sink").exit_code == 0

    @pytest.mark.parametrize("turns", with_exhaustive([6], [20]))
    def test_killed_at_any_moment_it_continues_exactly(self, tiny_folder: Path, own_home: Path, turns: int) -> None:
        """SIGKILL at random moments of a scripted session until it is complete."""
        talk = [f"question {number} " + "word " * 30 for number in range(turns)]
        command = ["h2o-chat", "-m", tiny_folder, "-n", "24", "--temp", "0", "--window", "64"]
        uninterrupted = piped(tiny_folder, talk, "-n", 24, "--window", 64, "--jsonl", "-")
        whole = texts(uninterrupted.stdout)
        assert len(whole) == turns, uninterrupted.output
        transcript = own_home / "talk" / "transcript.jsonl"
        chance, kills = random.Random(7), 0

        def finished() -> list[str]:
            lines = transcript.read_text().splitlines() if transcript.exists() else []
            return [json.loads(line)["text"] for line in lines if line.endswith("}") and '"turn"' in line[:16]]

        while len(finished()) < len(talk):
            done = len(finished())
            with Preloaded(
                [*command, "--session", "talk", "-q"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
            ) as child:
                # Two lines each time, so that half as many processes as turns are killed however fast they answer.
                child.stdin.write("".join(f"{line}\n" for line in talk[done : done + 2]))
                child.stdin.flush()
                goal = done + chance.randint(0, 1)
                if goal < len(talk):
                    wait_for(lambda goal=goal: len(finished()) > goal)
                if kills < turns // 2:
                    time.sleep(chance.random() * 0.06)
                    child.send_signal(signal.SIGKILL)
                    kills += 1
                else:
                    child.stdin.close()
                child.wait(60)
            said = finished()
            assert said == whole[: len(said)]
        assert kills == turns // 2
