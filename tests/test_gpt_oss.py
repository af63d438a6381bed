"""gpt-oss from a GGUF file: experts with biases and clamped gates, learned sinks, YaRN."""

import copy
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType

from h2o_stream import CacheConfig, attach
from h2o_stream.attachment.describe import describe
from h2o_stream.compare.speed.peers import step_bytes
from h2o_stream.config import ModelConfig
from h2o_stream.loading.transformers_model import load
from h2o_stream.models.gguf import GgufFile
from h2o_stream.models.packed_experts import SplitExperts
from h2o_stream.native import library
from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.experts import Experts
from tests.family_models import MODELS, written
from tests.native_streams import streamed, tokens_of
from tests.tolerance import relative_error

pytestmark = pytest.mark.skipif(library.loaded() is None, reason="there is no compiled library")

ROW = MODELS["gpt-oss"]


def loaded(path: Path) -> Any:
    return load(ModelConfig(str(path), dtype="float32")).model


@torch.no_grad()
def test_the_numbers_of_the_model(tmp_path: Path) -> None:
    model, ids = rounded(copy.deepcopy(ROW.make())), tokens_of(1, 30)
    packed = loaded(written(tmp_path, "gpt-oss", model=model))
    assert isinstance(packed.model.layers[1].mlp.experts, SplitExperts)
    assert relative_error(packed(ids).logits, model(ids).logits) < 0.05  # activations are rounded


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
    model, config = ROW.make(), loaded(written(tmp_path, "gpt-oss")).config
    for name, value in model.config.rope_parameters.items():
        assert config.rope_parameters[name] == value
    for name in ("sliding_window", "head_dim", "intermediate_size", "num_local_experts", "num_experts_per_tok"):
        assert getattr(config, name) == getattr(model.config, name)
    config = loaded(written(tmp_path, "gpt-oss", **{"rope.scaling.type": "none"})).config
    assert config.rope_parameters["rope_type"] == "default"


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", ["Q8_0", "MXFP4"])
def test_native_steps_and_prompts(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packed experts of the file, against the same in torch, whose rounding of activations differs."""
    if kind == "MXFP4":  # gguf's package cannot write it
        monkeypatch.setattr(gguf.quants, "quantize", mxfp4)
    model = loaded(written(tmp_path, "gpt-oss", kind))
    mlp = describe(model).layers[0].mlp
    assert isinstance(mlp, Experts)
    assert mlp.gate.kind == (MatrixKind.INT8 if kind == "Q8_0" else MatrixKind.MXFP4)
    with attach(model, CacheConfig(window=12)) as cache:
        assert cache.engine_note.startswith("native")
    config, tokens = CacheConfig("recent", window=32, chunk=8), tokens_of(2, 40)
    ours, theirs = (streamed(model, config, tokens, engine)[0] for engine in ("auto", "eager"))
    assert relative_error(ours, theirs) < 2e-2


def mxfp4(values: Any, kind: int) -> Any:
    """Random blocks of MXFP4 in place of `values`: a scale of 2 to the power of -2, -1 or 0, and 16 bytes of codes."""
    import numpy as np

    rows, columns = values.reshape(-1, values.shape[-1]).shape
    random = np.random.default_rng(rows)
    blocks = random.integers(0, 256, (rows, columns // 32, 17), np.uint8)
    blocks[..., 0] = random.integers(124, 127, blocks.shape[:2])
    return blocks.reshape(*values.shape[:-1], -1)


def test_a_step_reads_the_chosen_experts(tmp_path: Path) -> None:
    """Two of four."""
    file = GgufFile(written(tmp_path, "gpt-oss"))
    table = file.tensors["token_embd.weight"]
    experts = sum(tensor.nbytes for tensor in file.tensors.values() if "_exps." in tensor.name)
    assert step_bytes(file) == file.nbytes - experts // 2 - table.nbytes + table.nbytes // table.shape[0]
