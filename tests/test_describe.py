"""The description of a model says everything: a plain interpreter of it computes the model's own logits."""

from __future__ import annotations

import copy
import ctypes
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from h2o_stream.models.packed_layers import PackedEmbedding, PackedLinear
from h2o_stream.native import abi, library
from h2o_stream.native.describe import describe
from h2o_stream.native.description import Attention, Description, DescriptionError, Layer, Matrix, NativeModel, Rope
from h2o_stream.native.modules import ACTIVATIONS, apply_norm, matrix_of, norm_of
from tests.families import FAMILIES, GROUPED, LONGROPE, SIZES, SLIDING, YARN, Family, rope, tiny
from tests.packed_tiles import KINDS, random_tiles
from tests.packed_tiles import numbers as packed_numbers


def numbers(matrix: Matrix) -> Tensor:
    if matrix.kind in (abi.MatrixKind.FLOAT32, abi.MatrixKind.BFLOAT16):
        return matrix.weights.double()
    return packed_numbers(matrix.weights, matrix.kind, matrix.rows, matrix.columns)


def apply(matrix: Matrix, x: Tensor) -> Tensor:
    y = x @ numbers(matrix).T
    return y if matrix.bias is None else y + matrix.bias.double()


def heads_of(x: Tensor, first: int, step: int, count: int, size: int) -> Tensor:
    return torch.stack([x[:, first + h * step : first + h * step + size] for h in range(count)])


