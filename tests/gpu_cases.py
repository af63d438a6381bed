"""Launches of realistic sizes, which are compiled and not run."""

from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2MoeConfig,
)

from h2o_stream.attachment.describe import describe
from h2o_stream.cache.attention import LogitTransform
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.protection import Protection
from h2o_stream.config import CacheConfig
from h2o_stream.gpu import layers as gpu_layers
from h2o_stream.gpu.journal import Journal
from h2o_stream.gpu.kernels import GpuKernels, NewTokens, Norms
from h2o_stream.gpu.matrices import norm_in_place
from h2o_stream.gpu.mixers import apply_gate, mix
from h2o_stream.gpu.packed import block_matrix
from h2o_stream.native.abi import GateKind, MatrixKind, NormKind
from h2o_stream.native.attention import Attention, Gate
from h2o_stream.native.description import Description, Layer, Matrix, Mlp, Norm
from h2o_stream.native.experts import Experts
from h2o_stream.native.gguf_types import BLOCKS, TensorType
from h2o_stream.native.mixers import Convolution, GatedDelta, Mamba2, ShortConvolution
from h2o_stream.runtime.mixers import columns_by_key_head
from tests.test_native_prefill import Table

KERNELS = GpuKernels(torch.device("cpu"))


def attention(policy: str = "h2o", dtype: torch.dtype = torch.bfloat16, size: int = 128, window: int = 256,
              groups: int = 4, rotary: int = 128, split: bool = False, **settings: object) -> None:  # fmt: skip
    positions, bits = settings.get("positions"), settings.get("kv_bits", 16)
    plan = CacheConfig(policy, window=window, budgets="equal", chunk=64, positions=positions, kv_bits=bits).plan(8192)
    table = None if plan.positions == "absolute" else Table(rotary)
    group = HeadGroup(plan, layer=1, table=table, sliding=settings.get("sliding"))
    group.protection = Protection(plan.sinks, settings.get("pins", ()), plan.recent, settings.get("transient", ()))
    heads, transform = 2, LogitTransform(0.1, settings.get("softcap"), settings.get("sinks"))
    KERNELS._processors = 132 if split else 0
    query = torch.zeros(1, heads * groups, 200, size, dtype=dtype)
    key = torch.zeros(1, heads, 200, size, dtype=dtype)
    group.queries_per_key = groups
    group.allocate_like(key, key, window + group.spare)
    group.tokens.lengths = (5000,)
    for count in settings.get("counts", (1, 200)):
        q, k = query[:, :, :count], key[:, :, :count]
        out = torch.zeros(1, count, heads * groups, size, dtype=dtype).transpose(1, 2)
        new = NewTokens(q, k, k, out, settings.get("heads"))
        if count == 1:
            KERNELS.step(group, new, transform, (5000,), settings.get("norms", Norms()), settings.get("streams"))
        else:
            KERNELS.prompt(group, new, transform, limits=settings.get("limits"))


def journal(bits: int = 16) -> None:
    """Of a policy with two scores."""
    group = HeadGroup(CacheConfig("h2o", window=256, budgets="equal", kv_bits=bits).plan(8192))
    key = torch.zeros(1, 2, 1, 128, dtype=torch.bfloat16)
    group.allocate_like(key, key, 256 + group.spare)
    journal = Journal([group], 1)
    journal.note(group, 1)
    journal.take_back(2, 1)


def layers(rows: int = 1, quantized: str = "", **settings: object) -> None:
    """A model of two layers; attention is left out."""
    config = LlamaConfig(vocab_size=512, hidden_size=1024, intermediate_size=2816, num_hidden_layers=2,
                         num_attention_heads=8, num_key_value_heads=2, **settings)  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu").eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    description = describe(model)
    if quantized:
        description = in_blocks(description, TensorType[quantized])
    assert not gpu_layers.why_not(description)
    x, ids = torch.zeros(rows, 1024, dtype=torch.bfloat16), torch.zeros(rows, dtype=torch.int64)
    stream = gpu_layers.run(description, ids, x.dtype, lambda number, attention, projected: torch.zeros_like(x))
    gpu_layers.logits_of(description, stream)


