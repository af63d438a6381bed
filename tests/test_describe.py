"""Descriptions of modules: their matrices are not copied, and structures have what they say."""

import copy
import ctypes
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from h2o_stream.attachment.describe import describe
from h2o_stream.models.packed_layers import PackedEmbedding, PackedLinear
from h2o_stream.native import abi
from h2o_stream.native.description import DescriptionError
from h2o_stream.native.native_model import NativeModel
from h2o_stream.native.torch_modules import matrix_of
from tests.families import FAMILIES, GROUPED, LONGROPE, YARN, nudged, tiny
from tests.family_models import MODELS
from tests.in_turn import in_turn
from tests.more_families import OTHERS
from tests.packed_tiles import KINDS, numbers, random_tiles


def packed_layer(linear: nn.Linear, kind: abi.MatrixKind) -> PackedLinear:
    rows, columns = linear.weight.shape
    return PackedLinear(kind, columns, rows, linear.bias, random_tiles(kind, rows, columns))


class TestPacked:
    @pytest.mark.parametrize("kind", [abi.MatrixKind.INT8, abi.MatrixKind.INT4])
    def test_embedding(self, kind: abi.MatrixKind) -> None:
        model = copy.deepcopy(FAMILIES[1].make())
        vocabulary, hidden = model.get_input_embeddings().weight.shape
        tiles = random_tiles(kind, vocabulary, hidden)
        model.set_input_embeddings(PackedEmbedding(kind, vocabulary, hidden, torch.float32, tiles=tiles))
        embedding = describe(model).embedding
        assert (embedding.kind, embedding.rows, embedding.columns) == (kind, vocabulary, hidden)
        assert embedding.weights.data_ptr() == tiles.data_ptr()

    @in_turn("kind", KINDS)
    def test_rows_within_a_tile(self, kind: abi.MatrixKind) -> None:
        matrix = matrix_of(packed_layer(nn.Linear(256, 44), kind), "m")
        assert matrix.kind == kind
        part = matrix.row_range(16, 20)
        assert numbers(part.weights, kind, 20, 256).equal(numbers(matrix.weights, kind, 44, 256)[16:36])
        with pytest.raises(DescriptionError, match="rows 6 of .* multiple of 16"):
            matrix.row_range(6, 6)


class TestMemory:
    """Matrices are not copied; structures point to the description's tensors."""

    def test_nothing_large_is_copied(self) -> None:
        llama = FAMILIES[1].make()
        description = describe(llama)
        assert description.embedding.weights.data_ptr() == llama.model.embed_tokens.weight.data_ptr()
        layer, module = description.layers[1], llama.model.layers[1]
        assert layer.mlp.down.weights.data_ptr() == module.mlp.down_proj.weight.data_ptr()
        assert [matrix.weights.data_ptr() for matrix in layer.attention.qkv] == [
            linear.weight.data_ptr()
            for linear in (module.self_attn.q_proj, module.self_attn.k_proj, module.self_attn.v_proj)
        ]

    def test_fused_matrices(self) -> None:
        model = FAMILIES[8].make()
        mlp, fused = describe(model).layers[0].mlp, model.model.layers[0].mlp.gate_up_proj.weight
        assert mlp.gate.weights.data_ptr() == fused.data_ptr()
        assert mlp.up.weights.data_ptr() == fused[32:].data_ptr()

    def test_tied(self) -> None:
        description = describe(MODELS["Llama, tied"].make())
        assert description.output.weights.data_ptr() == description.embedding.weights.data_ptr()

    def test_struct(self) -> None:
        model = nudged(next(family for family in FAMILIES if family.name == "Qwen 2, YaRN").make())
        native = NativeModel(describe(model))
        layer, described, module = native.struct.layers[1], native.description.layers[1], model.model.layers[1]
        assert (native.struct.layer_count, native.struct.hidden_size, native.struct.vocab_size) == (2, 32, 64)
        assert ctypes.addressof(layer) == ctypes.addressof(native.layers[1])
        attention = layer.attention
        assert (attention.query_heads, attention.kv_heads, attention.head_size, attention.value_size) == (4, 2, 8, 8)
        assert attention.scaling == pytest.approx(8**-0.5)
        assert layer.qkv_count == 3
        assert [layer.qkv[i].weights for i in range(3)] == [m.weights.data_ptr() for m in described.attention.qkv]
        assert layer.qkv[0].bias == module.self_attn.q_proj.bias.data_ptr()
        assert layer.out.bias is None
        assert (layer.qkv[1].rows, layer.qkv[1].columns, layer.qkv[1].kind) == (16, 32, abi.MatrixKind.FLOAT32)
        assert [layer.query_offset, layer.key_offset, layer.value_offset] == [0, 32, 48]
        assert (layer.rope_scaled_dims, layer.absolute_rotary_dims) == (8, 8)
        assert layer.rope_scale == pytest.approx(0.1 * math.log(4) + 1)
        angles = (ctypes.c_float * 4).from_address(layer.frequencies)
        assert list(angles) == described.attention.rope.frequencies.tolist()
        assert layer.after_mlp.kind == abi.NormKind.NONE
        assert layer.after_mlp.weight is None
        assert layer.before_mlp.kind == abi.NormKind.RMS

    def test_a_copy_has_fields_of_its_own(self) -> None:
        native = NativeModel(describe(FAMILIES[0].make()))
        copied = native.copied()
        assert bytes(copied.layers) == bytes(native.layers)
        assert ctypes.addressof(copied.struct.layers[1]) == ctypes.addressof(copied.layers[1])
        copied.layers[1].attention.rope_rows, copied.struct.layer_count = 5, 1
        assert (native.layers[1].attention.rope_rows, native.struct.layer_count) == (0, 2)

    def test_no_gate_and_no_rotation(self) -> None:
        native = NativeModel(describe(FAMILIES[-1].make()))
        layer = native.layers[0]
        assert layer.gate.weights is None
        assert layer.frequencies is None
        assert (layer.rope_scale, layer.rope_scaled_dims, layer.activation) == (1.0, 0, abi.Activation.RELU)
        assert native.struct.learned_offset == 2

    @pytest.mark.parametrize(("make", "holds"), [
        (tiny("Llama", **GROUPED, **YARN), True),
        (OTHERS["Llama, dynamic"], False),
        (tiny("Phi3", **GROUPED, **LONGROPE), False),
    ])  # fmt: skip
    def test_frequencies_at_every_length(self, make: Callable[[], Any], holds: bool) -> None:
        assert describe(make()).supports_absolute is holds

    def test_frequencies_after_a_long_text(self) -> None:
        """A long text switches LongRoPE's frequencies; the description has those for short texts."""
        model = copy.deepcopy(tiny("Phi3", **GROUPED, **LONGROPE)())
        before = describe(model).layers[0].attention.rope.frequencies.clone()
        model(torch.ones(1, 100, dtype=torch.long))
        assert describe(model).layers[0].attention.rope.frequencies.equal(before)


