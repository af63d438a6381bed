"""The commands as used by people and scripts: streams, exit codes."""

import itertools
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from h2o_stream.ui.screen import Screen
from h2o_stream.ui.terminal import PrefillStatus, Terminal, printable
from tests.commands import invoke, records
from tests.fixtures import with_exhaustive
from tests.preloaded import Preloaded
from tests.preloaded import run as run_command
from tests.terminal import Pty

TURN_FIELDS = {
    "type", "turn", "question_id", "prompt_tokens", "new_tokens", "prefill_s", "decode_s", "prefill_tok_s",
    "decode_tok_s", "seen_tokens", "cached_tokens", "evicted_tokens", "cache_bytes", "rss_bytes", "recalled",
    "text", "finish",
}  # fmt: skip


class TestUsage:
    @pytest.mark.parametrize(("typed", "offered"), [
        ("--pol", ["--policy"]), ("--policy s", ["sink", "snapkv"]), ("--quantize i", ["int8", "int4"]),
        ("--system sto", ["storyteller"]), ("--session mon", ["monday"]),
    ])  # fmt: skip
    def test_a_shell_completes(self, typed: str, offered: list[str], tmp_path: Path) -> None:
        session = tmp_path / "h2o-stream" / "sessions" / "monday"
        session.mkdir(parents=True)
        (session / "transcript.jsonl").write_text(
            json.dumps({"type": "session", "model": "m", "policy": "h2o", "window": 256, "system": None, "created": ""})
            + "\n"
        )
        words = f"h2o-chat {typed}"
        asked = {
            "_H2O_CHAT_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
            "XDG_DATA_HOME": str(tmp_path),
        }
        done = run_command("h2o-chat", env=os.environ | asked)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == offered

    def test_lines_of_help_are_filled(self) -> None:
        """Regression: the second paragraph broke where its source does, and again where the terminal ends."""
        page = run_command("h2o-chat", "--help", env=os.environ | {"COLUMNS": "100"}).stdout
        lines = [line.strip() for line in page.partition("╭")[0].splitlines()]
        assert "with --prompt, all of it is a text" in " ".join(lines)
        for line, after in itertools.pairwise(lines):
            assert not line or not after or len(f"{line} {after.split()[0]}") > 97, line


