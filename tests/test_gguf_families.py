"""Every row of the table of architectures: the same logits from a file as from the model that it was written from.

Files are like those of llama.cpp's converter; llama.cpp itself reads them, too, where it is installed.
"""

import ctypes
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import PreTrainedModel

from h2o_stream.attachment import retrieval_heads
from h2o_stream.attachment.sizing import weight_bytes
from h2o_stream.attachment.support import layer_specs
from h2o_stream.compare.speed.peers import step_bytes
from h2o_stream.config import CacheConfig, ModelConfig, Positions
from h2o_stream.loading.loading import ModelFile
from h2o_stream.loading.transformers_model import load
from h2o_stream.models import gguf_export
from h2o_stream.models.gguf import GgufFile
from h2o_stream.native.describe import describe
from h2o_stream.native.description import DescriptionError
from h2o_stream.runtime.families import ARCHITECTURES
from h2o_stream.runtime.gguf_weights import GgufWeights
from h2o_stream.runtime.heads import attention_to_copy
from h2o_stream.runtime.model import RuntimeModel
from tests import llama
from tests.descriptions import difference
from tests.families import tiny
from tests.fixtures import thinned
from tests.gguf_files import write_model
from tests.test_gguf_names import BASE, NORM, PARTIAL, THETA
from tests.test_runtime import MODELS, keep_all

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEAD = {"attention.key_length": 16, "attention.value_length": 16}
COMMON = {**BASE, **HEAD, "attention.layer_norm_rms_epsilon": 1e-6}
LAYERED = {**NORM, **HEAD, **BASE}
HALF = {"rope.dimension_count": 8}
EXPERT_NAMES = ("num_local_experts", "num_experts", "n_routed_experts")
EXPERTS = {**dict.fromkeys(EXPERT_NAMES, 4), "num_experts_per_tok": 2}
EXPERT_KEYS = {"expert_count": 4, "expert_used_count": 2}
SMALL = {"moe_intermediate_size": 32}
SMALL_KEYS = {"expert_feed_forward_length": 32}
SLIDING = {"sliding_window": 24, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
SLIDING_KEYS: dict[str, Any] = {
    "attention.sliding_window": 24, "attention.sliding_window_pattern": [True, True, True, False],
}  # fmt: skip
LONGROPE = {"short": [1.0, 1.1, 1.2, 1.3], "long": [1.0, 2.0, 4.0, 4.0]}
SCALES = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 4.0,
}  # fmt: skip
SCALE_KEYS = {"embedding_scale": 3.0, "residual_scale": 0.5, "attention.scale": 0.2, "logit_scale": 4.0}
SHARED = {**EXPERTS, **SMALL, "first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.7}
SHARED_KEYS: dict[str, Any] = {
    **EXPERT_KEYS, **SMALL_KEYS, "expert_shared_count": 1, "leading_dense_block_count": 1, "expert_gating_func": 2,
    "expert_weights_scale": 1.7, "expert_group_count": 1, "expert_group_used_count": 1,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip
LATENT_KEYS: dict[str, Any] = {
    "attention.head_count_kv": 1, "attention.kv_lora_rank": 32, "attention.key_length": 48,
    "attention.value_length": 32, "attention.key_length_mla": 48, "attention.value_length_mla": 32,
    "rope.dimension_count": 16, "vocab_size": 64,
}  # fmt: skip
SLIDING_AND_FULL = ["sliding_attention", "full_attention"]
GEMMA_3N: dict[str, Any] = {
    "num_hidden_layers": 25, "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 5, "sliding_window": 24,
    "hidden_size": 96, "intermediate_size": 256, "num_kv_shared_layers": 5, "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 64, "laurel_rank": 64, "final_logit_softcapping": 30.0,
}  # fmt: skip
GEMMA_3N_KEYS: dict[str, Any] = {
    **COMMON, "attention.sliding_window": 24, "attention.sliding_window_pattern": ([True] * 4 + [False]) * 5,
    "attention.shared_kv_layers": 5, "embedding_length_per_layer_input": 256, "altup.num_inputs": 4,
    "altup.active_idx": 0, "activation_sparsity_scale": [1.6448535919189453] * 10 + [-math.inf] * 15,
    "rope.freq_base": 1e6, "rope.freq_base_swa": 10000.0, "final_logit_softcapping": 30.0,
}  # fmt: skip
GEMMA_4: dict[str, Any] = {
    "num_hidden_layers": 6, "layer_types": SLIDING_AND_FULL * 3, "sliding_window": 24,
    "global_head_dim": 32, "vocab_size_per_layer_input": 64, "tie_word_embeddings": False,
    "final_logit_softcapping": 30.0, "rope_parameters": {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 5000.0}},
}  # fmt: skip
GEMMA_4_KEYS: dict[str, Any] = {
    **COMMON, "attention.key_length": 32, "attention.value_length": 32, "attention.key_length_swa": 16,
    "attention.value_length_swa": 16, "attention.sliding_window": 24,
    "attention.sliding_window_pattern": [True, False] * 3, "rope.dimension_count": 32, "rope.dimension_count_swa": 16,
    "rope.freq_base_swa": 10000.0, "final_logit_softcapping": 30.0,
}  # fmt: skip
DEEPSEEK_YARN = {"rope_parameters": {
    "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 0.7,
    "mscale_all_dim": 0.7,
}}  # fmt: skip
DEEPSEEK_YARN_KEYS: dict[str, Any] = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128,
    "rope.scaling.yarn_log_multiplier": 0.07,
}  # fmt: skip
TEXT = [number * 7 % 61 + 3 for number in range(60)]
PROMPT = 40


