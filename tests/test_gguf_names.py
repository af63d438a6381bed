"""GGUF weight names in transformers' models: round trips of tiny random models of many families."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig, PreTrainedModel

from h2o_stream import ModelNotFoundError, UnsupportedModelError
from h2o_stream.models import gguf_export
from h2o_stream.models.find import find
from h2o_stream.models.gguf import GgufFile
from h2o_stream.models.gguf_export import export_config
from h2o_stream.models.gguf_names import Weight, model_weights
from tests.families import GROUPED, SLIDING, rope, tiny
from tests.fixtures import make_llama
from tests.gguf_files import write_model

HEAD = {"attention.key_length": 8, "attention.value_length": 8}
RMS = {"attention.layer_norm_rms_epsilon": 1e-6}
NORM = {"attention.layer_norm_epsilon": 1e-5}
BASE = {"rope.freq_base": 5000.0}
THETA = rope("default") | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
PARTIAL = {"rope_parameters": {**THETA["rope_parameters"], "partial_rotary_factor": 0.5}}
YARN = {
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    }
}  # fmt: skip
LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}}
LAYERED = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
    }
}
YARN_KEYS = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
}  # fmt: skip
QWEN = {"attention.layer_norm_rms_epsilon": 1e-6, **BASE}
EIGHT = {"rope.dimension_count": 8}

FAMILIES: dict[str, tuple[str, Callable[[], PreTrainedModel], dict[str, Any]]] = {
    "Llama": ("llama", tiny("Llama", **GROUPED, **THETA), {**RMS, **BASE, **EIGHT}),
    "Llama, tied": ("llama", tiny("Llama", **GROUPED, tie_word_embeddings=True), {**RMS, **EIGHT}),
    "Llama, biases": ("llama", tiny("Llama", **GROUPED, attention_bias=True, mlp_bias=True), {**RMS, **EIGHT}),
    "Llama, YaRN": ("llama", tiny("Llama", **GROUPED, **YARN), {**RMS, **BASE, **EIGHT, **YARN_KEYS}),
    "Llama, linear": (
        "llama",
        tiny("Llama", **GROUPED, **LINEAR),
        {**RMS, **BASE, **EIGHT, "rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
    ),
    "Qwen 2": ("qwen2", tiny("Qwen2", **GROUPED, **THETA), QWEN),
    "Qwen 3": ("qwen3", tiny("Qwen3", **GROUPED, **THETA), {**QWEN, **HEAD}),
    "Gemma 2": (
        "gemma2",
        tiny("Gemma2", **GROUPED, sliding_window=24, query_pre_attn_scalar=8, layer_types=SLIDING),
        {**RMS, **HEAD, "attention.sliding_window": 24},
    ),
    "Gemma 3": (
        "gemma3",
        tiny("Gemma3", "Gemma3Text", **GROUPED, sliding_window=24, query_pre_attn_scalar=8, **LAYERED),
        {**RMS, **HEAD, **BASE, "attention.sliding_window": 24, "rope.freq_base_swa": 10000.0}
        | {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "Phi 3": (
        "phi3",
        tiny("Phi3", **GROUPED, **PARTIAL, sliding_window=24),
        {**BASE, "rope.dimension_count": 4, "attention.sliding_window": 24, "attention.layer_norm_rms_epsilon": 1e-5},
    ),
    "StableLM": ("stablelm", tiny("StableLm", **GROUPED, **PARTIAL), {**NORM, **BASE, "rope.dimension_count": 4}),
    "Starcoder 2": ("starcoder2", tiny("Starcoder2", **GROUPED, **THETA), {**NORM, **BASE}),
    "Nemotron": ("nemotron", tiny("Nemotron", **GROUPED, **PARTIAL), {**NORM, **BASE, "rope.dimension_count": 4}),
}
ARITHMETIC = {"gemma2", "gemma3", "nemotron"}


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[GgufFile, Any]]:
    """Write a model to a file, and make the empty model that the file describes."""
    monkeypatch.setattr(gguf_export, "cache_folder", lambda: tmp_path / "cache")

    def make(model: PreTrainedModel, arch: str, keys: dict[str, Any], **more: Any) -> tuple[GgufFile, Any]:
        path = tmp_path / "model.gguf"
        write_model(path, model, arch, **more, **keys)
        file = GgufFile(path)
        config = AutoConfig.from_pretrained(export_config(file, print))
        with torch.device("meta"):
            return file, AutoModelForCausalLM.from_config(config)

    return make


def filled(skeleton: Any, weights: list[Weight]) -> Any:
    """The model on the CPU with these weights."""
    model = type(skeleton)(copy.deepcopy(skeleton.config)).eval()
    model.load_state_dict({weight.name: weight.values() for weight in weights}, strict=False)
    model.tie_weights()
    return model


@pytest.mark.every(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(family: str, made: Callable[..., tuple[GgufFile, Any]]) -> None:
    arch, make, keys = FAMILIES[family]
    model = make()
    file, skeleton = made(model, arch, keys)
    weights = model_weights(file, skeleton)
    assert {weight.name for weight in weights} >= dict(model.named_parameters()).keys()
    for weight in weights:
        torch.testing.assert_close(weight.values(), model.state_dict()[weight.name], rtol=0, atol=2e-7)
        assert weight.same_rows == (arch not in ARITHMETIC or not weight.name.endswith("norm.weight"))
        assert (weight.order is not None) == (arch == "llama" and any(f".{x}_proj." in weight.name for x in "qk"))
    ids = torch.arange(60)[None]
    torch.testing.assert_close(filled(skeleton, weights)(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["Llama", "Qwen 3", "Gemma 2", "Phi 3"])
def test_as_transformers_reads_it(family: str, made: Callable[..., tuple[GgufFile, Any]]) -> None:
    arch, make, keys = FAMILIES[family]
    file, skeleton = made(make(), arch, keys, quantize=GGMLQuantizationType.Q8_0)
    theirs = AutoModelForCausalLM.from_pretrained(
        file.path.parent,
        gguf_file=file.path.name,
        quantization_config=GgufConfig(gguf_file=file.path.name, dequantize=True),
        config=skeleton.config,
        dtype=torch.float32,
    ).state_dict()
    for weight in model_weights(file, skeleton):
        torch.testing.assert_close(weight.values(), theirs[weight.name], rtol=0, atol=0)


def test_experts_are_joined(made: Callable[..., tuple[GgufFile, Any]]) -> None:
    model = tiny("Qwen3Moe", **GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)()
    arch, more = "qwen3moe", {**QWEN, **HEAD, "expert_count": 4, "expert_used_count": 2}
    file, skeleton = made(model, arch, more | {"expert_feed_forward_length": 32})
    weights = model_weights(file, skeleton)
    for weight in weights:
        torch.testing.assert_close(weight.values(), model.state_dict()[weight.name], rtol=0, atol=0)
    joined = next(weight for weight in weights if weight.name.endswith("gate_up_proj"))
    assert (len(joined.others), joined.same_rows) == (1, False)


def test_the_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_export, "cache_folder", lambda: tmp_path)
    file = GgufFile(Path(find("smollm2-135m", True, pytest.fail)))
    config = AutoConfig.from_pretrained(export_config(file, pytest.fail))
    with torch.device("meta"):
        weights = model_weights(file, AutoModelForCausalLM.from_config(config))
        query = next(weight for weight in weights if weight.name.endswith("q_proj.weight"))
        assert query.values().device.type == "cpu", "transformers makes models in this context"
    assert len(weights) == len(file.tensors) == 272
    assert all(weight.same_rows for weight in weights)
    offsets = [weight.tensor.offset for weight in weights]
    assert offsets == sorted(offsets), "the file is read from its start to its end"


class TestQuantized:
    @pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
    def test_values_of_every_type(self, kind: str, made: Callable[..., tuple[GgufFile, Any]]) -> None:
        model = make_llama(heads=4, size=8)
        number = GGMLQuantizationType[kind]
        file, skeleton = made(model, "llama", {**RMS, **EIGHT}, quantize=number)
        for weight in model_weights(file, skeleton):
            true = model.state_dict()[weight.name]
            if true.ndim == 2:
                numbers = gguf.quants.dequantize(gguf.quants.quantize(true.numpy(), number), number)
                torch.testing.assert_close(weight.values(), torch.from_numpy(numbers), rtol=0, atol=0)
                assert weight.tensor.type == number

    def test_blocks_in_order_are_the_rows_of_the_model(self, made: Callable[..., tuple[GgufFile, Any]]) -> None:
        model = make_llama(heads=4, size=8)
        file, skeleton = made(model, "llama", {**RMS, **EIGHT}, quantize=GGMLQuantizationType.Q4_0)
        query = next(
            weight for weight in model_weights(file, skeleton) if weight.name.endswith("1.self_attn.q_proj.weight")
        )
        rows = file.blocks(query.tensor).reshape(32, -1)[query.order.numpy()]
        expected = gguf.quants.quantize(model.state_dict()[query.name].numpy(), GGMLQuantizationType.Q4_0)
        assert np.array_equal(rows, expected)


class TestLlama3:
    """RoPE scaling of Llama 3.1 and later, which files store as factors and transformers ignores."""

    SCALED = {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        }
    }  # fmt: skip
    KEYS = {**RMS, **EIGHT, "rope.freq_base": 500000.0}

    def factors(self, model: PreTrainedModel) -> np.ndarray:
        plain = 500000.0 ** (-torch.arange(0, 8, 2) / 8)
        return (plain / model.model.rotary_emb.inv_freq).numpy()

    def test_the_factors_become_its_config(self, made: Callable[..., tuple[GgufFile, Any]]) -> None:
        model = tiny("Llama", **GROUPED, **self.SCALED)()
        factors = self.factors(model)
        assert factors[0] == pytest.approx(1)
        assert 1.1 < factors[2] < 7.9
        file, skeleton = made(model, "llama", self.KEYS, rope_factors=factors)
        assert skeleton.config.rope_parameters == self.SCALED["rope_parameters"]
        assert not any("rope" in weight.name for weight in model_weights(file, skeleton))

    def test_factors_of_others_are_refused(self, made: Callable[..., tuple[GgufFile, Any]]) -> None:
        model = tiny("Llama", **GROUPED, **self.SCALED)()
        with pytest.raises(UnsupportedModelError, match=r"model.gguf has RoPE factors that differ from Llama 3's"):
            made(model, "llama", self.KEYS, rope_factors=np.array([1, 2, 3, 4], np.float32))

    def test_factors_of_another_shape(self, made: Callable[..., tuple[GgufFile, Any]]) -> None:
        with pytest.raises(UnsupportedModelError, match=r"RoPE factors of shape \(5,\), not \(4,\)"):
            made(make_llama(), "llama", self.KEYS, rope_factors=np.ones(5, np.float32))

    def test_factors_of_one_change_nothing(self, made: Callable[..., tuple[GgufFile, Any]]) -> None:
        _, skeleton = made(make_llama(), "llama", self.KEYS, rope_factors=np.ones(4, np.float32))
        assert skeleton.config.rope_parameters["rope_type"] == "default"

    def test_other_kinds_of_scaling_are_refused(self, made: Callable[..., tuple[GgufFile, Any]]) -> None:
        keys = {**self.KEYS, "rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}
        with pytest.raises(UnsupportedModelError, match="RoPE scaling of type 'longrope'"):
            made(make_llama(), "llama", keys)


class TestRefused:
    def test_a_weight_that_the_file_lacks(self, made: Callable[..., tuple[GgufFile, Any]]) -> None:
        file, skeleton = made(make_llama(), "llama", {**RMS, **EIGHT})
        del file.tensors["blk.1.ffn_up.weight"]
        with pytest.raises(ModelNotFoundError, match=r"model.gguf .* has no model.layers.1.mlp.up_proj.weight"):
            model_weights(file, skeleton)

    def test_a_weight_that_the_model_lacks(self, made: Callable[..., tuple[GgufFile, Any]]) -> None:
        file, skeleton = made(make_llama(layers=3), "llama", {**RMS, **EIGHT})
        with torch.device("meta"):
            smaller = type(skeleton)(copy.deepcopy(skeleton.config))
        del smaller.model.layers[2]
        with pytest.raises(UnsupportedModelError, match=r"has blk.2.\w+.weight, which LlamaForCausalLM does not have"):
            model_weights(file, smaller)

    def test_a_weight_of_another_shape(self, made: Callable[..., tuple[GgufFile, Any]]) -> None:
        file, skeleton = made(make_llama(), "llama", {**RMS, **EIGHT, "feed_forward_length": 16})
        with pytest.raises(ModelNotFoundError, match=r"blk.0.ffn_\w+.weight is \(.*, model.layers.0.mlp"):
            model_weights(file, skeleton)

    def test_types_that_cannot_be_read(self, made: Callable[..., tuple[GgufFile, Any]]) -> None:
        file, skeleton = made(
            make_llama(heads=4, size=8), "llama", {**RMS, **EIGHT}, quantize=GGMLQuantizationType.Q8_0
        )
        weight = next(weight for weight in model_weights(file, skeleton) if weight.name == "lm_head.weight")
        object.__setattr__(weight.tensor, "type", GGMLQuantizationType.Q8_1)
        with pytest.raises(UnsupportedModelError, match="output.weight is Q8_1, which cannot be read"):
            weight.values()


class TestRopeNumbers:
    """Numbers of RoPE in the metadata: taken over or refused, never dropped."""

    SCALED = {**RMS, **BASE, **EIGHT, **YARN_KEYS}

    def test_every_number_of_yarn(self, made: Callable[..., tuple[GgufFile, Any]]) -> None:
        numbers = {"attn_factor": 0.5, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0, "yarn_ext_factor": 1.0}
        keys = {f"rope.scaling.{name}": value for name, value in numbers.items()}
        _, skeleton = made(make_llama(), "llama", self.SCALED | keys)
        rope = skeleton.config.rope_parameters
        assert rope["attention_factor"] == pytest.approx(0.5 * (1 + 0.1 * np.log(4)))
        assert (rope["beta_fast"], rope["beta_slow"]) == (16, 2)

    @pytest.mark.parametrize(("name", "value"), [("yarn_ext_factor", 0.5), ("yarn_log_multiplier", 0.1)])
    def test_what_transformers_lacks(self, name: str, value: float, made: Callable[..., Any]) -> None:
        with pytest.raises(UnsupportedModelError, match=rf"model.gguf has rope.scaling.{name} {value}"):
            made(make_llama(), "llama", self.SCALED | {f"rope.scaling.{name}": value})

    @pytest.mark.parametrize("kind", ["none", "linear"])
    def test_an_attention_factor_without_yarn(self, kind: str, made: Callable[..., Any]) -> None:
        keys = {"rope.scaling.type": kind, "rope.scaling.factor": 2.0, "rope.scaling.attn_factor": 0.5}
        with pytest.raises(UnsupportedModelError, match="attn_factor 0.5 without YaRN"):
            made(make_llama(), "llama", {**RMS, **EIGHT, **keys})

    @pytest.mark.parametrize("value", [0.0, -10000.0, float("nan"), float("inf"), "10000"])
    def test_impossible_bases(self, value: object, made: Callable[..., Any]) -> None:
        with pytest.raises(ModelNotFoundError, match=r"llama.rope.freq_base is .*, not a positive number") as error:
            made(make_llama(), "llama", {**RMS, **EIGHT, "rope.freq_base": value})
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("value", [-2.0, float("nan"), float("inf"), "4"])
    @pytest.mark.parametrize("name", ["factor", "attn_factor"])
    def test_impossible_factors(self, name: str, value: object, made: Callable[..., Any]) -> None:
        with pytest.raises(ModelNotFoundError, match=rf"llama.rope.scaling.{name} is .*, not a positive number"):
            made(make_llama(), "llama", self.SCALED | {f"rope.scaling.{name}": value})

    def test_a_factor_of_0_means_none(self, made: Callable[..., tuple[GgufFile, Any]]) -> None:
        keys = {"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}
        _, skeleton = made(make_llama(), "llama", {**RMS, **EIGHT, **keys})
        assert skeleton.config.rope_parameters["rope_type"] == "default"