def rotated(x: Tensor, rope: Rope) -> Tensor:
    """[heads, tokens, D], token n at position n."""
    half, rotary = rope.rotary_dims // 2, rope.rotary_dims
    angles = torch.arange(x.shape[1]).double()[:, None] * rope.frequencies.double()
    first, second, rest = x[..., :half] * rope.scale, x[..., half:rotary] * rope.scale, x[..., rotary:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def attend(attention: Attention, x: Tensor) -> Tensor:
    given, at, size = (
        torch.cat([apply(matrix, x) for matrix in attention.qkv], -1),
        attention.heads,
        attention.head_size,
    )
    query = apply_norm(
        attention.query_norm, heads_of(given, at.query_offset, at.query_stride, attention.query_heads, size)
    )
    key = apply_norm(attention.key_norm, heads_of(given, at.key_offset, at.key_stride, attention.kv_heads, size))
    value = heads_of(given, at.value_offset, at.value_stride, attention.kv_heads, attention.value_size)
    if attention.rope:
        query, key = rotated(query, attention.rope), rotated(key, attention.rope)
    groups = attention.query_heads // attention.kv_heads
    scores = query @ key.repeat_interleave(groups, 0).mT * attention.scaling
    if attention.softcap:
        scores = (scores / attention.softcap).tanh() * attention.softcap
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return apply(attention.out, (weights @ value.repeat_interleave(groups, 0)).transpose(0, 1).flatten(1))


def feed_forward(layer: Layer, x: Tensor) -> Tensor:
    mlp = layer.mlp
    if mlp.gate is None:
        return apply(mlp.down, ACTIVATIONS[mlp.activation](apply(mlp.up, x)))
    return apply(mlp.down, ACTIVATIONS[mlp.activation](apply(mlp.gate, x)) * apply(mlp.up, x))


def interpret(description: Description, tokens: list[int]) -> Tensor:
    """Logits [n, vocabulary] in float64, with full attention at absolute positions."""
    x = numbers(description.embedding)[tokens] * description.embedding_scale
    if description.learned_positions is not None:
        start = description.learned_offset
        x = x + description.learned_positions[start : start + len(tokens)]
    for layer in description.layers:
        added = apply_norm(layer.after_attention, attend(layer.attention, apply_norm(layer.before_attention, x)))
        before, x = x, x + description.residual_scale * added
        read = before if layer.parallel else x
        x = x + description.residual_scale * apply_norm(
            layer.after_mlp, feed_forward(layer, apply_norm(layer.before_mlp, read))
        )
    logits = apply(description.output, apply_norm(description.norm, x)) * description.logit_scale
    cap = description.logit_softcap
    return (logits / cap).tanh() * cap if cap else logits


TOKENS = [1, 17, 4, 60, 33, 33, 9, 21]


@torch.no_grad()
def error(model: Any) -> float:
    """The largest difference of a logit to the model's own, relative to the largest logit."""
    expected = model(torch.tensor([TOKENS])).logits[0].double()
    return float((interpret(describe(model), TOKENS) - expected).abs().max() / expected.abs().max())


def nudged(model: Any) -> Any:
    """Norms and biases that are not one and zero, as trained models have them."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}
PARTIAL = rope("default", partial_rotary_factor=0.5)
PER_HEAD = {**SIZES, "num_key_value_heads": 4}

OTHERS: dict[str, Callable[[], Any]] = {
    "Gemma": tiny("Gemma", **GROUPED),
    "Granite": tiny("Granite", **GROUPED, **GRANITE),
    "Llama, biases": tiny("Llama", **GROUPED, attention_bias=True, mlp_bias=True),
    "Llama, yarn": tiny("Llama", **GROUPED, **YARN),
    "Llama, dynamic": tiny("Llama", **GROUPED, **rope("dynamic", factor=2.0)),
    "Llama, tied": tiny("Llama", **GROUPED, tie_word_embeddings=True),
    "Llama, gelu": tiny("Llama", **GROUPED, hidden_act="gelu_new"),
    "GPT-NeoX, one after the other": tiny("GPTNeoX", **SIZES, **PARTIAL, use_parallel_residual=False),
    "OLMo": tiny("Olmo", **GROUPED),
    "OPT, without biases": tiny(
        "OPT", **{**SIZES, "word_embed_proj_dim": 32, "ffn_dim": 32, "enable_bias": False, "init_std": 0.4}
    ),
    "Phi, output bias": tiny("Phi", **SIZES, **PARTIAL),
    "Phi, normed queries": tiny("Phi", **SIZES, **PARTIAL, qk_layernorm=True),
    "Seed-OSS": tiny("SeedOss", **GROUPED),
    "SmolLM3, rotary only": tiny("SmolLM3", **GROUPED, no_rope_layers=[1, 1]),
    "StableLM": tiny("StableLm", **PER_HEAD, **PARTIAL, use_qkv_bias=True),
    "StableLM, parallel": tiny("StableLm", **PER_HEAD, **PARTIAL, use_parallel_residual=True),
    "StarCoder 2": tiny("Starcoder2", **GROUPED),
    "VaultGemma": tiny("VaultGemma", **GROUPED),
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_families(family: Family) -> None:
    assert error(nudged(family.make())) < 2e-5


@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str) -> None:
    assert error(nudged(OTHERS[name]())) < 2e-5


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@torch.no_grad()
def test_bfloat16(family: Family) -> None:
    """The interpreter does not round between, so it is about as near to the model as that is to float32."""
    model = nudged(family.make()).bfloat16()
    description = describe(model)
    assert description.embedding.kind == abi.MatrixKind.BFLOAT16
    expected = model(torch.tensor([TOKENS])).logits[0].double()
    difference = interpret(description, TOKENS) - expected
    assert difference.square().mean().sqrt() < 0.06 * expected.square().mean().sqrt()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "experts": (tiny("Mixtral", **GROUPED), "layer 0 has a MixtralSparseMoeBlock where an MLP is expected"),
    "other names": (tiny("GPTBigCode", **SIZES), "GPTBigCodeForCausalLM has no list of layers"),
    "norm over all heads": (tiny("Olmo2", **GROUPED), "q_norm of the attention of layer 0 is a Olmo2RMSNorm that does"),
    "norms of each head": (
        tiny("StableLm", **PER_HEAD, **PARTIAL, qk_layernorm=True),
        "model.layers.0.self_attn.q_layernorm is an unsupported StableLmLayerNormPerHead",
    ),
    "clipped queries": (tiny("Olmo", **GROUPED, clip_qkv=1.0), "the config has clip_qkv = 1.0"),
    "norms behind": (
        tiny("OPT", **{**SIZES, "word_embed_proj_dim": 32, "ffn_dim": 32, "do_layer_norm_before": False}),
        "the config has do_layer_norm_before = False",
    ),
    "projected embedding": (
        tiny("OPT", **{**SIZES, "word_embed_proj_dim": 16, "ffn_dim": 32}),
        "the embedding has 16 columns, layers 32",
    ),
    "layers without positions": (
        tiny("SmolLM3", **GROUPED, no_rope_layers=[1, 0]),
        "the attention of layer 1 has use_rope = 0",
    ),
    "layers without positions among sliding ones": (
        tiny("Exaone4", **GROUPED, sliding_window=4, layer_types=SLIDING),
        "the attention of layer 1 is in a layer without rotary positions",
    ),
    "interleaved rotation": (tiny("Glm", **GROUPED), "the attention of layer 0 does not rotate in the rotate-half"),
    "interleaved table": (tiny("Cohere", **GROUPED), "CohereRotaryEmbedding computes angles that differ"),
    "sinks": (tiny("GptOss", **GROUPED, num_local_experts=2), "has the parameter sinks in its GptOssAttention"),
    "activation": (tiny("Arcee", **GROUPED), "act_fn of layer 0 is ReLUSquaredActivation"),
    "temperature": (tiny("Ministral3", **GROUPED), "RoPE has llama_4_scaling_beta = 0.1"),
    "norms after rotation": (
        tiny("HunYuanDenseV1", **GROUPED),
        "self_attn.query_layernorm is an unsupported HunYuanDenseV1RMSNorm",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(DescriptionError, match=reason):
        describe(make())


@pytest.fixture
def llama() -> Any:
    return copy.deepcopy(FAMILIES[1].make())


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * 2


class DoubledLinear(nn.Linear):
    forward = nn.Linear.forward


class TestChanged:
    """Whatever somebody did to the modules of a model is seen, and a module that was not changed is left alone."""

    def refused(self, model: Any, reason: str) -> None:
        with pytest.raises(DescriptionError, match=reason):
            describe(model)

    def test_hooks(self, llama: Any) -> None:
        norm = llama.model.layers[1].input_layernorm
        for register in (norm.register_forward_hook, norm.register_forward_pre_hook):
            handle = register(lambda *args: None)
            self.refused(llama, "model.layers.1.input_layernorm has a forward hook")
            handle.remove()
        describe(llama)

    def test_hooks_that_only_look(self, llama: Any) -> None:
        llama(torch.tensor([TOKENS]), output_hidden_states=True)
        assert any(module._forward_hooks for module in llama.modules())
        assert error(llama) < 2e-5

    def test_accelerate(self, llama: Any) -> None:
        llama.model.norm._hf_hook = object()
        self.refused(llama, "model.norm has a hook of accelerate")

    def test_patched_forward(self, llama: Any) -> None:
        mlp = llama.model.layers[0].mlp
        mlp.forward = lambda x: x
        self.refused(llama, "model.layers.0.mlp has a patched forward")

    def test_adapter(self, llama: Any) -> None:
        attention = llama.model.layers[0].self_attn
        attention.q_proj = LoraLinear(attention.q_proj)
        self.refused(llama, "model.layers.0.self_attn.q_proj is a LoraLinear, whose forward is from tests")

    def test_subclass(self, llama: Any) -> None:
        llama.model.layers[0].self_attn.q_proj = DoubledLinear(32, 32)
        self.refused(llama, "q_proj of the attention of layer 0 is a DoubledLinear where a linear layer is expected")

    def test_left_over(self, llama: Any) -> None:
        llama.model.layers[0].mlp.extra = nn.Linear(32, 32)
        self.refused(llama, "model.layers.0.mlp.extra is an unsupported Linear")
        del llama.model.layers[0].mlp.extra
        llama.model.layers[0].mlp.scale = nn.Parameter(torch.ones(1))
        self.refused(llama, "layer 0 has the parameter scale in its LlamaMLP")

    def test_other_numbers(self, llama: Any) -> None:
        self.refused(llama.half(), "weights of float16")

    def test_elsewhere(self, llama: Any) -> None:
        self.refused(llama.to("meta"), "has weights that are not on the CPU")

    def test_not_contiguous(self, llama: Any) -> None:
        linear = llama.model.layers[0].mlp.up_proj
        linear.weight = nn.Parameter(linear.weight.detach().T.contiguous().T)
        self.refused(llama, "up_proj of layer 0 has weights that are not contiguous")

    def test_training(self, llama: Any) -> None:
        describe(llama.train())
        llama.model.layers[1].self_attn.attention_dropout = 0.1
        self.refused(llama, "model.layers.1.self_attn uses dropout in training mode")
        describe(llama.eval())

    def test_sizes(self, llama: Any) -> None:
        llama.model.layers[0].self_attn.head_dim = 12
        self.refused(llama, "matrices that are not a whole number of heads of size 12")


class Packed(PackedLinear):
    """A packed layer that does not round what it multiplies."""

    def forward(self, x: Tensor) -> Tensor:
        weight = packed_numbers(self.tiles, self.kind, self.out_features, self.in_features).to(x.dtype)
        return nn.functional.linear(x, weight, self.bias)


Packed.forward.__module__ = PackedLinear.__module__


def packed_layer(linear: nn.Linear, kind: abi.MatrixKind) -> Packed:
    rows, columns = linear.weight.shape
    return Packed(kind, columns, rows, linear.bias, random_tiles(kind, rows, columns))


def pack_all(model: Any, kind: abi.MatrixKind) -> Any:
    """A model with packed layers of random numbers."""
    model = nudged(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, packed_layer(child, kind))
    return model


class TestPacked:
    @pytest.mark.parametrize("kind", [abi.MatrixKind.INT8, abi.MatrixKind.INT4])
    @pytest.mark.parametrize("number", [1, 5, 8, 12], ids=lambda number: FAMILIES[number].name)
    def test_families(self, kind: abi.MatrixKind, number: int) -> None:
        """Also where one matrix holds several: gate and up of Phi-3 are rows of it."""
        assert error(pack_all(FAMILIES[number].make(), kind)) < 2e-5

    @pytest.mark.parametrize("kind", [abi.MatrixKind.INT8, abi.MatrixKind.INT4])
    def test_embedding(self, kind: abi.MatrixKind) -> None:
        if library.missing_reason():
            pytest.skip("there is no compiled library")
        model = pack_all(FAMILIES[1].make(), kind)
        vocabulary, hidden = model.get_input_embeddings().weight.shape
        tiles = random_tiles(kind, vocabulary, hidden)
        model.set_input_embeddings(PackedEmbedding(kind, vocabulary, hidden, torch.float32, tiles=tiles))
        embedding = describe(model).embedding
        assert (embedding.kind, embedding.rows, embedding.columns) == (kind, vocabulary, hidden)
        assert embedding.weights.data_ptr() == tiles.data_ptr()
        assert error(model) < 2e-5

    @pytest.mark.parametrize("kind", KINDS)
    def test_rows_within_a_tile(self, kind: abi.MatrixKind) -> None:
        matrix = matrix_of(packed_layer(nn.Linear(256, 44), kind), "m")
        assert matrix.kind == kind
        assert torch.equal(numbers(matrix.row_range(16, 20)), numbers(matrix)[16:36])
        with pytest.raises(DescriptionError, match="rows 6 of .* multiple of 16"):
            matrix.row_range(6, 6)


class TestMemory:
    """Matrices stay where they are; structures point at what the description holds."""

    def test_nothing_large_is_copied(self, llama: Any) -> None:
        description = describe(llama)
        assert description.embedding.weights.data_ptr() == llama.model.embed_tokens.weight.data_ptr()
        layer, module = description.layers[1], llama.model.layers[1]
        assert layer.mlp.down.weights.data_ptr() == module.mlp.down_proj.weight.data_ptr()
        assert [matrix.weights.data_ptr() for matrix in layer.attention.qkv] == [
            linear.weight.data_ptr()
            for linear in (module.self_attn.q_proj, module.self_attn.k_proj, module.self_attn.v_proj)
        ]

    def test_parts_of_one_matrix(self) -> None:
        model = FAMILIES[8].make()
        mlp, fused = describe(model).layers[0].mlp, model.model.layers[0].mlp.gate_up_proj.weight
        assert mlp.gate is not None
        assert mlp.gate.weights.data_ptr() == fused.data_ptr()
        assert mlp.up.weights.data_ptr() == fused[32:].data_ptr()

    def test_tied(self) -> None:
        description = describe(OTHERS["Llama, tied"]())
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

    def test_no_gate_and_no_rotation(self) -> None:
        native = NativeModel(describe(FAMILIES[-1].make()))
        layer = native.layers[0]
        assert layer.gate.weights is None
        assert layer.frequencies is None
        assert (layer.rope_scale, layer.rope_scaled_dims, layer.activation) == (1.0, 0, abi.Activation.RELU)
        assert native.struct.learned_offset == 2

    @pytest.mark.parametrize(
        ("make", "holds"),
        [
            (tiny("Llama", **GROUPED, **YARN), True),
            (OTHERS["Llama, dynamic"], False),
            (tiny("Phi3", **GROUPED, **LONGROPE), False),
        ],
    )
    def test_frequencies_at_every_length(self, make: Callable[[], Any], holds: bool) -> None:
        assert describe(make()).supports_absolute is holds

    def test_frequencies_after_a_long_text(self) -> None:
        """A long text exchanges the frequencies of LongRoPE; those of short ones are described."""
        model = copy.deepcopy(tiny("Phi3", **GROUPED, **LONGROPE)())
        model(torch.ones(1, 100, dtype=torch.long))
        assert error(model) < 2e-5


def test_zero_norms_are_told_apart() -> None:
    """Gemma's norms start at zero, which means one."""
    norm = FAMILIES[10].make().model.norm
    with torch.no_grad():
        weight = norm_of(norm, 32, "it").weight
    assert weight is not None
    assert torch.equal(weight, 1 + norm.weight)


def test_abi() -> None:
    """Every structure has the fields of abi.h, in order and of the same kinds."""
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


@pytest.mark.parametrize(
    ("mirror", "name"),
    [
        (abi.MatrixKind, "MatrixKind"),
        (abi.PolicyKind, "PolicyKind"),
        (abi.PositionMode, "PositionMode"),
        (abi.NormKind, "NormKind"),
        (abi.Activation, "Activation"),
    ],
)
def test_enumerations(mirror: Any, name: str) -> None:
    source = (Path(abi.__file__).parent / "src" / "abi.h").read_text()
    body = re.search(rf"enum {name} : int64_t \{{(.*?)\}}", source).group(1)
    assert [int(value) for value in re.findall(r"= (\d+)", body)] == [member.value for member in mirror]
    names = [word.lower().removesuffix("norm") for word in re.findall(r"k(\w+) =", body)]
    members = [member.name.replace("_", "").lower() for member in mirror]
    assert all(name.startswith(short) for short, name in zip(names, members, strict=True))
