"""``h2o-compare speed``: which engines are timed where, and the messages about it."""

import json
import multiprocessing
import pickle
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self
from unittest.mock import Mock

import pytest

from h2o_stream.attachment.describe import weight_bytes
from h2o_stream.compare.catalog import SpeedOptions
from h2o_stream.compare.comparison import JobProgress
from h2o_stream.compare.speed.comparison import ROUNDS, STEPS, Benchmark, Speed, engine_specs, needed
from h2o_stream.compare.speed.engines import (
    ENGINES,
    IK_LLAMA_CPP,
    LLAMA_CPP,
    OPENVINO,
    OURS,
    TRANSFORMERS,
    EngineInfo,
    EngineSpec,
    MemoryUse,
)
from h2o_stream.compare.speed.worker import Worker
from h2o_stream.config import CacheConfig, ModelConfig
from h2o_stream.errors import H2OStreamError
from tests.commands import invoke
from tests.fixtures import make_llama
from tests.preloaded import Preloaded


class Forks:
    """A `multiprocessing` context whose processes have imported everything; test_docs spawns a real one."""

    SERVE = (
        "import pickle, sys\n"
        "from multiprocessing.connection import Connection\n"
        "from h2o_stream.compare.speed.worker import _serve\n"
        "_serve(Connection(0), pickle.loads(bytes.fromhex(sys.argv[1])))\n"
    )

    Pipe = staticmethod(multiprocessing.Pipe)

    class Process:
        def __init__(self, target: Any, args: tuple[Any, ...], daemon: bool) -> None:
            self._pipe, self._contender = args
            self._child: Preloaded

        def start(self) -> None:
            contender = pickle.dumps(self._contender).hex()
            self._child = Preloaded(["-c", Forks.SERVE, contender], stdin=self._pipe.fileno())

        def terminate(self) -> None:
            self._child.terminate()

        def join(self) -> None:
            self._child.wait()


