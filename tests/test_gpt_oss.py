"""gpt-oss from a GGUF file: experts with biases and clamped gates, learned sinks, YaRN."""

from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from gguf import GGMLQuantizationType

from h2o_stream import CacheConfig, attach
from h2o_stream.attachment.sizing import weight_bytes
from h2o_stream.compare.speed.peers import step_bytes
from h2o_stream.config import ModelConfig
from h2o_stream.loading.loading import ModelFile
from h2o_stream.loading.transformers_model import load
from h2o_stream.models.gguf import GgufFile
from h2o_stream.models.packed_experts import SplitExperts
from h2o_stream.native import library
from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.describe import describe
from h2o_stream.native.experts import Experts
from tests.descriptions import difference
from tests.families import EXPERTS, GROUPED, SLIDING, rope, tiny
from tests.gguf_files import write_model
from tests.interpreter import nudged
from tests.test_gguf_families import runtime_model
from tests.test_native_prompt import streamed
from tests.test_native_step import tokens_of
from tests.test_runtime import keep_all
from tests.tolerance import relative_error

pytestmark = pytest.mark.skipif(library.loaded() is None, reason="there is no compiled library")

YARN = rope("yarn", factor=8.0, original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0, truncate=False)
SIZES = {**GROUPED, **EXPERTS, "hidden_size": 64, "intermediate_size": 32, "head_dim": 16}
KEYS: dict[str, Any] = {
    "attention.layer_norm_rms_epsilon": 1e-5, "attention.key_length": 16, "attention.value_length": 16,
    "attention.sliding_window": 10, "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32,
    "rope.freq_base": 10000.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 16,
}  # fmt: skip


def written(folder: Path, model: Any, keys: dict[str, Any], quantize: int = GGMLQuantizationType.Q8_0) -> Path:
    path = folder / "model.gguf"
    write_model(path, model, "gpt-oss", quantize=quantize, **keys)
    return path


def model_of(**more: Any) -> Any:
    return nudged(tiny("GptOss", **{**SIZES, **YARN, "sliding_window": 10, "layer_types": SLIDING, **more})())


@torch.no_grad()
def test_the_numbers_of_the_model(tmp_path: Path) -> None:
    model, ids = rounded(model_of()), tokens_of(1, 30)
    path = written(tmp_path, model, KEYS)
    loaded = load(ModelConfig(str(path), dtype="float32")).model
    assert isinstance(loaded.model.layers[1].mlp.experts, SplitExperts)
    assert relative_error(loaded(ids).logits, model(ids).logits) < 0.05  # activations are rounded


def rounded(model: Any) -> Any:
    """A model whose matrices Q8_0 stores as they are."""
    for name, weight in model.named_parameters():
        if weight.dim() == 3 or name.endswith(("proj.weight", "lm_head.weight", "embed_tokens.weight")):
            rows = (weight.mT if weight.dim() == 3 else weight).contiguous().numpy()
            blocks = gguf.quants.quantize(rows, GGMLQuantizationType.Q8_0)
            values = torch.from_numpy(gguf.quants.dequantize(blocks, GGMLQuantizationType.Q8_0))
            weight.copy_(values.mT if weight.dim() == 3 else values)
    return model


