"""The first start of a GGUF file needs no torch."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest

from h2o_stream.attachment import retrieval_heads
from h2o_stream.attachment.model_facts import max_distance_of
from h2o_stream.attachment.support import layer_specs
from h2o_stream.config import CacheConfig, ModelConfig
from h2o_stream.engine.engine import Engine
from h2o_stream.errors import H2OStreamError
from h2o_stream.loading.loading import load_model
from h2o_stream.loading.transformers_model import load
from h2o_stream.runtime import sources
from h2o_stream.runtime.heads import attention_to_copy, measured_windows
from h2o_stream.runtime.model import RuntimeModel
from h2o_stream.runtime.sources import ModelFile
from tests.family_models import TEXT, written
from tests.fixtures import with_exhaustive

DTYPE = "float32"


@pytest.fixture
def file(tmp_path: Path, own_cache: Path) -> Path:
    """A file for which nothing is kept."""
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
