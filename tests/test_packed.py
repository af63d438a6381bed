"""Weights in few bits: the grids, the layers, and a model made of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from h2o_stream import CacheConfig, ConfigError, attach
from h2o_stream.config import ModelConfig
from h2o_stream.models.load import LoadedModel, load
from h2o_stream.models.quantize import Int4Linear, Int8Linear, Native4Linear, Native8Linear, on_grid, quantize
from tests.conftest import make_llama


def values(codes: torch.Tensor, scale: torch.Tensor, middle: torch.Tensor) -> torch.Tensor:
    return (codes - 8) * scale[..., None] + middle[..., None]


class TestGrid:
    def test_numbers_of_gguf_files_are_not_rounded_again(self) -> None:
        torch.manual_seed(0)
        codes = torch.randint(0, 16, (50, 32)).float()
        codes[:, 3], codes[:, 9] = 0, 15
        with_offset = codes * 0.013 - 0.2
        torch.testing.assert_close(values(*on_grid(with_offset)), with_offset)
        codes = torch.randint(2, 13, (50, 32)).float()
        codes[:, 5] = 0
        with_zero = (codes - 8) * torch.rand(50, 1)
        torch.testing.assert_close(values(*on_grid(with_zero)), with_zero)

    def test_no_number_is_further_off_than_half_a_step(self) -> None:
        groups = torch.randn(200, 32)
        codes, scale, middle = on_grid(groups)
        assert 0 <= codes.min() <= codes.max() <= 15
        steps = (values(codes, scale, middle) - groups).square().sum(-1) / scale.square()
        assert steps.max() <= 32 / 4 + 1e-3 or (steps <= 33).all()

    def test_a_constant_group(self) -> None:
        for constant in (0.0, 0.7, -0.7):
            groups = torch.full((2, 32), constant)
            torch.testing.assert_close(values(*on_grid(groups)), groups)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("packed", "most"), [(Int8Linear, 0.02), (Native8Linear, 0.02), (Int4Linear, 0.15), (Native4Linear, 0.15)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer(packed: type[nn.Module], most: float, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=bias).to(dtype)
    layer = packed(linear)
    for rows in (1, 7, 80):
        x = torch.randn(2, rows, 64).to(dtype)
        wanted, given = linear(x), layer(x)
        assert given.shape == wanted.shape
        assert given.dtype == wanted.dtype
        assert (given - wanted).norm() < most * wanted.norm()


class TestModel:
    @pytest.fixture
    def model(self) -> PreTrainedModel:
        return make_llama(heads=2, groups=2, size=8)

    @pytest.mark.parametrize("kind", ["int8", "int4"])
    def test_all_matrices_but_the_embedding(self, model: PreTrainedModel, kind: str) -> None:
        quantize(model, kind)
        assert not [name for name, module in model.named_modules() if type(module) is nn.Linear]
        assert model.get_input_embeddings().weight.dtype == torch.float32

    @pytest.mark.parametrize(("kind", "packed"), [("int8", Native8Linear), ("int4", Native4Linear)])
    def test_matrices_of_one_input_are_multiplied_together(self, kind: str, packed: type[nn.Module]) -> None:
        block, x = nn.Module(), torch.randn(3, 64)
        alone = {}
        for name, rows in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32)):
            linear = nn.Linear(64, rows, bias=name != "k_proj")
            alone[name] = packed(linear)
            setattr(block, name, linear)
        block.device, block.get_output_embeddings = x.device, lambda: None
        quantize(block, kind)
        for name, layer in alone.items():
            assert block.get_submodule(name)(x).equal(layer(x))
        product = block.q_proj._product
        assert product is block.v_proj._product
        assert product._x is None, "nothing is held on to"
        other = torch.randn(1, 64)
        assert block.v_proj(other).equal(alone["v_proj"](other)), "in any order"

    def test_shapes_the_kernel_cannot_take_stay(self) -> None:
        model = make_llama(heads=1, size=12)
        quantize(model, "int4")
        assert {type(module) for module in model.model.layers[0].self_attn.children()} == {nn.Linear}

    def test_other_devices_are_refused(self, model: PreTrainedModel) -> None:
        with pytest.raises(ConfigError, match="--quantize int8"):
            quantize(model.to("meta"), "int8")


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="none, int8, int4"):
        ModelConfig(quantize="int3")
    with pytest.raises(ConfigError, match="--device-map"):
        ModelConfig(quantize="int8", device_map="auto")


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.03), ("int4", 0.06)])
def test_what_the_embedded_model_loses(embedded: LoadedModel, kind: str, most: float) -> None:
    """Its file is Q4_1: four bits are the file's own, but for activations in 8 bits."""
    text = "The city council met on Tuesday to discuss the new bridge over the river. " * 4
    ids = torch.tensor([embedded.tokenizer(text + "Nobody expected what the mayor said next.")["input_ids"]])

    def loss(model: PreTrainedModel) -> float:
        with attach(model, CacheConfig("h2o", 48)):
            return float(cross_entropy(model(ids).logits[0, :-1].float(), ids[0, 1:]))

    packed = load(ModelConfig(dtype="float32", device="cpu", quantize=kind)).model
    assert abs(loss(packed) - loss(embedded.model)) < most
