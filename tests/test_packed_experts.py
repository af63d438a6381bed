"""Experts of GGUF files, packed in torch: the numbers of unpacked ones, and files that keep theirs unpacked."""

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

from h2o_stream import attach
from h2o_stream.config import CacheConfig, ModelConfig
from h2o_stream.loading.transformers_model import load
from h2o_stream.models.packed_experts import SplitExperts, is_plain, split_experts
from h2o_stream.native import library
from tests.families import EXPERTS, GROUPED, tiny
from tests.family_models import TEXT, written
from tests.fixtures import thinned
from tests.native_streams import streamed, tokens_of
from tests.tolerance import relative_error

pytestmark = pytest.mark.skipif(library.loaded() is None, reason="there is no compiled library")

NAMES = ["Qwen 2 MoE", "Qwen 3 MoE"]


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_numbers_of_unpacked_ones(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, name)
    packed, dense = (
        load(ModelConfig(str(path), dtype="float32", quantize=quantize)).model for quantize in ("auto", "none")
    )
    assert isinstance(packed.model.layers[1].mlp.experts, SplitExperts)
    assert isinstance(dense.model.layers[1].mlp.experts.gate_up_proj, nn.Parameter)
    ids = torch.tensor([TEXT[:40]])
    assert relative_error(packed(ids).logits, dense(ids).logits) < 6e-3  # activations are rounded to 14 bits


def test_experts_without_blocks_stay_unpacked(tmp_path: Path) -> None:
    path = written(tmp_path, "Qwen 3 MoE", "F16")
    model = load(ModelConfig(str(path), dtype="float32")).model
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


@pytest.mark.parametrize(("name", "rows"), thinned(
    product(NAMES, (1, 3)), lambda name, rows: rows == 1 + 2 * NAMES.index(name)
))  # fmt: skip
def test_steps_and_prompts_are_native(name: str, rows: int, tmp_path: Path) -> None:
    """Every stream has its own experts."""
    model = load(ModelConfig(str(written(tmp_path, name)), dtype="float32")).model
    config, tokens = CacheConfig(window=80), tokens_of(rows, 60)
    with attach(model, config) as cache:
        assert cache.engine_note == f"native, {library.name()}"
    parts = [20, *[1] * 20]
    ours, theirs = (streamed(model, config, tokens, engine, parts=parts)[0] for engine in ("auto", "eager"))
    assert relative_error(ours, theirs) < 5e-3  # activations are rounded to 14 bits
