"""GGUF files of models with recurrent layers: the same logits as of the model that they were written from."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from gguf import GGMLQuantizationType

from h2o_stream import CacheConfig, attach
from h2o_stream.config import ModelConfig
from h2o_stream.loading.transformers_model import load
from h2o_stream.models.packed_layers import PackedLinear
from h2o_stream.native import library
from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.describe import describe
from h2o_stream.native.mixers import Mamba2
from h2o_stream.runtime.sources import ModelFile
from tests import llama
from tests.descriptions import difference
from tests.fixtures import thinned, with_exhaustive
from tests.gguf_files import write_model
from tests.test_gguf_families import (
    COMMON,
    EXPERT_KEYS,
    EXPERTS,
    HEAD,
    PROMPT,
    SCALE_KEYS,
    SCALES,
    SIZES,
    SMALL,
    SMALL_KEYS,
    TEXT,
    difference_of,
    logits_of,
    model,
    served_logits,
)  # fmt: skip
from tests.test_gguf_names import THETA
from tests.test_runtime import keep_all, through_both

LAYERS = {"layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"]}
NORM = {"attention.layer_norm_rms_epsilon": 1e-6}
STATE_SPACE = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_expand": 2, "mamba_d_conv": 4}
STATE_SPACE_KEYS = {"ssm.conv_kernel": 4, "ssm.state_size": 32, "ssm.inner_size": 128, "ssm.time_step_rank": 8}
GRANITE_KEYS: dict[str, Any] = {
    **NORM, **SCALE_KEYS, **STATE_SPACE_KEYS, "attention.head_count_kv": [0, 2, 0, 2], "rope.freq_base": 10000.0,
    "rope.dimension_count": 16, "expert_shared_feed_forward_length": 96, "rope.scaling.finetuned": False,
}  # fmt: skip
QWEN_KEYS: dict[str, Any] = {
    **NORM, "attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 8,
    "rope.freq_base": 5000.0,
    "rope.dimension_sections": [2, 1, 1, 0], "ssm.conv_kernel": 4, "ssm.state_size": 32, "ssm.group_count": 2,
    "full_attention_interval": 2,
}  # fmt: skip
QWEN = {
    "head_dim": 32, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip


def granite(groups: int, **settings: Any) -> Callable[[], Any]:
    return model("GraniteMoeHybrid", **{**SIZES, **SCALES, **STATE_SPACE, **LAYERS, **settings}, mamba_n_groups=groups,
                 shared_intermediate_size=96, rms_norm_eps=1e-6)  # fmt: skip


def qwen(heads: int) -> tuple[str, Callable[[], Any], dict[str, Any]]:
    keys = {**QWEN_KEYS, "ssm.time_step_rank": heads, "ssm.inner_size": 32 * heads}
    return "qwen35", model("Qwen3_5", "Qwen3_5Text", **{**SIZES, **QWEN, **LAYERS}, linear_num_value_heads=heads), keys


def qwen_with_experts(architecture: str, *kinds: str) -> tuple[str, Callable[[], Any], dict[str, Any]]:
    made = model(*kinds, **{**SIZES, **QWEN, **LAYERS, **EXPERTS, **SMALL}, linear_num_value_heads=4,
                 shared_expert_intermediate_size=64)  # fmt: skip
    keys = {**QWEN_KEYS, **EXPERT_KEYS, **SMALL_KEYS, "ssm.time_step_rank": 4, "ssm.inner_size": 128}
    return architecture, made, {**keys, "expert_shared_feed_forward_length": 64}


def nemotron(feed_forward: str, **settings: Any) -> Callable[[], Any]:
    """Without a limit of steps in prompts, which no file has."""
    make = model("NemotronH", **{key: SIZES[key] for key in SIZES if key != "num_hidden_layers"},
        layer_types=["linear_attention", feed_forward, "full_attention", feed_forward], mamba_num_heads=8,
        mamba_head_dim=16, n_groups=2, ssm_state_size=32, layer_norm_epsilon=1e-6, **settings)  # fmt: skip

    def unlimited() -> Any:
        made = make()
        made.model.layers[0].mixer.time_step_limit = (0.0, float("inf"))
        return made

    return unlimited


NEMOTRON_KEYS: dict[str, Any] = {
    **STATE_SPACE_KEYS, **HEAD, "ssm.group_count": 2, "attention.head_count_kv": [0, 0, 2, 0],
    "attention.layer_norm_epsilon": 1e-6, "rope.dimension_count": 16, "rope.scaling.finetuned": False,
}  # fmt: skip

CASES = {
    "Granite 4": ("granitehybrid", granite(1, num_local_experts=0), {**GRANITE_KEYS, "ssm.group_count": 1}),
    "Granite 4 with experts": (
        "granitehybrid",
        granite(2, **{**EXPERTS, "num_local_experts": 4}),
        {**GRANITE_KEYS, "ssm.group_count": 2, "expert_count": 4, "expert_used_count": 2},
    ),
    "Qwen 3.5": qwen(2),
    "Qwen 3.5 with more value heads": qwen(6),
    "Qwen 3.5 with experts": qwen_with_experts("qwen35moe", "Qwen3_5Moe", "Qwen3_5MoeText"),
    "Qwen3-Next": qwen_with_experts("qwen3next", "Qwen3Next"),
    "Falcon-H1": (
        "falcon-h1",
        model(
            "FalconH1",
            **{**SIZES, **STATE_SPACE, **THETA, "mamba_n_groups": 2, "mamba_d_ssm": 128},
            rms_norm_eps=1e-6,
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
        ),
        {**COMMON, **STATE_SPACE_KEYS, "ssm.group_count": 2},
    ),
    "Falcon-H1 without norms": (
        "falcon-h1",
        model("FalconH1", **{**SIZES, **STATE_SPACE, **THETA, "mamba_d_ssm": 128}, rms_norm_eps=1e-6),
        {**COMMON, **STATE_SPACE_KEYS, "ssm.group_count": 1},
    ),
    "Nemotron-H": (
        "nemotron_h",
        nemotron("mlp"),
        {**NEMOTRON_KEYS, "feed_forward_length": [0, 96, 0, 96]},
    ),
    "Nemotron-H with experts": (
        "nemotron_h_moe",
        nemotron(
            "moe",
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=64,
            routed_scaling_factor=1.7,
        ),
        {
            **NEMOTRON_KEYS,
            **EXPERT_KEYS,
            **SMALL_KEYS,
            "feed_forward_length": [0, 32, 0, 32],
            "expert_shared_feed_forward_length": 64,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.7,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
        },
    ),
    "LFM2 with experts": (
        "lfm2moe",
        model(
            "Lfm2Moe",
            **THETA,
            **{**EXPERTS, **SMALL},
            norm_eps=1e-6,
            num_dense_layers=1,
            layer_types=["conv", "full_attention"] * 2,
        ),
        {
            **COMMON,
            **EXPERT_KEYS,
            **SMALL_KEYS,
            "attention.head_count_kv": [0, 2, 0, 2],
            "shortconv.l_cache": 3,
            "vocab_size": 64,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
        },
    ),
}
each_case = pytest.mark.parametrize("name", CASES)


def written(name: str, folder: Path, quantize: GGMLQuantizationType | None = None) -> Path:
    architecture, make, keys = CASES[name]
    write_model(folder / "model.gguf", make(), architecture, quantize, **keys)
    return folder / "model.gguf"


@pytest.mark.every(2)
@pytest.mark.parametrize("name", with_exhaustive([*CASES][1::2], [*CASES][::2]))
def test_as_transformers_has_them(name: str, tmp_path: Path) -> None:
    loaded = load(ModelConfig(str(written(name, tmp_path)), dtype="float32"))
    assert difference_of(logits_of(loaded.model), logits_of(CASES[name][1]())) < 1e-4


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "dtype"), thinned(
    product(CASES, ("float32", "bfloat16")), lambda name, dtype: (dtype == "float32") == [*CASES].index(name) % 2
))  # fmt: skip
def test_described_from_the_file(name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch: the same matrices and numbers as of the model, and the same logits; packed before, too."""
    path = written(name, tmp_path, GGMLQuantizationType.Q8_0)
    expected = load(ModelConfig(str(path), dtype=dtype)).model
    assert difference(ModelFile(str(path), path, dtype).describe(print), describe(expected)) == ""
    if dtype == "float32":
        assert difference_of(served_logits(path), logits_of(expected)[PROMPT - 1 :]) < 2e-3
    keep_all(tmp_path, monkeypatch)
    for _ in range(2):  # written, and mapped
        described = ModelFile(str(path), path, dtype).describe(print, print)
        assert len([*(tmp_path / "cache" / "packed").glob("*/model.safetensors")]) == 1
        assert difference(described, describe(expected)) == ""