def test_zero_centered_norms() -> None:
    """Gemma's norm weights are offsets from one."""
    model = FAMILIES[10].make()
    assert torch.equal(describe(model).norm.weight, 1 + model.model.norm.weight)


def test_abi() -> None:
    """Every structure has the fields of abi.h in the same order and of the same types."""
    source = re.sub(r"//.*", "", (Path(abi.__file__).parent / "src" / "abi.h").read_text())
    found = re.findall(r"struct (\w+) \{(.*?)\n\};", source, re.DOTALL)
    assert [name for name, _ in found] == [structure.__name__ for structure in abi.STRUCTURES]
    for (_, body), structure in zip(found, abi.STRUCTURES, strict=True):
        expected = []
        for declaration in body.split(";")[:-1]:
            kind, names = re.fullmatch(r"\s*((?:const )?\w+)\s*(.*)", declaration, re.DOTALL).groups()
            what = "*" in declaration or kind.removeprefix("const ")
            expected += [(name.strip(" *").partition("[")[0], what) for name in names.split(",")]
        fields = []
        for name, kind in ((name, kind) for name, kind, *_ in structure._fields_):
            pointed = kind is ctypes.c_void_p or hasattr(kind, "contents")
            kind = getattr(kind, "_type_", kind) if issubclass(kind, ctypes.Array) else kind
            plain = {ctypes.c_int64: "int64_t", ctypes.c_double: "double"}.get(kind, kind.__name__)
            fields.append((name, pointed or plain))
        assert fields == expected


@in_turn("mirror, name", [
    (abi.MatrixKind, "MatrixKind"), (abi.PolicyKind, "PolicyKind"), (abi.PositionMode, "PositionMode"),
    (abi.NormKind, "NormKind"), (abi.Activation, "Activation"), (abi.Scoring, "Scoring"),
    (abi.GroupWorth, "GroupWorth"), (abi.GateLayout, "GateLayout"), (abi.GateKind, "GateKind"),
    (abi.MixerKind, "MixerKind"),
])  # fmt: skip
def test_enumerations(mirror: Any, name: str) -> None:
    source = (Path(abi.__file__).parent / "src" / "abi.h").read_text()
    body = re.search(rf"enum {name} : int64_t \{{(.*?)\}}", source, re.DOTALL).group(1)
    assert [int(value) for value in re.findall(r"= (\d+)", body)] == [member.value for member in mirror]
    names = [word.lower().removesuffix("norm").removesuffix("mixer") for word in re.findall(r"k(\w+) =", body)]
    members = [member.name.replace("_", "").lower() for member in mirror]
    assert all(name.startswith(short) for short, name in zip(names, members, strict=True))