class TestChat:
    def test_the_embedded_model_knows_paris(self) -> None:
        # Without "the name of", rounding decides whether the answer begins with "The" or "L".
        question = "What is the name of the capital of France?\n"
        done = run_command("h2o-chat", "--temp", "0", "-q", "-n", "32", input=question)
        assert done.returncode == 0, done.stderr
        assert "Paris" in done.stdout
        assert done.stdout.count("\n") == 1
        assert done.stderr == ""

    def test_piped_lines_are_turns(self, tiny_folder: Path) -> None:
        talk = ["-m", tiny_folder, "--temp", "0", "-n", "4", "--jsonl", "-", "-q"]
        done = invoke("h2o-chat", *talk, typed="one\n\n  \ntwo\n/exit\nthree\n")
        run, *turns, summary = records(done.stdout)
        assert (run["type"], run["command"], run["policy"], run["window"]) == ("run", "h2o-chat", "h2o", 256)
        assert (summary["type"], summary["turns"]) == ("summary", 2)
        assert [turn["turn"] for turn in turns] == [1, 2]
        assert done.exit_code == 0

    def test_one_prompt_and_out(self, tiny_folder: Path, tmp_path: Path) -> None:
        talk = ["-m", tiny_folder, "--temp", "0", "-n", "4", "--jsonl", "-", "-q"]
        (tmp_path / "words.txt").write_text("hello")
        results = [
            invoke("h2o-chat", *talk, "-p", "hello"),
            invoke("h2o-chat", *talk, "-p", "-", typed="hello"),
            invoke("h2o-chat", *talk, "--prompt-file", tmp_path / "words.txt"),
            invoke("h2o-chat", *talk, "--single-turn", typed="hello\nnot this\n"),
        ]
        texts = [[r["text"] for r in records(done.stdout) if r["type"] == "turn"] for done in results]
        assert texts == [texts[0]] * 4
        assert len(texts[0]) == 1

    def test_named_prompts(self, tiny_folder: Path) -> None:
        talk = ["-m", tiny_folder, "-n", "2", "--jsonl", "-", "-q"]
        done = invoke("h2o-chat", *talk, "--system-file", "storyteller", "--prompt-file", "lighthouse")
        assert done.exit_code == 0
        assert records(done.stdout)[1]["prompt_tokens"] > 80

    @pytest.mark.every(2)
    @pytest.mark.parametrize("engine", ["auto", "eager"])
    def test_replies_follow_a_json_schema(self, engine: str, tiny_folder: Path, tmp_path: Path) -> None:
        talk = ["-m", tiny_folder, "--engine", engine, "-n", "60", "--temp", "2", "--seed", "5", "-q"]
        (tmp_path / "s.json").write_text('{"enum": ["red", "green"]}')
        done = invoke("h2o-chat", *talk, "--json-schema", tmp_path / "s.json", typed="a colour\nanother\n")
        assert done.exit_code == 0, done.stderr
        assert {json.loads(line) for line in done.stdout.splitlines()} <= {"red", "green"}
        (tmp_path / "s.json").write_text('{"type": "strin"}')
        done = invoke("h2o-chat", *talk, "--json-schema", tmp_path / "s.json", "-p", "x")
        assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
        assert "the JSON schema is not supported: Invalid type: strin" in done.stderr

    def test_commands_never_reach_the_model(self, tiny_folder: Path) -> None:
        talk = ["-m", tiny_folder, "--temp", "0", "-n", "3"]
        typed = "/help\nhi\n/stats\n/reset\n/dance\n//slash\n"
        done = invoke("h2o-chat", *talk, typed=typed)
        assert "/dance is not a command" in done.stderr
        assert "forget the conversation" in done.stderr
        assert "Started a new conversation" in done.stderr
        assert "1 turn (1 cut at --max-tokens)" in done.stderr
        assert done.stdout.count("\n") >= 2
        assert "slash" not in done.stderr

    def test_a_long_prompt_shows_progress(self, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(PrefillStatus, "EVERY_S", 0.0)
        talk = ["-m", tiny_folder, "-n", "3", "-p", "-"]
        done = invoke("h2o-chat", *talk, typed="word " * 2000)
        assert re.search(r"reading 1,024 of 2,0\d\d tokens, \d+ s left", done.stderr)
        assert "reading" not in invoke("h2o-chat", *talk, "-q", typed="word " * 2000).stderr


class TestStream:
    def test_records(self, tiny_folder: Path, questions: Path, tmp_path: Path) -> None:
        file = tmp_path / "run.jsonl"
        base = ["-m", tiny_folder, "--questions", questions, "-n", "9", "--window", "56", "--temp", "0"]
        done = invoke("h2o-stream", *base, "--jsonl", file)
        assert done.exit_code == 0
        run, *turns, summary = records(file.read_text())
        assert {"command", "model", "policy", "window", "versions", "hardware", "seed"} <= set(run)
        assert [turn["question_id"] for turn in turns] == [0, 0, 1, 1, 2, 2]
        for turn in turns:
            assert set(turn) >= TURN_FIELDS
            assert turn["cached_tokens"] <= 57
            assert turn["seen_tokens"] == turn["cached_tokens"] + turn["evicted_tokens"]
            assert turn["finish"] in ("stop", "length")
            assert printable(turn["text"]) in done.stdout
        assert summary["type"] == "summary"
        assert summary["turns"] == 6
        assert summary["seen_tokens"] == turns[-1]["seen_tokens"]
        assert "\x1b" not in done.stdout + done.stderr
        assert "6 turns" in done.stderr

    def test_sampling_is_shown_and_recorded(self, tiny_folder: Path, questions: Path) -> None:
        base = ["-m", tiny_folder, "--questions", questions, "-n", "2", "--turns", "1", "--jsonl", "-"]
        done = invoke("h2o-stream", *base, "--temp", "bench", "--repetition-penalty", "1.2")
        run = records(done.stdout)[0]
        assert run["sampling"]["temperature"] == "bench"
        assert (run["sampling"]["repetition_penalty"], run["sampling_sources"]["repetition_penalty"]) == (1.2, "given")
        assert (run["sampling"]["top_k"], run["sampling_sources"]["top_k"]) == (0, "default")
        assert "temp bench · top-p 0.95 · penalty 1.2" in done.stderr

    def test_turns_and_loop(self, tiny_folder: Path, questions: Path) -> None:
        base = ["-m", tiny_folder, "--questions", questions, "-n", "2", "--jsonl", "-", "-q"]
        asked = {}
        for name, more in {"all": [], "three": ["--turns", "3"], "loop": ["--turns", "8", "--loop"]}.items():
            done = invoke("h2o-stream", *base, *more)
            assert done.exit_code == 0
            asked[name] = [record["question_id"] for record in records(done.stdout)[1:-1]]
        assert asked == {"all": [0, 0, 1, 1, 2, 2], "three": [0, 0, 1], "loop": [0, 0, 1, 1, 2, 2, 0, 0]}

    def test_full_continues_beyond_its_context_or_ends_there(self, tiny_folder: Path, questions: Path) -> None:
        base = ["-m", tiny_folder, "--questions", questions, "-n", "90", "--temp", "0", "--policy", "full"]
        base += ["--jsonl", "-"]
        goes_on = invoke("h2o-stream", *base, "--turns", "4")
        turns = records(goes_on.stdout)[1:-1]
        assert [turn["beyond_context"] for turn in turns][-1]
        assert turns[-1]["evicted_tokens"] == 0
        assert "beyond the model's context" in goes_on.stderr
        ends = invoke("h2o-stream", *base, "--turns", "4", "--at-context", "stop")
        assert ends.exit_code == 0
        assert records(ends.stdout)[-2]["finish"] == "context"
        assert records(ends.stdout)[-2]["seen_tokens"] <= 400
        assert "--at-context continue" in ends.stderr

    def test_out_of_memory_ends_with_the_table(self, tiny_folder: Path, questions: Path, monkeypatch: Any) -> None:
        from h2o_stream.engine.engine import Engine

        feed = Engine.forward

        def fail(self: Engine, tokens: list[int], *step: Any) -> Any:
            if self.cache.seen_tokens > 120:
                from h2o_stream.errors import OutOfMemoryError

                raise OutOfMemoryError("out of memory after many tokens; try --window")
            return feed(self, tokens, *step)

        monkeypatch.setattr(Engine, "forward", fail)
        done = invoke("h2o-stream", "-m", tiny_folder, "--questions", questions, "-n", "200", "--jsonl", "-")
        assert done.exit_code == 1
        assert records(done.stdout)[-2]["finish"] == "oom"
        assert "tokens seen" in done.stderr
        assert "try --window" in done.stderr

    def test_a_custom_prompt(self, tiny_folder: Path, tmp_path: Path) -> None:
        file, empty = tmp_path / "story.txt", tmp_path / "empty.txt"
        file.write_text("Once upon a time " * 60)
        empty.write_text(" \n")
        base = ["-m", tiny_folder, "--heavy-ratio", "0.1", "--recent-ratio", "0.1", "-n", "20", "--jsonl", "-"]
        done = invoke("h2o-stream", "--prompt-file", file, *base)
        assert done.exit_code == 0, done.stderr
        _, turn, _ = records(done.stdout)
        assert turn["question_id"] == "story"
        assert turn["prompt_tokens"] > 240
        assert turn["cached_tokens"] < 0.25 * turn["prompt_tokens"]
        nothing = invoke("h2o-stream", "--prompt-file", empty, *base)
        assert nothing.exit_code == 1
        assert "there is nothing in it" in nothing.stderr

    def test_a_closed_pipe_ends_it_quietly(self, tiny_folder: Path, questions: Path) -> None:
        command = ["h2o-stream", "-m", tiny_folder, "--questions", questions, "--loop", "-n", "20", "-q"]
        with Preloaded(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            child.stdout.read(1)
            child.stdout.close()
            assert child.stderr.read() == b""
            assert child.wait(120) == 1

    def test_a_full_disk(self, tiny_folder: Path, questions: Path) -> None:
        if not Path("/dev/full").exists():
            pytest.skip("no /dev/full here")
        done = invoke("h2o-stream", "-m", tiny_folder, "--questions", questions, "--jsonl", "/dev/full", "-q")
        assert done.exit_code == 1
        assert "--jsonl /dev/full: No space left" in done.stderr


class TestValuesInAnyCase:
    def test_policies_dtypes_and_choices(self, tiny_folder: Path) -> None:
        done = invoke(
            "h2o-chat", "-m", tiny_folder, "-p", "hi", "-n", 2, "--mode", "FULL", "--dtype", "Float32",
            "--quantize", "NONE", "--recall", "OFF", "--memory", "OFF", "--positions", "Absolute", "--jsonl", "-",
        )  # fmt: skip
        assert done.exit_code == 0, done.stderr
        run = records(done.stdout)[0]
        assert (run["policy"], run["dtype"], run["recall"]) == ("full", "float32", "off")


def test_named_prompts_are_listed_by_both_commands() -> None:
    chat, stream = (invoke(command, "--list-prompts") for command in ("h2o-chat", "h2o-stream"))
    assert (chat.exit_code, stream.exit_code) == (0, 0)
    assert "lighthouse" in stream.stdout
    assert stream.stdout == chat.stdout


class TestTerminal:
    @pytest.mark.parametrize(("columns", "lines"), with_exhaustive([(80, 24)], [(140, 40)]))
    def test_the_live_screen(self, tiny_folder: Path, questions: Path, columns: int, lines: int) -> None:
        base = ["-m", str(tiny_folder), "--questions", str(questions), "--turns", "4", "-n", "60", "--window", "64"]
        base += ["--seed", "3"]  # no reply of these ends by itself
        with Pty("h2o-stream", *base, columns=columns, lines=lines) as terminal:
            terminal.until(lambda t: "turn 4/4" in t.text and "empty" in t.text)
            frame = terminal.screen.display
            assert frame[0].startswith("╭")
            assert frame[0].rstrip().endswith("╮")
            assert "window 64" in frame[0]
            assert frame[-1].startswith("╰"), "it fills the terminal and no more"
            assert re.search(r"│ █+▓*▒+░+·* │", terminal.text)
            assert re.search(r"█ sinks \d+ +▓ pinned \d+ +▒ heavy \d+ +░ recent \d+ +· empty \d+", terminal.text)
            assert re.search(r"seen \d+ +kept 64 of 64 +evicted \d+", terminal.text)
            assert "tok/s │" in terminal.text, "speed over time"
            assert re.search(r"iB │[ ┊]*[▁▂▃▄▅▆▇█]", terminal.text), "memory over time"
            assert "prefill" in terminal.text
            assert "decode" in terminal.text
            assert all(line.rstrip()[-1] in "│╮╯" for line in frame), "nothing is wrapped or cut"
            assert terminal.exit_code() == 0
        assert "4 turns" in terminal.text
        assert terminal.output.index("\x1b[?1049h") < terminal.output.index("\x1b[?1049l"), "it is restored"
        stays = terminal.output.partition("\x1b[?1049l")[2]
        assert stays.count("[length]") == 4, "what was said stays"
        assert stays.index("[length]") < stays.index("prompt tokens"), "and the table follows"

    def test_the_screen_shows_markup_as_text(self, capsys: pytest.CaptureFixture[str]) -> None:
        terminal = Terminal()
        screen = Screen(terminal, "a [bold]title[/]", None)
        screen.start_turn("turn [1/2]", "[red]ask[/red] :smile:\n\x1b[2J")
        width = 60
        with terminal.console.capture() as captured:
            terminal.console.print(screen, width=width, height=12)
        for words in ("a [bold]title[/]", "turn [1/2]", "> [red]ask[/red] :smile:", "│ [2J"):
            assert words in captured.get()
        assert {len(line) for line in captured.get().splitlines()} == {width}

    def test_ctrl_c_ends_a_replay_with_its_table(self, tiny_folder: Path, questions: Path, tmp_path: Path) -> None:
        base = ["-m", str(tiny_folder), "--questions", str(questions), "--loop", "-n", "100000", "--window", "64"]
        with Pty("h2o-stream", *base, "--jsonl", str(tmp_path / "run.jsonl")) as terminal:
            terminal.until(lambda t: "evicted" in t.text)
            terminal.send("\x03")
            assert terminal.exit_code() == 130
        assert "1 interrupted" in terminal.text
        assert records((tmp_path / "run.jsonl").read_text())[-1]["finish"]["interrupted"] == 1

    def test_no_color_on_request(self, tiny_folder: Path, questions: Path) -> None:
        base = ["-m", str(tiny_folder), "--questions", str(questions), "--turns", "1", "-n", "20", "--color", "off"]
        with Pty("h2o-stream", *base) as terminal:
            assert terminal.exit_code() == 0
        assert not re.search(r"\x1b\[[0-9;]*m", terminal.output.replace("\x1b[0m", ""))
