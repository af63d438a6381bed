"""Every row of the table of architectures: the same logits from a file as from the model that it was written from.

Files are like those of llama.cpp's converter; llama.cpp itself reads them, too, where it is installed.
"""

import ctypes
import functools
import itertools
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from h2o_lab.peers import step_bytes
from h2o_stream import CacheConfig, UnsupportedModelError
from h2o_stream.attachment.describe import describe
from h2o_stream.cache.state import checksummed
from h2o_stream.config import ModelConfig, Positions
from h2o_stream.errors import H2OStreamError
from h2o_stream.loading.transformers_model import load
from h2o_stream.models.gguf import GgufFile
from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.description import DescriptionError
from h2o_stream.runtime.families import ARCHITECTURES
from h2o_stream.runtime.gguf_weights import GgufWeights
from h2o_stream.runtime.sources import ModelFile
from tests import llama
from tests.descriptions import difference
from tests.families import tiny
from tests.family_models import GGUF, MODELS, SIZES, THETA, written
from tests.family_models import TEXT as LONG
from tests.fixtures import thinned, with_exhaustive
from tests.gguf_files import split, write_model
from tests.hostile_files import Gguf
from tests.in_turn import in_turn
from tests.native_builds import needs_library
from tests.test_runtime import keep_all, through_both

TODAY = """
llama qwen2 qwen3 qwen3moe qwen35 qwen35moe qwen3next gemma2 gemma3 gemma4 gpt-oss lfm2 lfm2moe granite granitehybrid
smollm3 phi3 glm4 glm4moe deepseek2 ernie4_5 ernie4_5-moe nemotron_h falcon-h1 olmo2 exaone4 hunyuan-dense hunyuan-moe
seed_oss cohere2
"""
"""Architectures of files that people run today."""

TEXT, PROMPT = LONG[:60], 40
FORMS = (("Q8_0", "float32"), ("Q8_0", "bfloat16"), ("F16", "bfloat16"), ("F16", "float32"), ("F32", "float32"),
    ("F32", "bfloat16"), ("BF16", "bfloat16"), ("BF16", "float32"))  # fmt: skip
"""Types of the matrices of files, and dtypes of models."""

REORDERED = ("deepseek2", "gpt-oss", "qwen35", "qwen35moe")
"""Architectures with matrices that are put together or reordered for transformers, which takes blocks."""

Files = Callable[..., Path]