def test_biases_of_matrices_that_are_not_packed(tmp_path: Path) -> None:
    biased = granite(1, num_local_experts=0, mamba_proj_bias=True)()
    for name, bias in biased.named_parameters():
        if name.endswith("proj.bias"):
            torch.nn.init.normal_(bias)
    write_model(tmp_path / "model.gguf", biased, "granitehybrid", None, **{**GRANITE_KEYS, "ssm.group_count": 1})
    expected = load(ModelConfig(str(tmp_path / "model.gguf"), dtype="float32")).model
    described = ModelFile("x", tmp_path / "model.gguf", "float32").describe(print)
    mixer = described.layers[0].mixer
    assert isinstance(mixer, Mamba2)
    assert mixer.projections[0].bias is not None
    assert difference(described, describe(expected)) == ""


@pytest.mark.every(3)
@each_case
def test_as_llama_cpp_reads_them(name: str, tmp_path: Path) -> None:
    llama.assert_reads(name, written(name, tmp_path), TEXT, logits_of(CASES[name][1]()), 1e-4)


@pytest.mark.every(2)
@pytest.mark.skipif(library.loaded() is None, reason="there is no compiled library")
@pytest.mark.parametrize("name", thinned(zip(CASES), lambda name: [*CASES].index(name) % 4 == 0))
def test_packed_and_native(name: str, tmp_path: Path) -> None:
    """Matrices keep the file's format, fused ones too; steps are native and give the logits of the packed model."""
    loaded = load(ModelConfig(str(written(name, tmp_path, GGMLQuantizationType.Q8_0)), dtype="float32")).model
    kinds = {module.kind for module in loaded.modules() if isinstance(module, PackedLinear)}
    assert kinds == {MatrixKind.INT8}
    expected = torch.from_numpy(logits_of(loaded))
    tokens = torch.tensor([TEXT])
    with attach(loaded, CacheConfig("recent", window=64, chunk=16)) as cache, torch.no_grad():
        assert cache.engine_note.startswith("native")
        found = [loaded(tokens[:, :40], past_key_values=cache).logits[0, -1:]]
        found += [loaded(tokens[:, n : n + 1], past_key_values=cache).logits[0] for n in range(40, len(TEXT))]
    assert difference_of(torch.cat(found).numpy(), expected[39:].numpy()) < 2e-3


@pytest.mark.every(2)
@pytest.mark.skipif(library.loaded() is None, reason="there is no compiled library")
@pytest.mark.parametrize(
    "name", with_exhaustive(["Qwen 3.5 with more value heads", "Falcon-H1"], ["Granite 4", "LFM2 with experts"])
)
def test_streams_go_on_from_states(name: str, tmp_path: Path) -> None:
    """Saved without torch and continued through transformers, and back; undone, and continued twice."""
    path = written(name, tmp_path, GGMLQuantizationType.Q8_0)
    theirs, ours = through_both(path, CacheConfig(window=40, chunk=16))
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
