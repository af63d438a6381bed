"""The first start of a GGUF file needs no torch; `h2o-compare certify` compares it with transformers' model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
from tokenizers import Tokenizer

from h2o_lab.certify import CertifyOptions, certify
from h2o_stream.attachment import retrieval_heads
from h2o_stream.attachment.model_facts import max_distance_of
from h2o_stream.attachment.support import layer_specs
from h2o_stream.config import CacheConfig, ModelConfig
from h2o_stream.engine.engine import Engine
from h2o_stream.errors import H2OStreamError
from h2o_stream.loading.loading import load_model
from h2o_stream.loading.transformers_model import load
from h2o_stream.runtime import file_ropes, sources
from h2o_stream.runtime.heads import attention_to_copy, measured_windows
from h2o_stream.runtime.model import RuntimeModel
from h2o_stream.runtime.sources import ModelFile
from tests.commands import invoke
from tests.family_models import TEXT, written
from tests.fixtures import with_exhaustive
from tests.test_runtime import keep_all

DTYPE = "float32"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file for which nothing is kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return written(tmp_path, "Qwen 3")


def loaded(file: Path, **cache: Any) -> Any:
    return load_model(ModelConfig(str(file), dtype=DTYPE), CacheConfig(window=40, **cache), "auto", print, print)


class TestHeads:
    @pytest.mark.parametrize(
        "name",
        with_exhaustive(
            ["Qwen 3 MoE", "Gemma 3", "Gemma 4"],
            ["Llama", "Qwen 3", "Gemma 2", "Gemma 4, keys as values", "Phi 3", "Starcoder 2"],
        ),
    )
    def test_attention_is_that_of_the_model(self, name: str, tmp_path: Path) -> None:
        path = written(tmp_path, name)
        source, model = ModelFile(str(path), path, DTYPE), load(ModelConfig(str(path), dtype=DTYPE)).model
        plan = CacheConfig(window=8, chunk=4).plan(max_distance_of(model.config))
        specs = layer_specs(model, plan)
        expected = retrieval_heads._attention_to_copy(model, specs).numpy()
        found = attention_to_copy(source.describe(print), source.parameters.windows, source.parameters.context)
        numpy.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)
        theirs = retrieval_heads.give_retrieval_heads_more(model, specs)
        ours = measured_windows(source.describe(print), source.parameters.windows, source.parameters.context, print)
        assert [spec.windows for spec in theirs] == ours

    def test_what_was_measured_is_kept(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sources, "LONG_S", 0.0)
        first = loaded(file).model.windows
        monkeypatch.setattr(sources, "measured_windows", None)
        assert first == loaded(file).model.windows


class TestCertify:
    def test_what_is_right(self, file: Path) -> None:
        assert certify(CertifyOptions(str(file), ModelConfig(dtype=DTYPE)), print) == []

    def test_a_wrong_base_of_rope_is_found(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        right = file_ropes.scaled_rope
        wrong = {"rope_theta": 10.0}
        monkeypatch.setattr(file_ropes, "scaled_rope", lambda rope, *sizes: right({**rope, **wrong}, *sizes))
        done = invoke("h2o-compare", "certify", file, "--dtype", DTYPE, "--jsonl", "-")
        assert done.exit_code == 1
        assert "logits are off" in done.stderr
        (record,) = [json.loads(line) for line in done.stdout.splitlines()]
        assert record["model"] == str(file)
        assert "logits are off" in record["differences"][0]

    def test_tokens_that_differ_are_found(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Which of them are called special is no difference."""

        def changed(*args: Any, **kwargs: Any) -> Any:
            found = load(*args, **kwargs)
            rules = json.loads(found.tokenizer.backend_tokenizer.to_str())
            for token in rules["added_tokens"]:
                token["special"] = not token["special"]
            found.tokenizer._tokenizer = Tokenizer.from_str(json.dumps(rules | normalizer))
            return found

        monkeypatch.setattr("h2o_stream.loading.transformers_model.load", changed)
        options = CertifyOptions(str(file), ModelConfig(dtype=DTYPE))
        normalizer = dict[str, Any]()
        assert certify(options, print) == []
        normalizer["normalizer"] = {"type": "Lowercase"}
        assert certify(options, print) == ["the tokenizers differ: normalizer"]

    @pytest.mark.parametrize("name", ["Qwen 3", "Qwen 3.5"])
    def test_damaged_packed_weights_are_removed(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keep_all(tmp_path, monkeypatch)
        hybrid = name == "Qwen 3.5"  # transformers cannot map its packed weights
        path = written(tmp_path, name)
        options = CertifyOptions(str(path), ModelConfig(dtype=DTYPE))
        assert isinstance(loaded(path).model, RuntimeModel)
        assert certify(options, print) == []
        (weights,) = (tmp_path / "cache" / "packed").glob("*/model.safetensors")
        data = bytearray(weights.read_bytes())
        data[-1 if hybrid else -4000] ^= 1
        weights.write_bytes(data)
        (line,) = certify(options, print)
        assert "damaged; they are removed" in line
        assert not weights.exists()

    def test_what_needs_transformers_anyway(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(H2OStreamError, match="is read through transformers anyway: its file is packed in another"):
            certify(CertifyOptions(str(file), ModelConfig(quantize="int4")), print)


def test_a_lack_of_memory_is_left_to_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "Qwen 3", "F32")
    with monkeypatch.context() as patch:
        patch.setattr(sources, "free_bytes", lambda: 2**10)
        assert "1.0 KiB of memory are free" in loaded(path).why_transformers
    assert isinstance(loaded(path).model, RuntimeModel)


class TestStates:
    def test_of_another_file_are_refused(self, file: Path, tmp_path: Path) -> None:
        folder = tmp_path / "other"
        folder.mkdir()
        models = [loaded(path) for path in (file, written(folder, "Qwen 2"))]
        config = CacheConfig(window=40, budgets="equal")
        with Engine(models[0].model, models[0].tokenizer, config) as first:
            list(first.prefill(TEXT[:60]))
            state = first.state_dict()
        with (
            Engine(models[1].model, models[1].tokenizer, config) as second,
            pytest.raises(H2OStreamError, match="another model"),
        ):
            second.load_state_dict(state)


def chat(file: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """A chat in a process of its own, which must not import torch."""
    code = f"""
import sys
from h2o_stream.cli import chat
sys.argv = ["h2o-chat", "-m", {str(file)!r}, "--dtype", "{DTYPE}", "-p", "the", "-n", "3", *{list(arguments)}]
try:
    chat.main()
finally:
    print("torch" in sys.modules or "transformers" in sys.modules)
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_first_start_imports_no_torch(file: Path) -> None:
    first = chat(file, "-v")
    assert (first.returncode, first.stdout.split()[-1]) == (0, "False"), first.stderr
    assert "without torch" in first.stderr