@pytest.fixture(scope="module")
def file_of(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Files of families, each written once."""

    @functools.cache
    def file_of(name: str, stored: str = "Q8_0") -> Path:
        return written(tmp_path_factory.mktemp("family"), name, stored)

    return file_of


def source_of(path: Path, dtype: str = "float32") -> ModelFile:
    return ModelFile(str(path), path, dtype)


def loaded(path: Path, dtype: str = "float32", **more: Any) -> Any:
    return load(ModelConfig(str(path), dtype=dtype, **more)).model


@functools.cache
def through_transformers(path: Path, dtype: str = "float32") -> Any:
    """The model of a file of `file_of`, loaded once."""
    return loaded(path, dtype)


def logits_of(model: Any) -> numpy.ndarray:
    """transformers' own logits of `TEXT`, [n, V]."""
    return model(torch.tensor([TEXT])).logits[0].float().numpy()


def difference_of(found: numpy.ndarray, expected: numpy.ndarray) -> float:
    return float(numpy.abs(found - expected).max() / numpy.abs(expected).max())


def served_logits(path: Path, positions: Positions | None = None) -> numpy.ndarray:
    """The runtime's logits [n, V] after `PROMPT` tokens of `TEXT`, and after every later one."""
    source = source_of(path)
    served = source.model(source.describe(print), ()).serve(
        CacheConfig("recent", window=64, chunk=16, positions=positions)
    )
    return numpy.stack([served.forward(TEXT[:PROMPT]), *(served.forward([token]) for token in TEXT[PROMPT:])])


@pytest.mark.parametrize("name", thinned(zip(GGUF), lambda name: GGUF.index(name) % 4 == 0))
def test_as_transformers_reads_them(name: str, file_of: Files) -> None:
    model = MODELS[name].make()
    theirs = through_transformers(file_of(name, "F32"))
    weights = theirs.state_dict()
    assert weights.keys() == model.state_dict().keys()
    for key, weight in model.state_dict().items():
        torch.testing.assert_close(weights[key], weight, rtol=1e-6, atol=2e-7)
    assert difference_of(logits_of(theirs), logits_of(model)) < 1e-4


@pytest.mark.parametrize("name", thinned(
    ((name,) for name in GGUF if MODELS[name].in_llama), lambda name: GGUF.index(name) % 4 == 0
))  # fmt: skip
def test_as_llama_cpp_reads_them(name: str, file_of: Files) -> None:
    row = MODELS[name]
    llama.assert_reads(name, file_of(name, "F32"), TEXT, logits_of(row.make()), row.llama_rounding)


def in_make_test(name: str, *form: str) -> bool:
    """A quarter of the families with blocks and in float32, an eighth with the other forms in turn."""
    number = GGUF.index(name)
    return FORMS.index(form) == {0: 0, 2: 1 + number // 8 % (len(FORMS) - 1), 4: 0}.get(number % 8, -1)


@pytest.mark.parametrize(
    ("name", "stored", "dtype"), thinned(((name, *form) for name in GGUF for form in FORMS), in_make_test)
)
def test_described_from_the_file(name: str, stored: str, dtype: str, file_of: Files) -> None:
    """The same matrices and numbers as of transformers' model, and the same logits: of a prompt, and of single tokens.

    Refused where it would have to reorder matrices without blocks.
    """
    path = file_of(name, stored)
    if stored != "Q8_0" and MODELS[name].architecture in REORDERED:
        with pytest.raises(DescriptionError, match=stored):
            source_of(path, dtype).describe(print)
        return
    theirs, found = through_transformers(path, dtype), source_of(path, dtype).describe(print)
    assert difference(found, describe(theirs)) == ""
    if stored != "Q8_0":
        wide = stored == "F32" or (stored == "F16" and dtype == "float32")
        assert found.output.kind == (MatrixKind.FLOAT32 if wide and dtype == "float32" else MatrixKind.BFLOAT16)
    if dtype == "float32":
        assert difference_of(served_logits(path, MODELS[name].positions), logits_of(theirs)[PROMPT - 1 :]) < 2e-3


@pytest.mark.parametrize(("name", "writes", "dtype"), thinned(
    itertools.product(GGUF, ("torch", "runtime"), ("float32", "bfloat16")),
    lambda name, *rest: {0: ("torch", "float32"), 7: ("runtime", "bfloat16")}.get(GGUF.index(name) % 14) == rest,
))  # fmt: skip
def test_described_from_weights_that_were_packed_before(
    name: str, writes: str, dtype: str, file_of: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By either; transformers maps the file that the runtime has written, and does not write another."""
    keep_all(tmp_path, monkeypatch)
    path = file_of(name)
    if writes == "runtime":
        source_of(path, dtype).describe(print, print)
    else:
        loaded(path, dtype)
    kept = next((tmp_path / "cache" / "packed").glob("*/model.safetensors"))
    before = kept.stat()
    assert difference(source_of(path, dtype).describe(print, print), describe(loaded(path, dtype))) == ""
    assert (before.st_ino, before.st_mtime_ns) == (kept.stat().st_ino, kept.stat().st_mtime_ns)
    if ARCHITECTURES[MODELS[name].architecture].stored_as_in_gguf:
        return  # of which transformers keeps another folder
    assert source_of(path, dtype).packed_difference() == ""
    kept.write_bytes(kept.read_bytes()[:1000])
    with pytest.raises(DescriptionError, match="damaged"):
        source_of(path, dtype).describe(print)


@pytest.mark.every(2)
@needs_library
@pytest.mark.parametrize(
    "name", with_exhaustive(["Qwen 3.5 with more value heads", "Falcon-H1"], ["Granite 4", "LFM2 with experts"])
)
def test_streams_go_on_from_states(name: str, file_of: Files) -> None:
    """Saved without torch and continued through transformers, and back; undone, and continued twice."""
    theirs, ours = through_both(file_of(name), CacheConfig(window=40, chunk=16))
    with theirs, ours:
        for engine, other in ((ours, theirs), (theirs, ours)):
            engine.reset()
            list(engine.prefill(TEXT[:45]))
            state = engine.state_dict()
            expected = engine.served.forward(TEXT[45:])
            other.load_state_dict(state)
            numpy.testing.assert_allclose(other.served.forward(TEXT[45:]), expected, rtol=0, atol=5e-3)
            engine.load_state_dict(state)
            assert list(engine.tokens) == TEXT[:45]
            numpy.testing.assert_array_equal(engine.served.forward(TEXT[45:]), expected)
            assert engine.counts == other.counts
        for served in (ours.served, theirs.served):
            state = served.state_dict()
            key = next(key for key in state if key.endswith(".conv.0"))
            cut, missing = {**state, key: state[key][:, :, 1:]}, {name: x for name, x in state.items() if name != key}
            for damaged in (cut, missing):
                damaged.pop("checksums")
                with pytest.raises(H2OStreamError, match="fit|missing|recurrent"):
                    served.load_state_dict(checksummed(damaged))


FILE_TYPES = {
    "Q2_K": 10, "Q3_K_M": 12, "Q4_K_M": 15, "Q5_0": 8, "Q5_1": 9, "Q5_K_M": 17, "IQ4_NL": 25, "IQ4_XS": 30,
}  # fmt: skip
"""llama.cpp's numbers of mixtures of block types."""


def quantized(whole: Path, path: Path, kind: str) -> Path:
    """A file of llama.cpp's quantizer."""
    llama_cpp = pytest.importorskip("llama_cpp")
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = FILE_TYPES[kind], 1
    assert not llama_cpp.llama_model_quantize(bytes(whole), bytes(path), ctypes.byref(parameters))
    return path


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", FILE_TYPES)
def test_files_of_its_quantizer(kind: str, tmp_path: Path) -> None:
    """All matrices stay packed, and the logits are those of the unpacked matrices."""
    sizes = {**SIZES, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
    write_model(tmp_path / "whole.gguf", tiny("Llama", **sizes, **THETA)(), "llama")
    path = quantized(tmp_path / "whole.gguf", tmp_path / "quantized.gguf", kind)
    unpacked = loaded(path, quantize="none")
    assert difference_of(served_logits(path), logits_of(unpacked)[PROMPT - 1 :]) < 5e-3


@pytest.mark.parametrize("name", thinned(zip(GGUF), lambda name: name == "Gemma 4"))
def test_described_from_files_of_its_quantizer(name: str, file_of: Files, tmp_path: Path) -> None:
    """In mixtures of block types, with what the quantizer leaves as it is."""
    path = quantized(file_of(name, "F32"), tmp_path / "quantized.gguf", "Q4_K_M")
    assert difference(source_of(path).describe(print), describe(loaded(path))) == ""


@pytest.mark.parametrize("name", thinned(zip(GGUF), lambda name: name in ("DeepSeek V3", "HunYuan MoE")))
def test_described_from_parts(name: str, file_of: Files, tmp_path: Path) -> None:
    whole = file_of(name)
    first = split(whole, tmp_path, 3)[0]
    assert difference(source_of(whole).describe(print), source_of(first).describe(print)) == ""


@pytest.mark.exhaustive
@pytest.mark.skipif(not llama.WHOLE, reason="llama.cpp is not installed: make setup-all")
@pytest.mark.parametrize("name", [name for name in GGUF if MODELS[name].in_llama])
def test_keys_that_are_left_out(name: str, file_of: Files, tmp_path: Path) -> None:
    """What llama.cpp reads without a key is read as it does, or refused."""
    whole, path = Gguf.read(file_of(name, "F32")), tmp_path / "less.gguf"
    for key in (key for key in whole.values if not key.startswith(("general.", "tokenizer."))):
        whole.without(key).write(path)
        if (theirs := llama.logits_apart(path, TEXT)) is None:
            continue
        with suppress(DescriptionError, H2OStreamError):
            ours = served_logits(path, MODELS[name].positions)
            difference = numpy.abs(ours - theirs[PROMPT - 1 :]).max() / numpy.abs(theirs).max()
            assert difference < max(5e-3, 4 * MODELS[name].llama_rounding), key


class TestRefused:
    """What the table does not know is not computed without it."""

    def test_weights(self, tmp_path: Path) -> None:
        path = written(tmp_path, "SmolLM3")
        path.write_bytes(path.read_bytes().replace(b"blk.3.attn_norm.weight", b"blk.3.attn_sinks.weight"[:22]))
        with pytest.raises(DescriptionError, match=r"it has blk\.3\.attn_sinks"):
            source_of(path)

    @pytest.mark.parametrize("key", ["attention.clamp_kqv", "rope.scaling.alpha"])
    def test_parameters(self, key: str, tmp_path: Path) -> None:
        with pytest.raises(DescriptionError, match=f"smollm3.{key} is 2.0"):
            source_of(written(tmp_path, "SmolLM3", **{key: 2.0}))

    def test_a_list_that_is_too_short(self, tmp_path: Path) -> None:
        more = {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True]}
        with pytest.raises(DescriptionError, match="a parameter is missing"):
            source_of(written(tmp_path, "SmolLM3", **more))

    @pytest.mark.parametrize(("name", "refused"), [
        ("SmolLM3", set()), ("Phi 3, LongRoPE", {"absolute"}), ("HunYuan", {"gap", "rolling"}),
    ])  # fmt: skip
    def test_positions(self, name: str, refused: set[str], file_of: Files) -> None:
        assert source_of(file_of(name)).parameters.refused_positions == refused

    def test_an_architecture_without_a_row_is_named(self, tmp_path: Path, own_cache: Path) -> None:
        path = written(tmp_path, "Gemma")
        path.write_bytes(path.read_bytes().replace(b"gemma", b"gemna"))
        with pytest.raises(UnsupportedModelError, match=r"model.gguf cannot be served: .*architecture gemna"):
            load(ModelConfig(str(path)))


def test_layers_that_only_guess_take_no_memory(tmp_path: Path) -> None:
    dense = []
    for guessing in (0, 1):
        source = source_of(written(tmp_path, "SmolLM3", "F32", nextn_predict_layers=guessing))
        dense.append(GgufWeights(source.file, source.architecture, source.parameters, "float32", print).num_dense)
        last = [tensor.shape for name, tensor in source.file.tensors.items() if name.startswith("blk.3.")]
    assert dense[0] - dense[1] == sum(math.prod(shape) for shape in last if len(shape) > 1)


def test_a_step_reads_one_row_of_the_embeddings_of_layers(file_of: Files) -> None:
    file = GgufFile(file_of("Gemma 4"))
    unread = [table.nbytes - table.nbytes // 64 for name, table in file.tensors.items() if "token_embd" in name]
    assert len(unread) == 2
    assert step_bytes(file) == file.nbytes - sum(unread)


def test_the_distance_of_longrope(file_of: Files) -> None:
    parameters = source_of(file_of("Phi 3, LongRoPE")).parameters
    assert (parameters.context, parameters.max_distance) == (2048, 512)


@in_turn("name", TODAY.split())
def test_there_is_a_row(name: str) -> None:
    assert name in ARCHITECTURES


def test_every_row_is_tested() -> None:
    assert {MODELS[name].architecture for name in GGUF} == ARCHITECTURES.keys()