ALIKE = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
QWEN_2 = Qwen2MoeConfig(
    **ALIKE, hidden_size=2048, moe_intermediate_size=768, shared_expert_intermediate_size=512, num_experts=4,
    num_experts_per_tok=2,
)  # fmt: skip
GPT_OSS = GptOssConfig(**ALIKE, hidden_size=1440, intermediate_size=1440, num_local_experts=4, num_experts_per_tok=2)
DEEPSEEK = DeepseekV3Config(
    **ALIKE, hidden_size=1024, moe_intermediate_size=768, n_routed_experts=8, n_group=4, topk_group=2,
    num_experts_per_tok=2, first_k_dense_replace=0,
)  # fmt: skip


def experts(rows: int = 1, dtype: torch.dtype = torch.bfloat16, quantized: str = "", config: Any = QWEN_2) -> None:
    """A mixture of experts of one layer; attention is left out."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).to(dtype)
    description = describe(model.to_empty(device="cpu").eval())
    if quantized:
        description = in_blocks(description, TensorType[quantized])
    assert not gpu_layers.why_not(description)
    columns = [layer.attention.out.columns for layer in description.layers if layer.attention]
    ids = torch.zeros(rows, dtype=torch.int64)
    gpu_layers.run(description, ids, dtype, lambda number, *_: torch.zeros(rows, columns[number], dtype=dtype))


def norms(dtype: torch.dtype = torch.bfloat16) -> None:
    """Of all heads."""
    norm = Norm(NormKind.RMS, torch.ones(1024), None, 1e-6)
    norm_in_place(torch.zeros(2, 4096, dtype=dtype), (0, norm), (1024, norm))


def mixers(rows: int = 1, tokens: int = 1, dtype: torch.dtype = torch.bfloat16) -> None:
    """Of LFM2, Qwen3-Next, Granite 4 and Falcon-H1, in their sizes; and gates of attention."""

    def floats(*shape: int) -> torch.Tensor:
        return torch.zeros(shape)

    def matrix(rows: int, columns: int = 64) -> Matrix:
        return Matrix(torch.zeros(rows, columns), None, rows, columns, MatrixKind.FLOAT32)

    def mamba2(heads: int, keys: int, key: int, groups: int, norm: Norm) -> Mamba2:
        inner, channels = heads * 64, heads * 64 + 2 * keys * key
        return Mamba2([matrix(inner + channels + heads)], Convolution(floats(channels, 4), floats(channels)), keys,
                      heads, key, 64, floats(heads), floats(heads), (0.0, float("inf")), floats(heads), norm, groups,
                      False, matrix(64, inner))  # fmt: skip

    columns = columns_by_key_head(16, 32, 128, 128)
    made = [
        ShortConvolution(matrix(3 * 2048), Convolution(floats(2048, 3), None), matrix(64, 2048)),
        GatedDelta([matrix(12352)], columns, Convolution(floats(8192, 4), None), 16, 32, 128, 128, floats(32),
                   floats(32), 1.0, Norm(NormKind.RMS, floats(128), None, 1e-6), matrix(64, 4096)),
        mamba2(48, 1, 128, 1, Norm(NormKind.RMS, floats(48 * 64), None, 1e-5)), mamba2(24, 2, 256, 1, Norm()),
    ]  # fmt: skip
    for mixer in made:
        states = {name: torch.zeros(rows, *shape, dtype=dtype if "conv" in name else torch.float32)
                  for name, shape in mixer.states.items()}  # fmt: skip
        x = torch.zeros(rows * tokens, sum(part.rows for part in mixer.projections), dtype=dtype)
        mix(mixer, x, states, x.new_zeros(rows * tokens, mixer.out.columns), rows, tokens > 1)
    for size in (1, 256):
        x = torch.zeros(rows, 16 * 513, dtype=dtype)
        apply_gate(Gate(GateKind.SIGMOID_GATE, 256, 513, size), x, x.new_zeros(rows, 16 * 256), 16)


def in_blocks(part: Any, kind: TensorType) -> Any:
    """A description with its matrices in blocks."""
    if isinstance(part, Matrix):
        count, size = BLOCKS[kind]
        blocks = torch.zeros(part.rows * (part.columns // count) * size, dtype=torch.uint8)
        return block_matrix(blocks, part.bias, kind, part.rows, part.columns)
    if isinstance(part, Experts):
        size = part.count * part.inner_size
        first = in_blocks(Matrix(part.down.weights, None, size, part.hidden, part.down.kind), kind)
        part = replace(part, gate=first, up=first, down=in_blocks(part.down, kind), stride=part.inner_size)
    if isinstance(part, list | tuple):
        return type(part)(in_blocks(each, kind) for each in part)
    if isinstance(part, Description | Layer | Attention | Mlp):
        return replace(part, **{field.name: in_blocks(getattr(part, field.name), kind) for field in fields(part)})
    return part


CASES = {
    "experts": experts,
    "experts of 4 rows, float32": lambda: experts(4, torch.float32),
    "experts of 5 rows": lambda: experts(5),
    "experts of 5 rows, float32": lambda: experts(5, torch.float32),
    "experts of a prompt": lambda: experts(200),
    "experts of a prompt, float32": lambda: experts(200, torch.float32),
    "experts in blocks": lambda: experts(quantized="Q6_K"),
    "experts of 5 rows, in blocks": lambda: experts(5, quantized="Q4_K"),
    "experts of a prompt, in blocks": lambda: experts(200, quantized="Q8_0"),
    "experts of a prompt, in blocks, float32": lambda: experts(200, torch.float32, "Q4_K"),
    **{f"{rows} rows of experts in columns": partial(experts, rows, config=GPT_OSS) for rows in (1, 5, 200)},
    "experts in columns, float32": partial(experts, 200, torch.float32, config=GPT_OSS),
    **{f"{rows} rows of groups of experts, latent keys": partial(experts, rows, config=DEEPSEEK) for rows in (1, 5)},
    "norms": norms,
    "layers": layers,
    "mixers": mixers,
    "mixers, float32": lambda: mixers(2, 100, torch.float32),
    "layers of 4 rows": lambda: layers(4, attention_bias=True, mlp_bias=True),
    "layers of 5 rows": lambda: layers(5, attention_bias=True, mlp_bias=True),
    "layers with biases": lambda: layers(attention_bias=True, mlp_bias=True, hidden_act="gelu"),
    "rows of blocks": lambda: layers(64, quantized="Q4_K"),
    "rows of Q6_K": lambda: layers(5, quantized="Q6_K"),
    "a pass, Q6_K": lambda: layers(4, quantized="Q6_K"),
    "a journal": journal,
    "a journal, 6 bits": lambda: journal(6),
    **{kind: partial(layers, quantized=kind) for kind in ("Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")},
    "h2o": attention,
    "float32": lambda: attention(dtype=torch.float32),
    "float32, window 4096, split": lambda: attention(dtype=torch.float32, window=4096, split=True),
    "float16, window 4096, split": lambda: attention(dtype=torch.float16, window=4096, split=True),
    "window 4096": lambda: attention(window=4096),
    "split": lambda: attention(split=True),
    "limits": lambda: attention(size=64, rotary=64, limits=torch.zeros(1, 4, dtype=torch.int32)),
    "tova, 64 numbers": lambda: attention("tova", size=64, rotary=32, window=1000, groups=7),
    "random, everything": lambda: attention(
        "random", sliding=512, pins=(range(3),), transient=(range(9, 30),), softcap=30.0, sinks=torch.zeros(8)
    ),
    "80 numbers, 48 queries a head": lambda: attention(size=80, rotary=80, window=4096, groups=48, counts=(1,)),
    "96 numbers, a window of 24": lambda: attention(
        "recent", size=96, rotary=96, window=24, groups=1, positions="rolling"
    ),
    "absolute": lambda: attention(size=64, positions="absolute"),
    "norms, some heads": lambda: attention(
        size=64, rotary=32, norms=Norms(torch.zeros(64), torch.zeros(64), 1e-6, 1e-6, 1.2), heads=torch.zeros(2).long()
    ),
    "256 numbers, float32": lambda: attention(dtype=torch.float32, size=256, rotary=256, window=1024, counts=(1,)),
    "256 numbers, window 4096, split": lambda: attention(size=256, rotary=256, window=4096, split=True),
    "streams": lambda: attention(counts=(1,), streams=torch.zeros(3, 17, dtype=torch.int64)),
    "streams, 4 bits": lambda: attention(kv_bits=4, counts=(1,), streams=torch.zeros(3, 17, dtype=torch.int64)),
    "8 bits, float32": lambda: attention(dtype=torch.float32, kv_bits=8),
    "6 bits, 80 numbers": lambda: attention("tova", size=80, rotary=80, window=1000, kv_bits=6),
    "4 bits": lambda: attention(kv_bits=4),
    "2 bits, 256 numbers, float16": lambda: attention("recent", dtype=torch.float16, size=256, rotary=64, kv_bits=2),
    "256 numbers": lambda: attention("h2o-paper", size=256, rotary=256),
}