def test_the_config(tmp_path: Path) -> None:
    """transformers reads the metadata of RoPE's scaling wrongly, and stops; and it ignores the sliding window."""
    model = model_of()
    config = load(ModelConfig(str(written(tmp_path, model, KEYS)), dtype="float32")).model.config
    for name, value in model.config.rope_parameters.items():
        assert config.rope_parameters[name] == value
    for name in ("sliding_window", "head_dim", "intermediate_size", "num_local_experts", "num_experts_per_tok"):
        assert getattr(config, name) == getattr(model.config, name)
    without = {name: value for name, value in KEYS.items() if "scaling" not in name}
    config = load(ModelConfig(str(written(tmp_path, model, without)), dtype="float32")).model.config
    assert config.rope_parameters["rope_type"] == "default"


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.MXFP4])
def test_native_steps_and_prompts(kind: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packed experts of the file, against the same in torch, whose rounding of activations differs."""
    if kind == GGMLQuantizationType.MXFP4:  # gguf's package cannot write it
        monkeypatch.setattr(gguf.quants, "quantize", mxfp4)
    loaded = load(ModelConfig(str(written(tmp_path, model_of(), KEYS, kind)), dtype="float32")).model
    mlp = describe(loaded).layers[0].mlp
    assert isinstance(mlp, Experts)
    assert mlp.gate.kind == {GGMLQuantizationType.Q8_0: MatrixKind.INT8}.get(kind, MatrixKind.MXFP4)
    with attach(loaded, CacheConfig(window=12)) as cache:
        assert cache.engine_note.startswith("native")
    config, tokens = CacheConfig("recent", window=32, chunk=8), tokens_of(2, 40)
    ours, theirs = (streamed(loaded, config, tokens, engine)[0] for engine in ("auto", "eager"))
    assert relative_error(ours, theirs) < 2e-2


def mxfp4(values: Any, kind: int) -> Any:
    """Random blocks of MXFP4 in place of `values`: a scale of 2 to the power of -2, -1 or 0, and 16 bytes of codes."""
    import numpy as np

    rows, columns = values.reshape(-1, values.shape[-1]).shape
    random = np.random.default_rng(rows)
    blocks = random.integers(0, 256, (rows, columns // 32, 17), np.uint8)
    blocks[..., 0] = random.integers(124, 127, blocks.shape[:2])
    return blocks.reshape(*values.shape[:-1], -1)


@torch.no_grad()
def test_described_from_the_file(tmp_path: Path) -> None:
    """The runtime's description equals that of the model, and so do logits of a prompt and of single tokens."""
    path = written(tmp_path, model_of(), KEYS)
    loaded = load(ModelConfig(str(path), dtype="float32")).model
    assert difference(ModelFile(str(path), path, "float32").describe(print), describe(loaded)) == ""
    model, ids = runtime_model(path), tokens_of(1, 30)
    assert (model.sliding, model.max_distance) == ([10, None], 128)
    served, tokens = model.serve(CacheConfig("recent", window=48, chunk=8)), ids[0].tolist()
    found = [served.forward(tokens[:20]), *(served.forward([token]) for token in tokens[20:])]
    assert relative_error(torch.from_numpy(numpy.stack(found)), loaded(ids).logits[0, 19:]) < 5e-3


def test_described_from_weights_that_were_packed_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the runtime; transformers maps the same file, and does not write another."""
    keep_all(tmp_path, monkeypatch)
    path = written(tmp_path, model_of(), KEYS)
    described = ModelFile(str(path), path, "float32").describe(print, print)
    kept = next((tmp_path / "cache" / "packed").glob("*/model.safetensors"))
    before = kept.stat()
    loaded = load(ModelConfig(str(path), dtype="float32")).model
    assert difference(described, describe(loaded)) == ""
    assert before.st_ino == kept.stat().st_ino


def test_a_step_reads_the_chosen_experts(tmp_path: Path) -> None:
    """Two of four, of the file and of the packed model."""
    path = written(tmp_path, model_of(), {**KEYS, "expert_used_count": 2})
    file, model = GgufFile(path), load(ModelConfig(str(path), dtype="float32")).model
    table = file.tensors["token_embd.weight"]
    experts = sum(tensor.nbytes for tensor in file.tensors.values() if "_exps." in tensor.name)
    assert step_bytes(file) == file.nbytes - experts // 2 - table.nbytes + table.nbytes // table.shape[0]
    tiles = [(name, tensor.nbytes) for name, tensor in model.named_buffers() if name.endswith(".tiles")]
    others = sum(tensor.nbytes for tensor in model.parameters()) + sum(nbytes for _, nbytes in tiles)
    unread = sum(nbytes for name, nbytes in tiles if ".experts." in name) // 2
    embedding = model.get_input_embeddings().tiles.nbytes
    rope = sum(tensor.nbytes for name, tensor in model.named_buffers() if not name.endswith(".tiles"))
    assert weight_bytes(model) == others + rope - unread - embedding + embedding // table.shape[0]