def test_a_race_in_the_shell(tiny_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines, two policies and two precisions on a tiny model; full caches stop at its context of 400 tokens."""
    monkeypatch.setattr("h2o_stream.compare.speed.worker.get_context", lambda _: Forks)
    options = [
        *("--model", tiny_folder, "--text", text, "--histories", "600,64", "--policies", "full,h2o", "--windows", 32),
        *("--peers", "transformers", "--dtype", "float32", "--quantize", "none", "--device", "cpu"),
        *("--jsonl", tmp_path / "speed.jsonl", "--out", tmp_path / "out"),
    ]
    done = invoke("h2o-compare", "speed", *options)
    assert done.exit_code == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "speed.jsonl").read_text().splitlines()]
    figures = [record for record in records if record["type"] == "speed"]
    combinations = [(figure["engine"], figure["policy"], figure["window"], figure["history"]) for figure in figures]
    assert combinations == [
        (OURS, "full", None, 64), (OURS, "h2o", 32, 64), (TRANSFORMERS, "full", None, 64), (OURS, "h2o", 32, 600),
    ]  # fmt: skip
    for figure in figures:
        assert figure["dtype"] == "float32"
        assert figure["quantize"] == "none"
        assert (figure["steps"] is None) == (figure["engine"] != OURS)
        assert "compile" not in figure
        assert min(figure["prefill_tok_s"], figure["decode_tok_s"], figure["cache_bytes"], figure["rss_bytes"]) > 0
    ours = [figure for figure in figures if figure["policy"] == "h2o"]
    assert ours[0]["cache_bytes"] == ours[1]["cache_bytes"]
    assert min(figure["bandwidth"] for figure in figures) > 1e8
    assert max(figure["of_floor"] for figure in figures) < 1.5
    assert "of floor" in (tmp_path / "out" / "speed.md").read_text()
    assert (tmp_path / "out" / "speed.png").stat().st_size > 1000
    assert "h2o-stream h2o 32" in done.stderr + done.stdout


def test_the_run_record_distinguishes_weights_of_the_same_name(tiny_folder: Path, text: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    options = SpeedOptions(model=ModelConfig(str(model)), policies=["h2o"], peers=(), histories=[8], text=text)
    before = Speed(options).begin(print)
    assert Speed(options).begin(print) == before
    make_llama(vocab=64, seed=1).save_pretrained(model)
    assert Speed(options).begin(print)["files"] != before["files"]


class Pretended:
    """A worker whose engine takes a known amount of time."""

    asked: list[tuple[str, str, int]] = []

    def __init__(self, contender: EngineSpec) -> None:
        self.spec = contender

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def call(self, method: str, *arguments: Any) -> Any:
        if method == "info":
            return EngineInfo("float32", 1000, 500 if self.spec.engine == TRANSFORMERS else None)
        if method == "memory":
            return MemoryUse(None, 5000)
        if method in ("feed", "decode"):
            self.asked.append((self.spec.engine, method, len(arguments[0])))
            return len(arguments[0]) * (0.01 if method == "feed" else 0.1)
        return None


def test_rounds_are_in_turn_and_every_token_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h2o_stream.compare.speed.comparison.Worker", Pretended)
    monkeypatch.setattr(Pretended, "asked", [])
    contenders = [EngineSpec(engine, ModelConfig(), CacheConfig()) for engine in (OURS, TRANSFORMERS)]
    race = Benchmark(contenders, range(needed([100, 1000])))
    events = [event for history in (100, 1000) for event in race.measure(history, 2e4)]
    figures = [figure for event in events if isinstance(event, list) for figure in event]
    assert [(figure["engine"], figure["history"]) for figure in figures] == [
        (OURS, 100),
        (TRANSFORMERS, 100),
        (OURS, 1000),
    ]
    assert figures[2]["prefill_tok_s"] == pytest.approx(100)
    assert figures[2]["decode_tok_s"] == pytest.approx(10)
    assert figures[2]["of_floor"] == pytest.approx(10 / 20)
    ours = [count for engine, _, count in Pretended.asked if engine == OURS]
    assert sum(ours) == needed([1000])
    first = [engine for engine, method, count in Pretended.asked if count == STEPS][: 2 * ROUNDS]
    assert first == [OURS, TRANSFORMERS] * ROUNDS
    doing = [event for event in events if isinstance(event, JobProgress)]
    assert all(event.done < race.total for event in doing)


def test_weights_that_a_step_reads() -> None:
    """Each matrix counts once, however many modules share it, and an untied embedding not at all."""
    model = make_llama(vocab=64)
    every = sum(parameter.nbytes for parameter in model.parameters())
    embedding = model.get_input_embeddings().weight
    once = weight_bytes(model)
    assert every - embedding.nbytes - 4096 < once < every - embedding.nbytes, "without norms"
    model.lm_head.weight = embedding
    assert weight_bytes(model) == once
    model.register_forward_hook(lambda *_: None)
    assert 0 < weight_bytes(model) - once < 4096, "it is not described"


class TestWorkers:
    @pytest.mark.every(3)
    @pytest.mark.parametrize(
        ("engine", "module"), [(LLAMA_CPP, "llama_cpp"), (IK_LLAMA_CPP, "ik_llama_cpp"), (OPENVINO, "openvino")]
    )
    def test_a_broken_engine_is_one_line(self, engine: str, module: str, monkeypatch: Any, tmp_path: Path) -> None:
        (tmp_path / f"{module}.py").write_text("raise ImportError('not here')")
        monkeypatch.syspath_prepend(tmp_path)
        with (
            Worker(EngineSpec(engine, ModelConfig(), CacheConfig("full"))) as worker,
            pytest.raises(H2OStreamError, match=rf"{engine}: not here"),
        ):
            worker.call("info")

    @pytest.mark.skipif(find_spec("ik_llama_cpp") is None, reason="ik-llama-cpp-python is not installed")
    def test_ik_llama_cpp_reads_the_embedded_model(self) -> None:
        spec = EngineSpec(IK_LLAMA_CPP, ModelConfig(), CacheConfig("full"), threads=1, length=64)
        with Worker(spec) as worker:
            assert worker.call("feed", [5] * 20) > 0
            assert worker.call("decode", [5, 6, 7]) > 0
            with pytest.raises(H2OStreamError, match="cannot read token 23"):
                worker.call("feed", [5] * 100)

    def test_a_process_that_dies_is_one_line(self) -> None:
        with Worker(EngineSpec(OURS, ModelConfig("no/such/place"), CacheConfig())) as worker:
            worker._process.kill()
            with pytest.raises(H2OStreamError, match="ended without a word"):
                worker.call("info")


class PretendedPipeline:
    """OpenVINO's pipeline: reads a token in a millisecond, and generates one in two."""

    def __init__(self, path: str, device: str, scheduler_config: Any) -> None:
        assert path.endswith(".gguf")
        self.scheduler = scheduler_config

    def generate(self, inputs: Any, config: Any) -> Any:
        metrics = Mock()
        metrics.get_ttft.return_value.mean = 1.0 * inputs[0].shape[1]
        metrics.get_tpot.return_value.mean = 2.0
        return Mock(perf_metrics=metrics)


@pytest.mark.parametrize(("policy", "read_s"), [("full", 0.3), ("h2o", 0.1)])
def test_openvino_reads_again_what_it_evicts(policy: str, read_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    genai = Mock(LLMPipeline=PretendedPipeline, TokenizedInputs=lambda *tensors: tensors)
    monkeypatch.setitem(sys.modules, "openvino_genai", genai)
    monkeypatch.setitem(sys.modules, "openvino", Mock(Tensor=lambda numbers: numbers))
    runner = ENGINES[OPENVINO](EngineSpec(OPENVINO, ModelConfig(), CacheConfig(policy, window=200)))
    assert runner.feed([5] * 100) == pytest.approx(0.1)
    assert runner.decode([5] * 100) == pytest.approx(0.2)
    assert runner.feed([5] * 100) == pytest.approx(read_s)
    if policy == "h2o":
        sizes = genai.CacheEvictionConfig.call_args.kwargs
        assert (sizes["start_size"], sizes["recent_size"], sizes["max_cache_size"]) == (32, 96, 192)


def test_openvino_runs_with_and_without_its_eviction() -> None:
    specs = engine_specs(SpeedOptions(text=Path("a.txt"), peers=("openvino",), policies=("h2o",), windows=(64, 256)))
    names = [spec.name for spec in specs]
    assert names[-3:] == ["openvino", "openvino evicting, 64", "openvino evicting, 256"]


def test_wrong_peers_and_short_texts(tiny_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Too short.")
    base = ["speed", "--model", tiny_folder, "--text", text]
    wrong = invoke("h2o-compare", *base, "--peers", "vllm")
    assert wrong.exit_code == 2
    assert "transformers, llama.cpp" in wrong.stderr
    file = invoke("h2o-compare", *base, "--peers", "llama.cpp")
    assert ("llama.cpp" in file.stderr and "GGUF" in file.stderr) or "needs llama-cpp-python" in file.stderr
    short = invoke("h2o-compare", *base, "--peers", "")
    assert short.exit_code == 1
    assert "lower --histories" in short.stderr
