"""Experts of GGUF files, packed in torch: the numbers of unpacked ones, and files that keep theirs unpacked.

Those of gpt-oss have biases and clamped gates.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import nn

from h2o_lab.peers import step_bytes
from h2o_stream import CacheConfig
from h2o_stream.attachment.describe import describe
from h2o_stream.config import ModelConfig
from h2o_stream.loading.transformers_model import load
from h2o_stream.models.gguf import GgufFile
from h2o_stream.models.packed_experts import SplitExperts, is_plain, split_experts
from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.experts import Experts
from tests.families import EXPERTS, GROUPED, tiny
from tests.family_models import MODELS, TEXT, written
from tests.fixtures import with_exhaustive
from tests.native_builds import needs_library
from tests.native_streams import streamed, tokens_of
from tests.tolerance import relative_error

pytestmark = needs_library

NAMES = ["Qwen 2 MoE", "Qwen 3 MoE", "gpt-oss"]


def loaded(path: Path, **settings: Any) -> Any:
    return load(ModelConfig(str(path), dtype="float32", **settings)).model


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_numbers_of_unpacked_ones(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, name)
    packed, dense = (loaded(path, quantize=quantize) for quantize in ("auto", "none"))
    assert isinstance(packed.model.layers[1].mlp.experts, SplitExperts)
    assert isinstance(dense.model.layers[1].mlp.experts.gate_up_proj, nn.Parameter)
    ids = torch.tensor([TEXT[:40]])
    assert relative_error(packed(ids).logits, dense(ids).logits) < 6e-3  # activations are rounded to 14 bits


def test_experts_without_blocks_stay_unpacked(tmp_path: Path) -> None:
    path = written(tmp_path, "Qwen 3 MoE", "F16")
    model = loaded(path)
    assert not any(isinstance(module, SplitExperts) for module in model.modules())


@pytest.mark.parametrize(("kind", "plain"), [
    ("Mixtral", True), ("Qwen3Moe", True), ("GraniteMoe", True), ("GptOss", False),
])  # fmt: skip
def test_which_are_split(kind: str, plain: bool) -> None:
    model = tiny(kind, **GROUPED, **EXPERTS)()
    experts = next(module for name, module in model.named_modules() if name.endswith("experts"))
    assert is_plain(experts) is plain


def test_rows_within_a_tile_stay_together() -> None:
    model = tiny("Qwen3Moe", **GROUPED, **{**EXPERTS, "moe_intermediate_size": 24})()
    before = [type(module) for module in model.modules()]
    split_experts(model)
    assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize(("name", "kind", "rows"), with_exhaustive(
    [("Qwen 2 MoE", "Q8_0", 1), ("Qwen 3 MoE", "Q8_0", 3), ("gpt-oss", "MXFP4", 2)],
    [("Qwen 2 MoE", "Q8_0", 3), ("Qwen 3 MoE", "Q8_0", 1), ("gpt-oss", "Q8_0", 2)],
))  # fmt: skip
def test_steps_and_prompts_are_native(
    name: str, kind: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every stream has its own experts. In torch, activations are rounded otherwise."""
    if kind == "MXFP4":  # gguf's package cannot write it
        monkeypatch.setattr(gguf.quants, "quantize", mxfp4)
    model = loaded(written(tmp_path, name, kind))
    mlp = describe(model).layers[1].mlp
    assert isinstance(mlp, Experts)
    assert mlp.gate.kind == (MatrixKind.INT8 if kind == "Q8_0" else MatrixKind.MXFP4)
    config, tokens = CacheConfig("recent", window=80), tokens_of(rows, 60)
    parts = [20, *[1] * 20]
    ours, theirs = (streamed(model, config, tokens, engine, parts=parts)[0] for engine in ("auto", "eager"))
    assert relative_error(ours, theirs) < (2e-2 if name == "gpt-oss" else 5e-3)


def mxfp4(values: Any, kind: int) -> Any:
    """Random blocks of MXFP4 in place of `values`: a scale of 2 to the power of -2, -1 or 0, and 16 bytes of codes."""
    rows, columns = values.reshape(-1, values.shape[-1]).shape
    random = np.random.default_rng(rows)
    blocks = random.integers(0, 256, (rows, columns // 32, 17), np.uint8)
    blocks[..., 0] = random.integers(124, 127, blocks.shape[:2])
    return blocks.reshape(*values.shape[:-1], -1)


def test_the_config_of_gpt_oss(tmp_path: Path) -> None:
    """transformers reads the metadata of RoPE's scaling wrongly, and stops; and it ignores the sliding window."""
    model, config = MODELS["gpt-oss"].make(), loaded(written(tmp_path, "gpt-oss")).config
    for name, value in model.config.rope_parameters.items():
        assert config.rope_parameters[name] == value
    for name in ("sliding_window", "head_dim", "intermediate_size", "num_local_experts", "num_experts_per_tok"):
        assert getattr(config, name) == getattr(model.config, name)
    config = loaded(written(tmp_path, "gpt-oss", **{"rope.scaling.type": "none"})).config
    assert config.rope_parameters["rope_type"] == "default"


def test_a_step_reads_the_chosen_experts(tmp_path: Path) -> None:
    """Two of four."""
    file = GgufFile(written(tmp_path, "gpt-oss"))
    table = file.tensors["token_embd.weight"]
    experts = sum(tensor.nbytes for tensor in file.tensors.values() if "_exps." in tensor.name)
    assert step_bytes(file) == file.nbytes - experts // 2 - table.nbytes + table.nbytes // table.shape[0]
