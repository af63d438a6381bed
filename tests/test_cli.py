"""The commands as a person or a script meets them: streams, exit codes, a real terminal."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from h2o_stream.cli import chat, compare, stream
from h2o_stream.ui.screen import Screen
from h2o_stream.ui.terminal import Reading, Terminal, printable
from tests.preloaded import Preloaded, run
from tests.terminal import BIN, Pty
from tests.tolerance import LIKELIHOOD

APPS = {"h2o-chat": chat.app, "h2o-stream": stream.app, "h2o-compare": compare.app}
TURN_FIELDS = {
    "type", "turn", "question_id", "prompt_tokens", "new_tokens", "prefill_s", "decode_s", "prefill_tok_s",
    "decode_tok_s", "seen_tokens", "cached_tokens", "evicted_tokens", "cache_bytes", "rss_bytes", "text", "finish",
}  # fmt: skip


def invoke(command: str, *arguments: object, typed: str | None = None) -> Any:
    return CliRunner().invoke(APPS[command], [str(argument) for argument in arguments], input=typed)


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    lines = [{"question_id": n, "category": "test", "turns": ["first " * 30, "then"]} for n in range(3)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


class TestUsage:
    @pytest.mark.parametrize("command", list(APPS))
    def test_help_and_version_import_no_torch(self, command: str) -> None:
        code = (
            "import sys\n"
            f"from h2o_stream.cli.{command.removeprefix('h2o-')} import main\n"
            "for option in sys.argv[1:]:\n"
            f"    sys.argv = [{command!r}, option]\n"
            "    try:\n        main()\n"
            "    except SystemExit as left:\n        assert not left.code\n"
            "    print('END')\n"
            "    print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules], file=sys.stderr)\n"
        )
        options = ("--help", "-h") + (("--version",) if command != "h2o-compare" else ())
        done = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True, check=True)
        assert done.stderr.splitlines() == ["[]"] * len(options)
        shown = done.stdout.split("END\n")[:-1]
        assert len(shown) == len(options)
        assert all("h2o" in text or "Usage" in text for text in shown)

    @pytest.mark.parametrize(
        ("typed", "offered"),
        [
            ("--pol", ["--policy"]),
            ("--policy s", ["sink"]),
            ("--quantize i", ["int8", "int4"]),
            ("--system sto", ["storyteller"]),
            ("--session mon", ["monday"]),
        ],
    )
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
        done = run("h2o-chat", env=os.environ | asked)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == offered

    @pytest.mark.parametrize(
        ("command", "arguments", "words"),
        [
            ("h2o-chat", ["--window", "0"], "--window must be at least 1"),
            ("h2o-stream", ["--prompt-file", "README.md", "--questions", "x"], "leave one of them out"),
            ("h2o-compare", ["throughput", "--text", "x", "--shapes", "512"], "--shapes takes"),
            ("h2o-compare", ["throughput", "--text", "x", "--shapes", "0+3"], "--shapes takes"),
            ("h2o-compare", ["throughput", "--text", "x", "--cache-budget", "2 pages"], "--cache-budget takes"),
            ("h2o-compare", ["throughput", "--text", "x", "--ratio", "0"], "window"),
            ("h2o-chat", ["--policy", "best"], "--policy takes one of"),
            ("h2o-chat", ["--heavy", "300"], "lower --heavy"),
            ("h2o-chat", ["--temp", "-1"], "--temp must be"),
            ("h2o-chat", ["--rolling", "--positions", "gap"], "--rolling means"),
            ("h2o-chat", ["--no-rolling", "--positions", "gap"], "--no-rolling means"),
            ("h2o-chat", ["-s", "a", "--system-file", "b"], "both given"),
            ("h2o-chat", ["-p", "a", "--prompt-file", "b"], "both given"),
            ("h2o-chat", ["-p", " "], "the prompt is empty"),
            ("h2o-chat", ["--dtype", "int3"], "--dtype takes one of"),
            ("h2o-compare", ["nll", "--text", ","], "--text is empty"),
            ("h2o-compare", ["nll", "--text", "x", "--policies", "a"], "--policies takes"),
            ("h2o-compare", ["nll", "--text", "x", "--windows", "a"], "--windows takes"),
            ("h2o-compare", ["nll", "--text", "x", "--policies", "random", "--seeds", "-1"], "--seeds takes"),
            ("h2o-compare", ["heavy-hitters", "--text", "x", "--policies", "full"], "none that evicts"),
            ("h2o-compare", ["heavy-hitters", "--text", "x", "--policies", "lru"], "--policies takes"),
            ("h2o-stream", ["--kv-bits", "3"], "--kv-bits takes one of 16, 8, 4, 2"),
            ("h2o-stream", ["--policy", "full", "--kv-bits", "4"], "needs another --policy"),
            ("h2o-stream", ["--heavy-ratio", "0.1"], "--recent-ratio must be above 0"),
            ("h2o-stream", ["--heavy-ratio", "2", "--recent-ratio", "0.1"], "--heavy-ratio must be between 0 and 1"),
            ("h2o-stream", ["--recent-ratio", "0.1", "--window", "64"], "leave out --window"),
            ("h2o-stream", ["--frobnicate"], "No such option"),
            ("h2o-stream", ["--turns", "0"], "--turns"),
            ("h2o-stream", ["--window", "many"], "--window"),
            ("h2o-compare", ["nll"], "--text"),
            ("h2o-compare", ["recall", "--text", "x", "--distances", "far"], "--distances takes"),
            ("h2o-compare", ["summarize", "--requests", "x", "--chunk", "8"], "use --prefill chunked"),
            ("h2o-chat", ["--budgets", "fair"], "--budgets"),
            ("h2o-chat", ["--long-term", "-1"], "--long-term must be 0 or above"),
        ],
    )
    def test_wrong_usage_is_2(self, command: str, arguments: list[str], words: str) -> None:
        done = invoke(command, *arguments)
        assert done.exit_code == 2
        assert words in done.stderr
        assert not done.stdout
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize(
        ("command", "arguments", "words"),
        [
            ("h2o-chat", ["-m", "./nowhere", "-p", "x"], "does not exist"),
            ("h2o-chat", ["-m", "org/none", "--offline", "-p", "x"], "offline"),
            ("h2o-chat", ["-m", "./a\n\x1b[31mb", "-p", "x"], "./a [31mb does not exist"),
            ("h2o-chat", ["--system-file", "/no/file"], "--system-file /no/file: No such file"),
            ("h2o-chat", ["--prompt-file", "/no/file"], "--prompt-file /no/file: No such file"),
            ("h2o-chat", ["--jsonl", "/no/folder/file", "-p", "x"], "--jsonl /no/folder/file: No such file"),
            ("h2o-stream", ["--questions", "/no/file"], "/no/file: No such file"),
            ("h2o-compare", ["nll", "--text", "/no/file", "-m", "./nowhere"], "does not exist"),
            ("h2o-compare", ["summarize", "--requests", "/no/file"], "/no/file: No such file"),
        ],
    )
    def test_a_failure_is_1_with_one_line(self, command: str, arguments: list[str], words: str) -> None:
        done = invoke(command, *arguments, "-q")
        assert done.exit_code == 1
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
        assert done.stderr.startswith(f"{command}: ")
        assert not done.stdout

    def test_a_traceback_comes_with_debug_only(self, tiny_folder: Path) -> None:
        wrong = ["-m", tiny_folder, "--window", "20", "-p", "x", "-q"]
        assert "Traceback" not in invoke("h2o-chat", *wrong).stderr
        assert "Traceback" in invoke("h2o-chat", *wrong, "--debug").stderr


class TestChat:
    def test_the_embedded_model_knows_paris(self) -> None:
        done = subprocess.run(
            [BIN / "h2o-chat", "--temp", "0", "-q", "-n", "32"],
            input="What is the capital of France?\n",
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
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
            invoke("h2o-chat", *talk, "-p", "hello", typed="not read\n"),
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

    def test_commands_never_reach_the_model(self, tiny_folder: Path) -> None:
        talk = ["-m", tiny_folder, "--temp", "0", "-n", "3"]
        typed = "/help\nhi\n/stats\n/reset\n/dance\n//slash\n"
        done = invoke("h2o-chat", *talk, typed=typed)
        assert "/dance is not a command" in done.stderr
        assert "forget the conversation" in done.stderr
        assert "The conversation starts anew" in done.stderr
        assert "turns (length 1)" in done.stderr
        assert done.stdout.count("\n") >= 2
        assert "slash" not in done.stderr

    def test_a_long_prompt_shows_progress(self, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Reading, "EVERY_S", 0.0)
        talk = ["-m", tiny_folder, "-n", "3", "-p", "-"]
        done = invoke("h2o-chat", *talk, typed="word " * 2000)
        assert re.search(r"reading 1,024 of 2,0\d\d tokens", done.stderr)
        assert "reading" not in invoke("h2o-chat", *talk, "-q", typed="word " * 2000).stderr

    def test_the_same_seed_says_the_same(self, tiny_folder: Path) -> None:
        talk = ["-m", tiny_folder, "--seed", "5", "-n", "12", "-p", "hello", "-q"]
        assert invoke("h2o-chat", *talk).stdout == invoke("h2o-chat", *talk).stdout


class TestStream:
    def test_records(self, tiny_folder: Path, questions: Path, tmp_path: Path) -> None:
        file = tmp_path / "run.jsonl"
        base = ["-m", tiny_folder, "--questions", questions, "-n", "9", "--window", "48", "--temp", "0"]
        done = invoke("h2o-stream", *base, "--jsonl", file)
        assert done.exit_code == 0
        run, *turns, summary = records(file.read_text())
        assert {"command", "model", "policy", "window", "versions", "hardware", "seed"} <= set(run)
        assert [turn["question_id"] for turn in turns] == [0, 0, 1, 1, 2, 2]
        for turn in turns:
            assert set(turn) >= TURN_FIELDS
            assert turn["cached_tokens"] <= 49
            assert turn["seen_tokens"] == turn["cached_tokens"] + turn["evicted_tokens"]
            assert turn["finish"] in ("stop", "length")
            assert printable(turn["text"]) in done.stdout
        assert summary["type"] == "summary"
        assert summary["turns"] == 6
        assert summary["seen_tokens"] == turns[-1]["seen_tokens"]
        assert "\x1b" not in done.stdout + done.stderr
        assert "6 turns" in done.stderr

    def test_turns_and_loop(self, tiny_folder: Path, questions: Path) -> None:
        base = ["-m", tiny_folder, "--questions", questions, "-n", "2", "--jsonl", "-", "-q"]
        asked = {}
        for name, more in {"all": [], "three": ["--turns", "3"], "loop": ["--turns", "8", "--loop"]}.items():
            done = invoke("h2o-stream", *base, *more)
            assert done.exit_code == 0
            asked[name] = [record["question_id"] for record in records(done.stdout)[1:-1]]
        assert asked == {"all": [0, 0, 1, 1, 2, 2], "three": [0, 0, 1], "loop": [0, 0, 1, 1, 2, 2, 0, 0]}

    def test_full_goes_on_beyond_its_context_or_ends_there(self, tiny_folder: Path, questions: Path) -> None:
        base = ["-m", tiny_folder, "--questions", questions, "-n", "90", "--policy", "full", "--jsonl", "-"]
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

    def test_out_of_memory_ends_with_the_table(
        self, tiny_folder: Path, questions: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from h2o_stream.engine.engine import Engine

        feed = Engine._feed

        def fail(self: Engine, tokens: list[int]) -> None:
            if self.cache.seen_tokens > 120:
                from h2o_stream.errors import OutOfMemoryError

                raise OutOfMemoryError("out of memory after many tokens; try --window")
            feed(self, tokens)

        monkeypatch.setattr(Engine, "_feed", fail)
        done = invoke("h2o-stream", "-m", tiny_folder, "--questions", questions, "-n", "200", "--jsonl", "-")
        assert done.exit_code == 1
        assert records(done.stdout)[-2]["finish"] == "oom"
        assert "tokens seen" in done.stderr
        assert "try --window" in done.stderr

    def test_a_prompt_of_ones_own(self, tiny_folder: Path, tmp_path: Path) -> None:
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


class TestCompare:
    def test_nll(self, tiny_folder: Path, tmp_path: Path) -> None:
        text = tmp_path / "text.txt"
        text.write_text("The quick brown fox jumps over the lazy dog, again and again. " * 40)
        base = ["nll", "-m", tiny_folder, "--dtype", "float32", "--text", text, "--tokens", "200", "--jsonl", "-"]
        done = invoke("h2o-compare", *base, "--policies", "full,h2o,recent", "--windows", "16,240", "--chunk", "8")
        assert done.exit_code == 0
        run, *results = records(done.stdout)
        assert run["type"] == "run"
        assert [(r["policy"], r["window"]) for r in results] == [
            ("full", None), ("h2o", 16), ("h2o", 240), ("recent", 16), ("recent", 240),
        ]  # fmt: skip
        assert {r["tokens"] for r in results} == {200}
        full = results[0]["nll"]
        for result in results:
            assert result["nll"] == pytest.approx(full, rel=LIKELIHOOD) or result["window"] == 16
            assert result["nll_last_half"] > 0
        assert results[1]["nll"] != pytest.approx(full, rel=3 * LIKELIHOOD)
        assert "nats per token" in done.stderr

    def test_nll_in_a_folder_goes_on_where_it_was(self, tiny_folder: Path, tmp_path: Path) -> None:
        text, out = tmp_path / "text.txt", tmp_path / "out"
        text.write_text("The quick brown fox jumps over the lazy dog, again and again. " * 40)
        base = ["nll", "-m", tiny_folder, "--text", text, "--tokens", "200", "--jsonl", "-", "--out", out]
        base += ["--windows", "16", "--chunk", "8", "--seeds", "0,5"]
        first = records(invoke("h2o-compare", *base, "--policies", "full,sink").stdout)[1:]
        done = invoke("h2o-compare", *base, "--policies", "random,full,sink,h2o")
        assert done.exit_code == 0, done.stderr
        results = records(done.stdout)[1:]
        assert [(r["policy"], r["seed"]) for r in results] == [
            ("full", 0), ("random", 0), ("random", 5), ("sink", 0), ("h2o", 0),
        ]  # fmt: skip
        assert [results[0], results[3]] == first, "taken from the folder, its speed too"
        assert results[1]["nll"] != results[2]["nll"]
        assert results[0]["to_full"] is None
        for result in results[1:]:
            difference = result["to_full"]
            assert difference["mean"] == pytest.approx(result["nll"] - results[0]["nll"])
            assert difference["low"] < difference["mean"] < difference["high"]
        assert len(list((out / "parts").iterdir())) == 5
        assert "text, 200 tokens" in (out / "nll.md").read_text()
        assert "| random #5 | 16 | " in (out / "nll.md").read_text()
        assert "…" not in done.stderr, "no figure is cut"
        assert (out / "nll-text.png").read_bytes().startswith(b"\x89PNG")

    def test_a_damaged_part_is_measured_again(self, tiny_folder: Path, tmp_path: Path) -> None:
        text, out = tmp_path / "text.txt", tmp_path / "out"
        text.write_text("word " * 100)
        base = ["nll", "-m", tiny_folder, "--text", text, "--policies", "sink", "--windows", "16", "--out", out, "-q"]
        assert invoke("h2o-compare", *base).exit_code == 0
        (part,) = (out / "parts").iterdir()
        part.write_bytes(b"nonsense")
        done = invoke("h2o-compare", *base, "--jsonl", "-")
        assert done.exit_code == 0
        assert records(done.stdout)[1]["nll"] > 0

    def test_full_stays_inside_the_context(self, tiny_folder: Path, tmp_path: Path) -> None:
        text = tmp_path / "text.txt"
        text.write_text("word " * 600)
        base = ["nll", "-m", tiny_folder, "--text", text, "--tokens", "450", "--jsonl", "-", "-q"]
        results = records(invoke("h2o-compare", *base, "--policies", "full,h2o", "--windows", "32").stdout)[1:]
        assert [result["tokens"] for result in results] == [400, 450]

    def test_kv_bits(self, tiny_folder: Path, tmp_path: Path) -> None:
        text = tmp_path / "text.txt"
        text.write_text("The quick brown fox jumps over the lazy dog, again and again. " * 20)
        base = ["nll", "-m", tiny_folder, "--text", text, "--tokens", "200", "--jsonl", "-", "-q", "--policies", "h2o"]
        results = [records(invoke("h2o-compare", *base, "--kv-bits", bits).stdout)[1]["nll"] for bits in "842"]
        exact = records(invoke("h2o-compare", *base).stdout)[1]["nll"]
        assert len({exact, *results}) == 4
        assert results[0] == pytest.approx(exact, abs=0.05)

    def test_recall(self, tiny_folder: Path, tmp_path: Path) -> None:
        text, out = tmp_path / "text.txt", tmp_path / "out"
        text.write_text("The quick brown fox jumps over the lazy dog, again and again. " * 80)
        base = ["recall", "-m", tiny_folder, "--text", text, "--facts", "2", "--distances", "8,60", "--jsonl", "-"]
        done = invoke("h2o-compare", *base, "--policies", "sink,random", "--windows", "32", "--out", out)
        assert done.exit_code == 0, done.stderr
        run, *results = records(done.stdout)
        assert run["facts"] == 2
        assert [(r["policy"], r["window"], r["distance"]) for r in results] == [
            ("full", None, 8), ("full", None, 60), ("sink", 32, 8), ("sink", 32, 60), ("random", 32, 8),
            ("random", 32, 60),
        ]  # fmt: skip
        for result, full in zip(results, [*results[:2]] * 3, strict=True):
            assert result["facts"] == full["facts"] <= 2
            assert (result["margin"] is None) == (not result["facts"])
        assert all(result["recalled"] == 1 for result in results[:2] if result["facts"]), "only such facts count"
        assert len(list((out / "parts").iterdir())) == 3
        assert "| full | - |" in (out / "recall.md").read_text()
        again = invoke("h2o-compare", *base, "--policies", "sink,random", "--windows", "32", "--out", out, "-q")
        assert records(again.stdout)[1:] == results

    def test_throughput(self, tiny_folder: Path, tmp_path: Path) -> None:
        text, out = tmp_path / "text.txt", tmp_path / "out"
        text.write_text("The quick brown fox jumps over the lazy dog, again and again. " * 80)
        base = ["throughput", "-m", tiny_folder, "--text", text, "--shapes", "60+5,20+80", "--jsonl", "-"]
        done = invoke("h2o-compare", *base, "--cache-budget", "160KiB", "--ratio", "0.4", "--out", out)
        assert done.exit_code == 0, done.stderr
        _, *results = records(done.stdout)
        assert [(r["prompt"], r["new"], r["policy"], r["window"], r["largest"]) for r in results] == [
            (prompt, new, policy, window if policy != "full" else None, largest)
            for prompt, new, window in ((60, 5, 26), (20, 80, 40))
            for policy, largest in (("full", True), ("recent", True), ("h2o", True), ("recent", False), ("h2o", False))
        ]
        full, recent, h2o, *equal = results[5:]
        assert recent["batch"] > full["batch"] < h2o["batch"]
        assert {r["batch"] for r in equal} == {full["batch"]}
        for result in results:
            assert result["cache_bytes"] == result["batch"] * result["row_bytes"] <= 160 * 1024
            assert result["tok_s"] == pytest.approx(result["batch"] * result["new"] / result["seconds"], rel=0.05)
        assert "| 60+5 | full |" in (out / "throughput.md").read_text()
        again = invoke("h2o-compare", *base, "--cache-budget", "160KiB", "--ratio", "0.4", "--out", out, "-q")
        assert records(again.stdout)[1:] == results, "what was timed is not timed again"
        small = invoke("h2o-compare", *base, "--cache-budget", "4KiB")
        assert small.exit_code == 2
        assert "--cache-budget" in small.stderr

    def test_summarize(self, tiny_folder: Path, tmp_path: Path) -> None:
        file, out = tmp_path / "requests.jsonl", tmp_path / "out"
        form = {"max_tokens": 6, "temperature": 0.5, "top_p": 1, "stop": ["###"], "n": 1}
        lines = [{**form, "article": "word " * (20 + 9 * n), "summary_gt": "some words"} for n in range(5)]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        base = ["summarize", "-m", tiny_folder, "--requests", file, "--policies", "full,h2o", "--windows", "16,32"]
        base += ["--batch", "2", "--jsonl", "-", "--dtype", "float32"]
        done = invoke("h2o-compare", *base, "--limit", "4", "--out", out)
        assert done.exit_code == 0, done.stderr
        run, *results = records(done.stdout)
        assert (run["requests"], run["prefill"], run["sample"]) == (4, "full", False)
        assert [(r["policy"], r["window"], r["n"]) for r in results] == [
            ("full", None, 4), ("h2o", 16, 4), ("h2o", 32, 4),
        ]  # fmt: skip
        assert all(0 <= r["rouge2"] <= r["rouge1"] <= 1 and 4 <= r["new_tokens"] <= 24 for r in results)
        names = sorted(path.name for path in (out / "predictions").iterdir())
        assert names == ["full.jsonl", "h2o-16.jsonl", "h2o-32.jsonl"]
        assert "| h2o | 16 |" in (out / "summarize.md").read_text()
        assert (out / "summarize.png").exists()

        whole = (out / "predictions" / "h2o-16.jsonl").read_text()
        (out / "predictions" / "h2o-16.jsonl").unlink()
        sorted((out / "parts").iterdir())[0].write_bytes(b"torn")
        again = invoke("h2o-compare", *base, "--limit", "4", "--out", out, "-q")
        assert again.exit_code == 0, again.stderr
        made = {line["index"]: line["text"] for line in records((out / "predictions" / "h2o-16.jsonl").read_text())}
        assert made == {line["index"]: line["text"] for line in records(whole)}
        for old, new in zip(results, records(again.stdout)[1:], strict=True):
            assert {**old, "tok_s": 0} == {**new, "tok_s": 0}

        other = invoke("h2o-compare", *base, "--out", out, "--sample", "-q")
        assert other.exit_code == 1
        assert "another run" in other.stderr

    def test_summaries_in_a_batch_are_those_alone_and_chunks_make_a_difference(
        self, tiny_folder: Path, tmp_path: Path
    ) -> None:
        file = tmp_path / "requests.jsonl"
        prompts = ["one two three " * 12, "The quick brown fox. " * 9, "a b c d e " * 20]
        file.write_text("".join(json.dumps({"prompt": prompt, "max_tokens": 8}) + "\n" for prompt in prompts))

        def texts(name: str, *more: object) -> list[str]:
            base = ["summarize", "-m", tiny_folder, "--requests", file, "--policies", "h2o", "--windows", "24"]
            done = invoke("h2o-compare", *base, "--out", tmp_path / name, "--dtype", "float32", "-q", *more)
            assert done.exit_code == 0, done.stderr
            made = records((tmp_path / name / "predictions" / "h2o-24.jsonl").read_text())
            assert all(line["rouge"] is None for line in made), "there is no reference"
            return [line["text"] for line in sorted(made, key=lambda line: line["index"])]

        alone = texts("alone", "--batch", "1")
        assert texts("together") == alone
        assert texts("chunked", "--prefill", "chunked", "--chunk", "4") != alone

    def test_heavy_hitters(self, tiny_folder: Path, tmp_path: Path) -> None:
        text, out = tmp_path / "text.txt", tmp_path / "new" / "folder"
        text.write_text("The quick brown fox jumps over the lazy dog, again and again. " * 40)
        base = ["heavy-hitters", "-m", tiny_folder, "--text", text, "--tokens", "240", "--window", "32", "--chunk", "8"]
        done = invoke("h2o-compare", *base, "--policies", "recent,h2o", "--out", out, "--jsonl", "-")
        assert done.exit_code == 0, done.stderr
        run, *layers = records(done.stdout)
        assert (run["window"], run["tokens"]) == (32, 240)
        assert [layer["layer"] for layer in layers] == [0, 1]
        for layer in layers:
            assert 0 <= layer["sparsity"] < 1
            assert 0.1 < layer["top_share"] < 1
            assert set(layer["mass"]) == {"recent", "h2o", "best"}
            assert layer["mass"]["best"] >= max(layer["mass"].values()) - 1e-6
            assert min(layer["mass"].values()) > 0
        assert "…" not in done.stderr, "no figure is cut"
        assert "| layer | sparsity |" in (out / "heavy-hitters.md").read_text()
        for name in ("sparsity", "power-law", "mass"):
            assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize(
        ("more", "words"),
        [
            (["--tokens", "401"], "the model has 400 positions; lower --tokens"),
            (["--tokens", "30"], "raise --tokens"),
            (["--out", "/proc/nothing"], "--out /proc/nothing"),
        ],
    )
    def test_heavy_hitters_refuses(self, tiny_folder: Path, tmp_path: Path, more: list[str], words: str) -> None:
        text = tmp_path / "text.txt"
        text.write_text("word " * 600)
        base = ["heavy-hitters", "-m", tiny_folder, "--text", text, "--window", "32", "--out", tmp_path / "out", "-q"]
        done = invoke("h2o-compare", *base, *more)
        assert done.exit_code in (1, 2)
        assert words in done.stderr
        assert done.stderr.count("\n") == 1

    @pytest.mark.parametrize(("content", "words"), [(b"", "0 tokens"), (b"a\xff", "not UTF-8 at byte 1")])
    def test_bad_texts(self, tiny_folder: Path, tmp_path: Path, content: bytes, words: str) -> None:
        text = tmp_path / "text.txt"
        text.write_bytes(content)
        done = invoke("h2o-compare", "nll", "-m", tiny_folder, "--text", text, "-q")
        assert done.exit_code == 1
        assert words in done.stderr


class TestTerminal:
    @pytest.mark.parametrize(("columns", "lines"), [(80, 24), (140, 40)])
    def test_the_live_screen(self, tiny_folder: Path, questions: Path, columns: int, lines: int) -> None:
        base = ["-m", str(tiny_folder), "--questions", str(questions), "--turns", "4", "-n", "60", "--window", "64"]
        with Pty("h2o-stream", *base, columns=columns, lines=lines) as terminal:
            terminal.until(lambda t: "turn 4/4" in t.text and "free" in t.text)
            frame = terminal.screen.display
            assert frame[0].startswith("╭")
            assert frame[0].rstrip().endswith("╮")
            assert "window 64" in frame[0]
            assert frame[-1].startswith("╰"), "it fills the terminal and no more"
            for name in ("sinks", "pinned", "heavy", "recent", "free"):
                assert re.search(rf"│ {name} +[█·]+ +\d+ +│", terminal.text)
            assert re.search(r"seen \d+ +kept 64 +evicted \d+", terminal.text)
            assert "prefill" in terminal.text
            assert "decode" in terminal.text
            assert all(line.rstrip()[-1] in "│╮╯" for line in frame), "nothing is wrapped or cut"
            assert terminal.exit_code() == 0
        assert "4 turns" in terminal.text
        assert terminal.output.index("\x1b[?1049h") < terminal.output.index("\x1b[?1049l"), "it is given back"

    def test_the_screen_shows_markup_as_text(self, capsys: pytest.CaptureFixture[str]) -> None:
        terminal = Terminal()
        screen = Screen(terminal, "a [bold]title[/]", None)
        screen.asked("turn [1/2]", "[red]ask[/red] :smile:\n\x1b[2J")
        width = 60
        with terminal.console.capture() as captured:
            terminal.console.print(screen, width=width, height=12)
        for words in ("a [bold]title[/]", "turn [1/2]", "> [red]ask[/red] :smile:", "│ [2J"):
            assert words in captured.get()
        assert {len(line) for line in captured.get().splitlines()} == {width}

    def test_ctrl_c_ends_a_replay_with_its_table(self, tiny_folder: Path, questions: Path, tmp_path: Path) -> None:
        base = ["-m", str(tiny_folder), "--questions", str(questions), "--loop", "-n", "500", "--window", "64"]
        with Pty("h2o-stream", *base, "--jsonl", str(tmp_path / "run.jsonl")) as terminal:
            terminal.until(lambda t: "evicted" in t.text)
            terminal.send("\x03")
            assert terminal.exit_code() == 130
        assert "interrupted 1" in terminal.text
        assert records((tmp_path / "run.jsonl").read_text())[-1]["finish"]["interrupted"] == 1

    def test_a_chat(self, tiny_folder: Path, tmp_path: Path) -> None:
        with Pty("h2o-chat", "-m", str(tiny_folder), "-n", "2000", "--window", "64", home=tmp_path) as terminal:
            terminal.until(lambda t: "\n> " in t.text)
            terminal.send("tell me all\r")
            terminal.until(lambda t: len(t.output) > 3000 or t.screen.cursor.y > 10)
            terminal.send("\x03")
            terminal.until(lambda t: "interrupted" in t.text and t.screen.display[t.screen.cursor.y].startswith(">"))
            assert "kept 64 of 64" in terminal.text
            terminal.send("/stats\r")
            terminal.until(lambda t: "sinks" in t.text)
            terminal.send("half a line\x03")
            terminal.until(lambda t: t.screen.display[t.screen.cursor.y].rstrip() == ">")
            terminal.send("\x04")
            assert terminal.exit_code() == 0
        assert "tell me all" in (tmp_path / "h2o-stream" / "history").read_text()

    def test_no_colours_when_told_so(self, tiny_folder: Path, questions: Path) -> None:
        base = ["-m", str(tiny_folder), "--questions", str(questions), "--turns", "1", "-n", "20", "--color", "off"]
        with Pty("h2o-stream", *base) as terminal:
            assert terminal.exit_code() == 0
        assert not re.search(r"\x1b\[[0-9;]*m", terminal.output.replace("\x1b[0m", ""))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n\ttext", "plain\n\ttext"),
        ("\x1b[2J\x1b]0;title\x07gone", "[2J]0;titlegone"),
        ("bell\x07 back\x08 null\x00 cr\r", "bell back null cr"),
        ("\x9b31mcsi \x7f", "31mcsi "),
        ("[bold]not markup[/bold] :smile:", "[bold]not markup[/bold] :smile:"),
        ("é 日本 👍", "é 日本 👍"),
    ],
)
def test_control_characters_never_reach_the_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown
