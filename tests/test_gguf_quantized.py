"""Rows of the table with files of llama.cpp's quantizer and with split files, and which families have rows."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from h2o_stream import UnsupportedModelError
from h2o_stream.config import ModelConfig
from h2o_stream.loading.loading import ModelFile
from h2o_stream.loading.transformers_model import load
from h2o_stream.native.describe import describe
from h2o_stream.runtime.families import ARCHITECTURES
from tests.descriptions import difference
from tests.gguf_files import split
from tests.in_turn import in_turn
from tests.test_gguf_families import CASES, FILE_TYPES, write  # noqa: F401

TODAY = """
llama qwen2 qwen3 qwen3moe qwen35 qwen35moe qwen3next gemma2 gemma3 gemma4 gpt-oss lfm2 lfm2moe granite granitehybrid
smollm3 phi3 glm4 glm4moe deepseek2 ernie4_5 ernie4_5-moe nemotron_h falcon-h1 olmo2 exaone4 hunyuan-dense hunyuan-moe
seed_oss cohere2
"""
"""Architectures of files that people run today."""

ALWAYS = ("DeepSeek V3", "Gemma 4", "HunYuan MoE")
"""Families that are taken by `make test`; `make test-all` takes all."""

each_family = pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.exhaustive) for name in CASES]
)


@in_turn("name", TODAY.split())
def test_there_is_a_row(name: str) -> None:
    assert name in ARCHITECTURES


@each_family
def test_described_from_files_of_its_quantizer(name: str, write: Callable[..., Path], tmp_path: Path) -> None:  # noqa: F811
    """In mixtures of block types, with what the quantizer leaves as it is."""
    llama_cpp = pytest.importorskip("llama_cpp")
    whole, path = write(name, None), tmp_path / "quantized.gguf"
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = FILE_TYPES["Q4_K_M"], 1
    assert not llama_cpp.llama_model_quantize(bytes(whole), bytes(path), ctypes.byref(parameters))
    loaded = load(ModelConfig(str(path), dtype="float32")).model
    assert difference(ModelFile(str(path), path, "float32").describe(print), describe(loaded)) == ""


@each_family
def test_described_from_parts(name: str, write: Callable[..., Path], tmp_path: Path) -> None:  # noqa: F811
    whole = write(name)
    parts = split(whole, tmp_path, 3)
    described = [ModelFile(str(path), path, "float32").describe(print) for path in (whole, parts[0])]
    assert difference(*described) == ""


def test_an_architecture_without_a_row_is_named(write: Callable[..., Path]) -> None:  # noqa: F811
    path = write("Gemma")
    content: Any = path.read_bytes().replace(b"gemma", b"gemna")
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=r"model.gguf cannot be served: .*architecture gemna"):
        load(ModelConfig(str(path)))
