"""GGUF files in transformers: values of weights, numbers of RoPE, and what is refused."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import FalconConfig, FalconForCausalLM, PreTrainedModel

from h2o_stream import ModelNotFoundError, UnsupportedModelError
from h2o_stream.config import ModelConfig
from h2o_stream.errors import DataError
from h2o_stream.loading.transformers_model import load
from h2o_stream.models.gguf import GgufFile
from tests.families import GROUPED, tiny
from tests.fixtures import make_llama
from tests.gguf_files import write_model


@pytest.fixture
def path(tmp_path: Path, own_cache: Path) -> Path:
    return tmp_path / "model.gguf"


def read(path: Path, model: PreTrainedModel, **more: Any) -> Any:
    """Write a Llama to a file, and load that unpacked."""
    write_model(path, model, "llama", **more)
    return load(ModelConfig(str(path), dtype="float32", quantize="none", device="cpu")).model


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_values_of_every_type(kind: str, path: Path) -> None:
    model = make_llama(heads=4, size=8)
    number = GGMLQuantizationType[kind]
    weights = read(path, model, quantize=number).state_dict()
    for name, true in model.state_dict().items():
        if true.ndim == 2:
            numbers = gguf.quants.dequantize(gguf.quants.quantize(true.numpy(), number), number)
            torch.testing.assert_close(weights[name], torch.from_numpy(numbers), rtol=0, atol=0)


class TestLlama3:
    """RoPE scaling of Llama 3.1 and later, which files store as factors and transformers ignores."""

    SCALED = {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        }
    }  # fmt: skip

    def test_the_factors_become_its_config(self, path: Path) -> None:
        model = tiny("Llama", **GROUPED, **self.SCALED)()
        plain = 500000.0 ** (-torch.arange(0, 8, 2) / 8)
        factors = (plain / model.model.rotary_emb.inv_freq).numpy()
        assert factors[0] == pytest.approx(1)
        assert 1.1 < factors[2] < 7.9
        found = read(path, model, rope_factors=factors)
        assert found.config.rope_parameters == self.SCALED["rope_parameters"]

    def test_factors_of_others_are_refused(self, path: Path) -> None:
        model, factors = tiny("Llama", **GROUPED, **self.SCALED)(), np.array([1, 2, 3, 4], np.float32)
        with pytest.raises(UnsupportedModelError, match=r"model.gguf has RoPE factors that differ from Llama 3's"):
            read(path, model, rope_factors=factors)

    def test_factors_of_another_shape(self, path: Path) -> None:
        with pytest.raises(UnsupportedModelError, match=r"rope_freqs.weight"):
            read(path, make_llama(), rope_factors=np.ones(5, np.float32))

    def test_factors_of_one_change_nothing(self, path: Path) -> None:
        found = read(path, make_llama(), rope_factors=np.ones(4, np.float32))
        assert found.config.rope_parameters["rope_type"] == "default"

    def test_other_kinds_of_scaling_are_refused(self, path: Path) -> None:
        keys = {"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}
        with pytest.raises(UnsupportedModelError, match="RoPE scaling of type"):
            read(path, make_llama(), **keys)


class TestRefused:
    def test_a_weight_that_the_file_lacks(self, path: Path) -> None:
        write_model(path, make_llama(), "llama")
        path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.attn_rot_embd"))
        with pytest.raises(DataError, match=r"model.gguf .* has no model.layers.1.mlp.up_proj"):
            load(ModelConfig(str(path)))

    def test_a_weight_of_another_shape(self, path: Path) -> None:
        with pytest.raises(ModelNotFoundError, match=r"blk.0.ffn_\w+.weight is \(.*, model.layers.0.mlp"):
            read(path, make_llama(), feed_forward_length=16)

    def test_types_that_cannot_be_read(self, path: Path) -> None:
        write_model(path, make_llama(heads=4, size=8), "llama", GGMLQuantizationType.Q8_0)
        before = GgufFile.blocks
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gguf.quants.dequantize", lambda *_: (_ for _ in ()).throw(NotImplementedError))
            with pytest.raises(UnsupportedModelError, match=r"is Q8_0, which cannot be read"):
                load(ModelConfig(str(path), quantize="none", device="cpu"))
        assert GgufFile.blocks is before


class TestRopeNumbers:
    """Numbers of RoPE in the metadata: taken over or refused, never dropped."""

    SCALED = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}

    def test_every_number_of_yarn(self, path: Path) -> None:
        numbers = {"attn_factor": 0.5, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0, "yarn_ext_factor": 1.0}
        keys = {f"rope.scaling.{name}": value for name, value in numbers.items()}
        rope = read(path, make_llama(), **self.SCALED | keys).config.rope_parameters
        assert rope["attention_factor"] == pytest.approx(0.5 * (1 + 0.1 * np.log(4)))
        assert (rope["beta_fast"], rope["beta_slow"]) == (16, 2)

    @pytest.mark.parametrize(("name", "value"), [("yarn_ext_factor", 0.5), ("yarn_log_multiplier", 0.1)])
    def test_what_transformers_lacks(self, name: str, value: float, path: Path) -> None:
        with pytest.raises(UnsupportedModelError, match=rf"rope.scaling.{name} is {value}"):
            read(path, make_llama(), **self.SCALED | {f"rope.scaling.{name}": value})

    @pytest.mark.parametrize("kind", ["none", "linear"])
    def test_an_attention_factor_without_yarn(self, kind: str, path: Path) -> None:
        keys = {"rope.scaling.type": kind, "rope.scaling.factor": 2.0, "rope.scaling.attn_factor": 0.5}
        with pytest.raises(UnsupportedModelError, match="attn_factor 0.5 without YaRN"):
            read(path, make_llama(), **keys)

    @pytest.mark.parametrize("keys", [{"rope.scaling.factor": 4.0}, {"rope.scale_linear": 4.0}])
    def test_scaling_without_a_type_is_linear(self, keys: dict[str, float], path: Path) -> None:
        found = read(path, make_llama(), **keys).config.rope_parameters
        assert (found["rope_type"], found["factor"]) == ("linear", 4.0)

    def test_a_factor_of_0_means_none(self, path: Path) -> None:
        keys = {"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}
        found = read(path, make_llama(), **keys)
        assert found.config.rope_parameters["rope_type"] == "default"


@pytest.mark.every(2)
def test_what_only_transformers_reads(path: Path) -> None:
    """Its reader unpacks the weights; what it would leave out is refused."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_hidden_size": 128,
    }
    model = FalconForCausalLM(FalconConfig(**sizes, max_position_embeddings=128)).eval()
    model.config.num_key_value_heads, model.config.intermediate_size = 1, 128
    write_model(path, model, "falcon", GGMLQuantizationType.Q8_0)
    said: list[str] = []
    found = load(ModelConfig(str(path), dtype="float32", device="cpu"), notify=said.append).model
    assert "unpacked: only transformers reads them" in said[0]
    ids = torch.arange(60)[None]
    torch.testing.assert_close(found(ids).logits, model(ids).logits, rtol=0, atol=0.1)
    write_model(path, model, "falcon", **{"rope.scaling.type": "linear"})
    with pytest.raises(UnsupportedModelError, match="RoPE scaling of type 'linear'"):
        load(ModelConfig(str(path), device="cpu"))