@dataclass(frozen=True)
class Case:
    """A family: its architecture in llama.cpp, a tiny model, and the metadata of its file.

    Attributes:
        architecture: llama.cpp's name.
        make: makes the model.
        keys: metadata of the file.
        tables: of RoPE's factors.
        in_llama: whether llama.cpp computes the same with so small a model.
        rounding: of our logits, relative to the largest.
        llama_rounding: of llama.cpp's, which has a table of GELU.
        positions: where RoPE sees the kept tokens.
    """

    architecture: str
    make: Callable[[], PreTrainedModel]
    keys: dict[str, Any]
    tables: dict[str, list[float]] | None = None
    in_llama: bool = True
    rounding: float = 2e-3
    llama_rounding: float = 1e-4
    positions: Positions | None = None


def model(kind: str, config_kind: str = "", **settings: Any) -> Callable[[], PreTrainedModel]:
    """Makes a tiny model whose norms and biases are not trivial."""
    make = tiny(kind, config_kind, **{**SIZES, **settings})

    def changed() -> PreTrainedModel:
        made, generator = make(), torch.Generator().manual_seed(3)
        for weights in made.state_dict().values():
            if weights.ndim == 1:
                weights += 0.1 * torch.randn(weights.shape, generator=generator)
        return made

    return functools.cache(changed)


def calm(make: Callable[[], PreTrainedModel]) -> Callable[[], PreTrainedModel]:
    """Makes a model of many layers that each add little, as otherwise it amplifies rounding by orders of magnitude."""

    def changed() -> PreTrainedModel:
        made = make()
        for name, weights in made.state_dict().items():
            if ".post_" in name or "post_laurel" in name:
                weights *= 0.1
        return made

    return functools.cache(changed)


