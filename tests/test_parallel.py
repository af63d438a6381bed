"""Several processes that share the work of a comparison or a model."""

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tests.commands import invoke, records
from tests.fixtures import make_llama, saved, written
from tests.in_turn import in_turn
from tests.preloaded import Preloaded
from tests.terminal import BIN
from tests.tolerance import assert_alike

SCRIPT = Path(__file__).parent / "run_tensor_parallel.py"


@pytest.fixture
def four_heads(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A model whose heads can be divided between two processes."""
    return saved(make_llama(vocab=len(tokenizer), heads=4, groups=2, context=400), tokenizer, tmp_path / "model")


ACCELERATE = [f"{BIN}/accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
ACCELERATE += ["--mixed_precision", "no", "--dynamo_backend", "no"]
TORCHRUN = [f"{BIN}/torchrun", "--nproc-per-node", "2"]
FORKS: list[str] = []
"""Forks with torchrun's environment instead of a launcher."""

launchers = pytest.mark.parametrize(
    "launcher", [FORKS, pytest.param(TORCHRUN, marks=pytest.mark.exhaustive)], ids=["forks", "torchrun"]
)


def launched(launcher: list[str], command: Any, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command or a script in two processes."""
    if not launcher:
        return forked(command, *arguments)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[1])}
    script = command if command == SCRIPT else f"{BIN}/{command}"
    whole = [*launcher, str(script), *map(str, arguments)]
    return subprocess.run(whole, capture_output=True, text=True, timeout=300, check=False, env=environment)


def forked(command: Any, *arguments: object, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """Run a command or a script with torchrun's environment, without starting torchrun."""
    whole = ["-c", SCRIPT.read_text()] if command == SCRIPT else [command]
    whole += map(str, arguments)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared["LOCAL_WORLD_SIZE"] = shared["WORLD_SIZE"]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    children = [
        Preloaded(whole, text=True, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, **pipes)
        for rank in range(processes)
    ]
    out, errors = zip(*(child.communicate(timeout=120) for child in children), strict=True)
    code = max(abs(child.returncode) for child in children)
    return subprocess.CompletedProcess(whole, code, "".join(out), "".join(errors))


@pytest.mark.parametrize(("launcher", "command"), [
    (FORKS, "nll"),
    pytest.param(FORKS, "summarize", marks=pytest.mark.exhaustive),
    pytest.param(ACCELERATE, "summarize", marks=pytest.mark.exhaustive),
    pytest.param(TORCHRUN, "nll", marks=pytest.mark.exhaustive),
], ids=["forks", "forks", "accelerate", "torchrun"])  # fmt: skip
def test_two_processes_find_what_one_finds(
    launcher: list[str], command: str, tiny_folder: Path, text: Path, tmp_path: Path
) -> None:
    form = {"max_tokens": 6, "temperature": 0.5, "summary_gt": "some words"}
    file = written(tmp_path / "requests.jsonl", [{**form, "article": "word " * (20 + 9 * n)} for n in range(3)])
    inputs: dict[str, list[Any]] = {
        "summarize": ["--requests", file],
        "nll": ["--text", text, "--tokens", "90"],
    }
    model = ["-m", tiny_folder, "--dtype", "float32", "--windows", "24", "--policies", "full,h2o"]
    arguments = [command, *inputs[command], *model]
    out = tmp_path / "out"
    done = launched(launcher, "h2o-compare", *arguments, "--out", out, "--jsonl", tmp_path / "two.jsonl")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("tables, plots and records are in") == 1, "only one process reports"
    assert len(list((out / "parts").iterdir())) == (6 if command == "summarize" else 2)
    alone = invoke("h2o-compare", *arguments, "--jsonl", "-", "-q")
    mine, theirs = records(alone.stdout), records((tmp_path / "two.jsonl").read_text())
    assert theirs[0]["processes"] == 2
    for one, two in zip(mine[1:], theirs[1:], strict=True):
        assert_alike({**one, "tok_s": 0}, {**two, "tok_s": 0})


class TestTensorParallel:
    @pytest.mark.exhaustive
    @launchers
    def test_the_same_tokens_and_windows(self, launcher: list[str], four_heads: Path) -> None:
        """Including windows by head, although each process has only its own heads."""
        alone, shared = forked(SCRIPT, four_heads, processes=1), launched(launcher, SCRIPT, four_heads)
        assert alone.returncode == shared.returncode == 0, alone.stderr + shared.stderr
        mine, theirs = ([json.loads(line) for line in done.stdout.splitlines()] for done in (alone, shared))
        assert [policy for policy, _, _ in mine] == ["full", "h2o", "sink", "h2o"]
        assert len({tuple(said) for _, said, _ in mine}) >= 3, "policies make a difference here"
        assert len(set(mine[1][2][0])) > 1, "so do windows by head"
        for (_, said, kept), (_, shared_said, shared_kept) in zip(mine, theirs, strict=True):
            assert shared_said == said
            assert shared_kept == [layer[:2] for layer in kept], "the first process has the first two heads"

    @pytest.mark.exhaustive
    @launchers
    def test_a_stream_in_the_shell(self, launcher: list[str], four_heads: Path, tmp_path: Path) -> None:
        prompt = tmp_path / "prompt.txt"
        prompt.write_text("Tell me about the sea, the hills and the town. " * 4)
        base = ["--prompt-file", prompt, "-m", four_heads, "--dtype", "float32", "--window", "32", "-n", "8"]
        base += ["--temp", "0", "--jsonl", "-"]
        alone = invoke("h2o-stream", *base)
        shared = launched(launcher, "h2o-stream", *base, "--tensor-parallel", "--device", "cpu")
        assert shared.returncode == 0, shared.stderr
        mine, theirs = records(alone.stdout)[1], records(shared.stdout)[1]
        assert theirs["text"] == mine["text"]
        assert theirs["cached_tokens"] == mine["cached_tokens"] < mine["seen_tokens"]

    @in_turn("arguments, words", [
        (["h2o-chat", "-p", "hi", "--tensor-parallel"], "start them with torchrun"),
        (["h2o-chat", "-p", "hi", "--tensor-parallel", "--quantize", "int8"], "--quantize int8; leave one out"),
        (["h2o-chat", "-p", "hi", "--tensor-parallel", "--device-map", "auto"], "--device-map auto; leave one out"),
        (["h2o-chat", "--tensor-parallel"], "answers --prompt and --prompt-file"),
        (["h2o-stream", "--tensor-parallel", "--compare", "full,h2o"], "leave them out"),
    ])  # fmt: skip
    def test_where_it_cannot_be(self, arguments: list[str], words: str, four_heads: Path) -> None:
        command, *rest = arguments
        done = invoke(command, *rest, "-m", four_heads)
        assert done.exit_code == 2
        assert words in done.stderr
