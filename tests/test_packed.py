"""Weights in few bits: the grids, the layers, and a model made of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from h2o_stream import CacheConfig, ConfigError, attach
from h2o_stream.config import ModelConfig
from h2o_stream.models.load import LoadedModel, load
from h2o_stream.models.quantize import Native4Linear, Native8Linear, NativeLinear, on_grid, quantize
from h2o_stream.native import library
from h2o_stream.native.packing import GROUP, from_tiles, tile_bytes, to_tiles
from tests.conftest import make_llama
from tests.native_builds import native  # noqa: F401

PACKED: list[Callable[[nn.Linear], NativeLinear]] = [Native8Linear, Native4Linear]


@pytest.fixture(params=[True, False], ids=["native", "torch"])
def multiplied(request: pytest.FixtureRequest, native: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """With every library, and without one."""
    monkeypatch.setattr(library, "loaded", lambda: native if request.param else None)


class TestTiles:
    @pytest.mark.parametrize("bits", [8, 4])
    def test_layout(self, bits: int) -> None:
        """What `src/abi.h` says, number by number."""
        torch.manual_seed(0)
        rows, groups = 6, 3
        codes = torch.randint(0, 256, (rows, groups, GROUP * bits // 8)).to(torch.uint8)
        grid = torch.rand(rows, 8 // bits, groups).half()
        tiles = to_tiles(codes.view(torch.int8) if bits == 8 else codes, grid)
        code_bytes, grid_bytes, stride = tile_bytes(groups * GROUP, bits)
        assert tiles.shape == (2, stride)
        assert stride % 32 == 0
        row_bytes = groups * GROUP * bits // 8
        for row in range(rows):
            tile, place = tiles[row // 4], row % 4
            assert tile[place * row_bytes :][:row_bytes].equal(codes[row].flatten())
            halves = tile[code_bytes : code_bytes + grid_bytes].clone().view(torch.float16).view(4, -1)
            assert halves[place].equal(grid[row].flatten())
        assert not tiles[1, 2 * row_bytes : code_bytes].any(), "rows that are not there"
        assert not tiles[:, code_bytes + grid_bytes :].any()

    @pytest.mark.parametrize("packed", PACKED)
    def test_grids_of_gguf_files_are_held_as_they_are(self, packed: Callable[[nn.Linear], NativeLinear]) -> None:
        torch.manual_seed(0)
        scale, offset = (torch.rand(7, 3, 1) * 0.01).half().float(), -torch.rand(7, 3, 1).half().float()
        if packed is Native4Linear:
            codes = torch.randint(0, 16, (7, 3, 32))
            codes[..., 3], codes[..., 20] = 0, 15
        else:
            codes = torch.randint(-127, 128, (7, 3, 32))
            codes[..., 7], offset = 127, torch.zeros_like(offset)
        linear = nn.Linear(96, 7, bias=False)
        linear.weight.data = (codes * scale + offset).flatten(1)
        layer = packed(linear)
        numbers = from_tiles(layer.tiles, 7, 96, layer.bits)
        torch.testing.assert_close(numbers, linear.weight.data, rtol=1e-6, atol=1e-8)

    def test_small_and_empty_groups(self) -> None:
        for number in (0.0, 1e-7, -3.0):
            linear = nn.Linear(64, 4, bias=False)
            linear.weight.data = torch.full((4, 64), number)
            for packed in PACKED:
                layer = packed(linear)
                numbers = from_tiles(layer.tiles, 4, 64, layer.bits)
                torch.testing.assert_close(numbers, linear.weight.data, rtol=2e-3, atol=1e-7)


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
@pytest.mark.parametrize(("packed", "most"), [(Native8Linear, 0.02), (Native4Linear, 0.15)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.usefixtures("multiplied")
def test_a_layer(packed: type[nn.Module], most: float, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 46, bias=bias).to(dtype)
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

    @pytest.mark.parametrize("kind", ["int8", "int4"])
    def test_the_output_layer_has_8_bits(self, model: PreTrainedModel, kind: str) -> None:
        quantize(model, kind)
        assert type(model.get_output_embeddings()) is Native8Linear
        others = {type(module) for module in model.model.modules() if isinstance(module, NativeLinear)}
        assert others == {Native8Linear if kind == "int8" else Native4Linear}

    def test_without_a_library_one_line_says_so(self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(library, "loaded", lambda: None)
        lines: list[str] = []
        quantize(model, "int4", lines.append)
        (line,) = lines
        assert "library" in line
        assert model(torch.randint(3, 64, (1, 5))).logits.isfinite().all()

    def test_shapes_that_are_not_whole_groups_stay(self) -> None:
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