CASES = {
    "SmolLM3": Case("smollm3", model("SmolLM3", **THETA, no_rope_layers=[1, 1, 1, 0]), COMMON),
    "LFM2": Case(
        "lfm2",
        model("Lfm2", **THETA, norm_eps=1e-6, block_auto_adjust_ff_dim=False,
        layer_types=["conv", "full_attention", "conv", "full_attention"]),
        {**COMMON, "attention.head_count_kv": [0, 2, 0, 2], "shortconv.l_cache": 3, "vocab_size": 64},
    ),
    "Arcee": Case("arcee", model("Arcee", **THETA, rms_norm_eps=1e-6), COMMON),
    "GLM": Case("chatglm", model("Glm", **PARTIAL, attention_bias=True), {**COMMON, **HALF}),
    "GLM-4": Case("glm4", model("Glm4", **PARTIAL, attention_bias=True, rms_norm_eps=1e-6), {**COMMON, **HALF}),
    "GLM-4 MoE": Case(
        "glm4moe",
        model("Glm4Moe", **PARTIAL, **SHARED, use_qk_norm=True, attention_bias=True, rms_norm_eps=1e-6),
        {**COMMON, **HALF, **SHARED_KEYS, "expert_weights_norm": True},
    ),
    "dots.llm1": Case(
        "dots1",
        model("Dots1", **THETA, num_key_value_heads=4, **SHARED, layer_types=["full_attention"] * 4,
        norm_topk_prob=True),
        {**COMMON, **SHARED_KEYS, "expert_weights_norm": True},
    ),
    "DeepSeek V2 Lite": Case(
        "deepseek2",
        model("DeepseekV2", **LATENT, **SHARED, **DEEPSEEK_YARN, num_hidden_layers=26, q_lora_rank=None, n_group=1,
        topk_group=1, topk_method="greedy", initializer_range=0.1),
        {**COMMON, **LATENT_KEYS, **SHARED_KEYS, **DEEPSEEK_YARN_KEYS, "expert_gating_func": 1},
    ),
    "DeepSeek V3": Case(
        "deepseek2",
        model("DeepseekV3", **THETA, **LATENT, **{**SHARED, **dict.fromkeys(EXPERT_NAMES, 8)}, q_lora_rank=32,
        n_group=4, topk_group=2),
        {**COMMON, **LATENT_KEYS, **SHARED_KEYS, "attention.q_lora_rank": 32, "expert_weights_norm": True}
        | {"expert_count": 8, "expert_group_count": 4, "expert_group_used_count": 2},
    ),
    "ERNIE 4.5": Case("ernie4_5", model("Ernie4_5", **THETA, rms_norm_eps=1e-6), COMMON),
    "ERNIE 4.5 MoE": Case(
        "ernie4_5-moe",
        model("Ernie4_5_Moe", **THETA, **SMALL, rms_norm_eps=1e-6, moe_num_experts=4, moe_k=2, moe_layer_start_index=1,
        moe_layer_end_index=3, moe_num_shared_experts=2),
        {**COMMON, **EXPERT_KEYS, **SMALL_KEYS, "interleave_moe_layer_step": 1, "leading_dense_block_count": 1}
        | {"expert_shared_count": 2, "expert_shared_feed_forward_length": 64},
    ),
    "Mistral Small 3": Case("mistral3", model("Mistral", **THETA, sliding_window=None), COMMON),
    "Ministral 3": Case(
        "mistral3",
        model("Ministral3", rms_norm_eps=1e-6, rope_parameters={"rope_type": "yarn", "rope_theta": 5000.0,
        "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}),
        {**COMMON, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "attention.temperature_scale": 0.1}
        | {"rope.scaling.original_context_length": 32, "rope.scaling.yarn_log_multiplier": 1.0},
        positions="absolute",
    ),
    "OLMo 2": Case("olmo2", model("Olmo2", **THETA, rms_norm_eps=1e-6), COMMON),
    "OLMo 3": Case(
        "olmo2",
        model("Olmo3", **SLIDING, rms_norm_eps=1e-6, rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            "full_attention": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0,
            "original_max_position_embeddings": 128}}),
        {**COMMON, **SLIDING_KEYS, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
        | {"rope.scaling.original_context_length": 128},
    ),
    "OLMoE": Case(
        "olmoe", model("Olmoe", **THETA, num_key_value_heads=4, **EXPERTS, rms_norm_eps=1e-6),
        {**COMMON, **EXPERT_KEYS},
    ),
    "EXAONE 4": Case(
        "exaone4", model("Exaone4", **THETA, **SLIDING, rms_norm_eps=1e-6), {**COMMON, **SLIDING_KEYS}, in_llama=False
    ),
    "EXAONE 4, all full": Case(
        "exaone4", model("Exaone4", **THETA, rms_norm_eps=1e-6, sliding_window=None,
        layer_types=["full_attention"] * 4), COMMON,
    ),
    "HunYuan": Case("hunyuan-dense", model("HunYuanDenseV1", **THETA, rms_norm_eps=1e-6), COMMON, positions="absolute"),
    "HunYuan MoE": Case(
        "hunyuan-moe",
        model("HunYuanMoEV1", **THETA, rms_norm_eps=1e-6, num_experts=4, moe_topk=2),
        {**COMMON, **EXPERT_KEYS, "expert_feed_forward_length": 96, "expert_shared_count": 1}
        | {"expert_shared_feed_forward_length": 96},
        positions="absolute",
    ),
    "Seed-OSS": Case("seed_oss", model("SeedOss", **THETA), COMMON),
    "Cohere": Case("command-r", model("Cohere", **THETA, logit_scale=0.25), {**LAYERED, "logit_scale": 0.25}),
    "Cohere 2": Case(
        "cohere2", model("Cohere2", **THETA, **SLIDING, logit_scale=0.25),
        {**LAYERED, **SLIDING_KEYS, "logit_scale": 0.25},
    ),
    "Granite": Case("granite", model("Granite", **THETA, **SCALES), {**COMMON, **SCALE_KEYS}),
    "Granite MoE": Case(
        "granitemoe", model("GraniteMoe", **THETA, **EXPERTS, **SCALES), {**COMMON, **EXPERT_KEYS, **SCALE_KEYS}
    ),
    "Mixtral": Case("llama", model("Mixtral", **THETA, **EXPERTS, rms_norm_eps=1e-6), {**COMMON, **EXPERT_KEYS}),
    "Gemma": Case("gemma", model("Gemma", **THETA), COMMON, llama_rounding=2e-3),
    "Gemma 3n": Case(
        "gemma3n",
        calm(model("Gemma3n", "Gemma3nText", **GEMMA_3N)), GEMMA_3N_KEYS, llama_rounding=5e-3,
    ),
    "Gemma 4": Case(
        "gemma4",
        model("Gemma4", "Gemma4Text", **GEMMA_4, num_kv_shared_layers=2, hidden_size_per_layer_input=32,
        use_double_wide_mlp=True),
        {**GEMMA_4_KEYS, "attention.shared_kv_layers": 2, "embedding_length_per_layer_input": 32}
        | {"feed_forward_length": [96] * 4 + [192] * 2},
        {"rope_freqs": [1.0] * 4 + [1e30] * 12},
        llama_rounding=2e-3,
    ),
    "Gemma 4, keys as values": Case(
        "gemma4",
        model("Gemma4", "Gemma4Text", **{**GEMMA_4, "num_hidden_layers": 2, "layer_types": SLIDING_AND_FULL},
        num_kv_shared_layers=0, hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1),
        {**GEMMA_4_KEYS, "attention.head_count_kv": [2, 1], "embedding_length_per_layer_input": 0}
        | {"attention.shared_kv_layers": 0, "attention.sliding_window_pattern": [True, False]},
        {"rope_freqs": [1.0] * 4 + [1e30] * 12},
        llama_rounding=2e-3,
    ),
    "Gemma 4, experts": Case(
        "gemma4",
        model("Gemma4", "Gemma4Text", **{**GEMMA_4, "num_hidden_layers": 4, "layer_types": SLIDING_AND_FULL * 2},
        num_kv_shared_layers=0, hidden_size_per_layer_input=0, enable_moe_block=True, num_experts=4, top_k_experts=2,
        moe_intermediate_size=32),
        {**GEMMA_4_KEYS, "embedding_length_per_layer_input": 0, "attention.shared_kv_layers": 0, **EXPERT_KEYS}
        | {"attention.sliding_window_pattern": [True, False] * 2, **SMALL_KEYS},
        {"rope_freqs": [1.0] * 4 + [1e30] * 12},
        llama_rounding=2e-3,
    ),
    "Phi 3, LongRoPE": Case(
        "phi3",
        model("Phi3", sliding_window=None, rms_norm_eps=1e-6, max_position_embeddings=2048,
        original_max_position_embeddings=512, rope_parameters={
            "rope_type": "longrope", "rope_theta": 5000.0, "partial_rotary_factor": 0.5,
            "short_factor": LONGROPE["short"], "long_factor": LONGROPE["long"],
            "original_max_position_embeddings": 512}),
        {**COMMON, **HALF, "rope.scaling.attn_factor": 1.10554, "rope.scaling.original_context_length": 512},
        {f"rope_factors_{name}": factors for name, factors in LONGROPE.items()},
    ),
    "Llama, YaRN": Case(
        "llama",
        model("Llama", rope_parameters={"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0,
        "original_max_position_embeddings": 128}),
        {**COMMON, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
        | {"rope.scaling.original_context_length": 128},
    ),
    "Nemotron": Case(
        "nemotron", model("Nemotron", **PARTIAL), {**LAYERED, **HALF}
    ),
    "StableLM": Case(
        "stablelm", model("StableLm", **PARTIAL), {**LAYERED, **HALF, "use_parallel_residual": False}
    ),
}  # fmt: skip
ROUNDED = ("ERNIE 4.5 MoE", "DeepSeek V3", "Gemma")
"""Families that are described in bfloat16, too; `make test-all` takes all."""

KEPT = ("GLM-4 MoE", "Gemma 4, experts", "DeepSeek V3", "LFM2")
"""Families that are described from kept weights, too; `make test-all` takes all."""

HYBRID = {
    "granitehybrid", "qwen35", "qwen35moe", "qwen3next", "falcon-h1", "nemotron_h", "nemotron_h_moe", "lfm2moe",
}  # fmt: skip
"""Architectures that `test_gguf_hybrids` tests."""

each_family = pytest.mark.parametrize("name", CASES)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write the file of a family."""
    monkeypatch.setattr(gguf_export, "cache_folder", lambda: tmp_path / "cache")

    def write(name: str, quantize: GGMLQuantizationType | None = GGMLQuantizationType.Q8_0, **more: Any) -> Path:
        case, path = CASES[name], tmp_path / "model.gguf"
        write_model(path, case.make(), case.architecture, quantize, case.tables, **{**case.keys, **more})
        return path

    return write


def logits_of(model: Any) -> numpy.ndarray:
    """transformers' own logits of `TEXT`, [n, V]."""
    return model(torch.tensor([TEXT])).logits[0].float().numpy()


def difference_of(found: numpy.ndarray, expected: numpy.ndarray) -> float:
    return float(numpy.abs(found - expected).max() / numpy.abs(expected).max())


def runtime_model(path: Path) -> RuntimeModel:
    """The model of a file, described without transformers."""
    source = ModelFile(str(path), path, "float32")
    parameters = source.parameters
    return RuntimeModel(
        source.describe(print),
        windows=(),
        digest="",
        is_called=lambda digest: False,
        context=parameters.context,
        max_distance=parameters.max_distance,
        sliding=parameters.windows,
        generation=source.generation,
    )


def served_logits(path: Path, positions: Positions | None = None) -> numpy.ndarray:
    """The runtime's logits [n, V] after `PROMPT` tokens of `TEXT`, and after every later one."""
    runtime = runtime_model(path)
    served = runtime.serve(CacheConfig("recent", window=64, chunk=16, positions=positions))
    return numpy.stack([served.forward(TEXT[:PROMPT]), *(served.forward([token]) for token in TEXT[PROMPT:])])


@pytest.mark.every(3)
@pytest.mark.parametrize("name", thinned(zip(CASES), lambda name: [*CASES].index(name) % 4 == 0))
def test_as_transformers_reads_them(name: str, write: Callable[..., Path]) -> None:
    loaded = load(ModelConfig(str(write(name, None)), dtype="float32"))
    assert difference_of(logits_of(loaded.model), logits_of(CASES[name].make())) < 1e-4


@pytest.mark.every(2)
@each_family
def test_described_from_the_file(name: str, write: Callable[..., Path]) -> None:
    """The same matrices and numbers as of the model, and the same logits: of a prompt, and of single tokens."""
    path = write(name)
    loaded = load(ModelConfig(str(path), dtype="float32")).model
    assert difference(ModelFile(str(path), path, "float32").describe(print), describe(loaded)) == ""
    found = served_logits(path, CASES[name].positions)
    assert difference_of(found, logits_of(loaded)[PROMPT - 1 :]) < CASES[name].rounding


@pytest.mark.parametrize(
    "name", [name if name in ROUNDED else pytest.param(name, marks=pytest.mark.exhaustive) for name in CASES]
)
def test_described_in_bfloat16(name: str, write: Callable[..., Path]) -> None:
    path = write(name)
    loaded = load(ModelConfig(str(path), dtype="bfloat16")).model
    assert difference(ModelFile(str(path), path, "bfloat16").describe(print), describe(loaded)) == ""


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "name", [name if name in KEPT else pytest.param(name, marks=pytest.mark.exhaustive) for name in CASES]
)
def test_described_from_a_file_that_is_not_quantized(name: str, write: Callable[..., Path]) -> None:
    """DeepSeek's are refused: parts of a matrix would have to be put together."""
    path = write(name, GGMLQuantizationType.F16)
    if CASES[name].architecture == "deepseek2":
        with pytest.raises(DescriptionError, match="F16"):
            ModelFile(str(path), path, "bfloat16").describe(print)
        return
    loaded = load(ModelConfig(str(path), dtype="bfloat16")).model
    assert difference(ModelFile(str(path), path, "bfloat16").describe(print), describe(loaded)) == ""


@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "writes"), thinned(
    itertools.product(CASES, ("torch", "runtime")),
    lambda name, writes: name in KEPT and (writes == "torch") == (name == "LFM2"),
))  # fmt: skip
def test_described_from_weights_that_were_packed_before(
    name: str, writes: str, write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By either; transformers maps the file that the runtime has written, and does not write another."""
    keep_all(tmp_path, monkeypatch)
    path = write(name)
    if writes == "runtime":
        ModelFile(str(path), path, "float32").describe(print, print)
    else:
        load(ModelConfig(str(path), dtype="float32"))
    kept = next((tmp_path / "cache" / "packed").glob("*/model.safetensors"))
    before = kept.stat()
    loaded = load(ModelConfig(str(path), dtype="float32")).model
    assert difference(ModelFile(str(path), path, "float32").describe(print), describe(loaded)) == ""
    assert before.st_ino == kept.stat().st_ino


@pytest.mark.every(3)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.in_llama])
def test_as_llama_cpp_reads_them(name: str, write: Callable[..., Path]) -> None:
    expected = logits_of(CASES[name].make())
    llama.assert_reads(name, write(name, None), TEXT, expected, CASES[name].llama_rounding)


@pytest.mark.parametrize("name", ["Gemma 4", "Gemma 4, keys as values"])
def test_heads_are_measured_as_those_of_the_model(name: str, write: Callable[..., Path]) -> None:
    """Layers have other numbers of heads, and some use keys of others."""
    path = write(name)
    source, theirs = ModelFile(str(path), path, "float32"), load(ModelConfig(str(path), dtype="float32")).model
    specs = layer_specs(theirs, CacheConfig(window=8, chunk=4).plan(512))
    expected = retrieval_heads._attention_to_copy(theirs, specs).numpy()
    found = attention_to_copy(source.describe(print), source.parameters.windows, source.parameters.context)
    numpy.testing.assert_allclose(found, expected, rtol=0, atol=2e-3)


FILE_TYPES = {
    "Q2_K": 10, "Q3_K_M": 12, "Q4_K_M": 15, "Q5_0": 8, "Q5_1": 9, "Q5_K_M": 17, "IQ4_NL": 25, "IQ4_XS": 30,
}  # fmt: skip
"""llama.cpp's numbers of mixtures of block types."""


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", FILE_TYPES)
def test_files_of_its_quantizer(kind: str, write: Callable[..., Path], tmp_path: Path) -> None:
    """All matrices stay packed, and the logits are those of the unpacked matrices."""
    llama_cpp = pytest.importorskip("llama_cpp")
    sizes = {**SIZES, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
    path, whole = tmp_path / f"{kind}.gguf", tmp_path / "whole.gguf"
    write_model(
        whole,
        tiny("Llama", **sizes, **THETA)(),
        "llama",
        **COMMON | {f"attention.{name}_length": 64 for name in ("key", "value")},
    )
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = FILE_TYPES[kind], 1
    assert not llama_cpp.llama_model_quantize(bytes(whole), bytes(path), ctypes.byref(parameters))
    unpacked = load(ModelConfig(str(path), dtype="float32", quantize="none")).model
    assert difference_of(served_logits(path), logits_of(unpacked)[PROMPT - 1 :]) < 5e-3


class TestRefused:
    """What the table does not know is not computed without it."""

    def test_weights(self, write: Callable[..., Path]) -> None:
        path = write("SmolLM3")
        path.write_bytes(path.read_bytes().replace(b"blk.3.attn_norm.weight", b"blk.3.attn_sinks.weight"[:22]))
        with pytest.raises(DescriptionError, match=r"it has blk\.3\.attn_sinks"):
            ModelFile(str(path), path, "float32")

    @pytest.mark.parametrize("key", ["attention.clamp_kqv", "rope.scale_linear"])
    def test_parameters(self, key: str, write: Callable[..., Path]) -> None:
        path = write("SmolLM3", **{key: 2.0})
        with pytest.raises(DescriptionError, match=f"smollm3.{key} is 2.0"):
            ModelFile(str(path), path, "float32")

    def test_a_list_that_is_too_short(self, write: Callable[..., Path]) -> None:
        path = write("SmolLM3", **{"attention.sliding_window": 8, "attention.sliding_window_pattern": [True]})
        with pytest.raises(DescriptionError, match="a parameter is missing"):
            ModelFile(str(path), path, "float32")

    @pytest.mark.parametrize(("name", "refused"), [
        ("SmolLM3", set()), ("Phi 3, LongRoPE", {"absolute"}), ("HunYuan", {"gap", "rolling"}),
    ])  # fmt: skip
    def test_positions(self, name: str, refused: set[str], write: Callable[..., Path]) -> None:
        path = write(name)
        assert ModelFile(str(path), path, "float32").parameters.refused_positions == refused


def test_layers_that_only_guess_take_no_memory(write: Callable[..., Path]) -> None:
    dense = []
    for guessing in (0, 1):
        path = write("SmolLM3", None, nextn_predict_layers=guessing)
        source = ModelFile(str(path), path, "float32")
        dense.append(GgufWeights(source.file, source.architecture, source.parameters, "float32", print).num_dense)
        last = [tensor.shape for name, tensor in source.file.tensors.items() if name.startswith("blk.3.")]
    assert dense[0] - dense[1] == sum(math.prod(shape) for shape in last if len(shape) > 1)


def test_a_step_reads_one_row_of_the_embeddings_of_layers(write: Callable[..., Path]) -> None:
    """Of the file, and of the packed model."""
    path = write("Gemma 4")
    file, model = GgufFile(path), load(ModelConfig(str(path), dtype="float32")).model
    unread = [table.nbytes - table.nbytes // 64 for name, table in file.tensors.items() if "token_embd" in name]
    assert len(unread) == 2
    assert step_bytes(file) == file.nbytes - sum(unread)
    embeddings = (model.get_input_embeddings(), model.model.embed_tokens_per_layer)
    tables = [module.tiles.nbytes for module in embeddings]
    whole = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert weight_bytes(model) == whole - sum(nbytes - nbytes // 64 for nbytes in tables)


def test_the_distance_of_longrope(write: Callable[..., Path]) -> None:
    path = write("Phi 3, LongRoPE", context_length=2048)
    assert ModelFile(str(path), path, "float32").parameters.max_distance == 512


def test_every_row_is_tested() -> None:
    others = {MODELS[name][0] for name in MODELS} | {"gpt-oss"} | HYBRID
    assert others | {case.architecture for case in CASES.values()} == ARCHITECTURES.keys()
