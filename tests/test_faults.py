"""Faults around the program: signals, closed terminals and pipes, deleted folders."""

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import transformers

from h2o_stream.config import ModelConfig
from h2o_stream.errors import OutOfMemoryError
from h2o_stream.loading.transformers_model import load
from tests.commands import invoke
from tests.preloaded import Preloaded
from tests.terminal import Pty
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("own_home")


def said(own_home: Path) -> list[dict[str, Any]]:
    """The complete turns in the session's transcript."""
    path = own_home / "talk" / "transcript.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in map(json.loads, (line for line in lines if line.endswith("\n"))) if line["type"] == "turn"]


@contextmanager
def talking(model: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A chat with pipes for its streams, in the middle of a long reply."""
    command = ["h2o-chat", "-m", model, "-n", "10000", "--temp", "0", "--session", "talk"]
    with Preloaded(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.stdin.write(b"one\n")
        child.stdin.flush()
        child.stdout.read(20)
        yield child
        child.kill()


class TestSignals:
    @pytest.mark.every(2)
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
    def test_what_was_said_is_kept(self, tiny_folder: Path, own_home: Path, number: signal.Signals) -> None:
        with talking(tiny_folder) as child:
            child.send_signal(number)
            assert child.wait(30) == 128 + number
        last = said(own_home)[-1]
        assert last["finish"] == "interrupted"
        assert last["text"]
        again = invoke("h2o-chat", "-m", tiny_folder, "--session", "talk", "-n", "2", "--temp", "0", typed="three\n")
        assert again.exit_code == 0, again.stderr
        assert f"resumed after turn {last['turn']}" in again.stderr

    @pytest.mark.every(2)
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
    @pytest.mark.parametrize("options", [[], ["--compare", "h2o,sink"]])
    def test_a_replay_ends_with_its_summary(
        self, tiny_folder: Path, tmp_path: Path, options: list[str], number: signal.Signals
    ) -> None:
        record, base = tmp_path / "run.jsonl", ["-m", tiny_folder, "-n", "20", "--window", "64", "--loop"]
        command = ["h2o-stream", *base, *options, "--jsonl", record]
        with Preloaded(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            child.stdout.read(2000)
            child.send_signal(number)
            child.stdout.read()
            assert child.wait(30) == 128 + number
        assert json.loads(record.read_text().splitlines()[-1])["type"] == "summary"

    def test_terminated_while_nothing_is_going_on(self, tiny_folder: Path) -> None:
        with Pty("h2o-chat", "-m", str(tiny_folder)) as terminal:
            terminal.until(lambda t: t.screen.display[t.screen.cursor.y].rstrip() == ">" and "seen 0" in t.text)
            terminal.process.send_signal(signal.SIGTERM)
            assert terminal.exit_code() == 143
            assert "\x1b[?2004l" in terminal.output, "the terminal is restored"


class TestOutput:
    def test_a_pipe_that_is_closed_in_a_reply(self, tiny_folder: Path, own_home: Path) -> None:
        with talking(tiny_folder) as child:
            child.stdout.close()
            assert child.wait(30) == 1
            assert b"Traceback" not in child.stderr.read()
        assert said(own_home)[-1]["finish"] == "interrupted"

    def test_a_terminal_that_is_closed_in_a_reply(self, tiny_folder: Path, own_home: Path) -> None:
        base = ["-m", str(tiny_folder), "-n", "100000", "--temp", "0", "--session", "talk", "--plain"]
        with Pty("h2o-chat", *base) as terminal:
            terminal.until(lambda t: t.screen.display[t.screen.cursor.y].rstrip() == ">")
            terminal.send("tell me\r")
            terminal.until(lambda t: len(t.text.split()) > 60)
            terminal.hang_up()
        wait_for(lambda: said(own_home))
        assert said(own_home)[0]["finish"] == "interrupted"

    def test_a_terminal_that_changes_its_size_in_a_reply(self, tiny_folder: Path) -> None:
        base = ["-m", str(tiny_folder), "-n", "200", "--temp", "0"]
        with Pty("h2o-chat", *base) as terminal:
            terminal.until(lambda t: t.screen.display[t.screen.cursor.y].rstrip() == ">")
            terminal.send("tell me\r")
            for columns in (40, 132, 20, 80):
                time.sleep(0.1)
                terminal.resize(columns, 24)
            terminal.until(lambda t: "200 tokens" in t.text.replace("\n", ""))
            assert terminal.leave() == 0
            assert "Traceback" not in terminal.output


class TestFolders:
    def test_a_session_that_is_deleted_under_us(self, tiny_folder: Path, own_home: Path) -> None:
        """The chat continues and warns that turns are no longer saved."""
        command = ["h2o-chat", "-m", tiny_folder, "-n", "3", "--session", "talk", "--temp", "0"]
        with Preloaded(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            child.stdin.write(b"one\n")
            child.stdin.flush()
            wait_for(lambda: said(own_home))
            shutil.rmtree((own_home / "talk").rename(own_home / "gone"))  # at once: its files come and go
            child.stdin.write(b"two\n")
            child.stdin.close()
            assert child.wait(60) == 0
            errors = child.stderr.read().decode()
        assert "No such file" in errors
        assert "Traceback" not in errors

    def test_a_cache_folder_that_is_deleted_under_us(self, tiny_folder: Path, own_cache: Path) -> None:
        for _ in range(2):
            done = invoke("h2o-chat", "-m", tiny_folder, "-p", "hello", "-n", "3", "-q")
            assert done.exit_code == 0, done.stderr
            shutil.rmtree(own_cache.parent, ignore_errors=True)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to ...")],
)
def test_memory_that_ends_while_loading(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*args: Any, **more: Any) -> Any:
        raise error

    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", fail)
    with pytest.raises(OutOfMemoryError, match=r"does not fit into the memory of cpu; take .*--quantize int4"):
        load(ModelConfig(str(tiny_folder), device="cpu"))
