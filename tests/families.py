"""A tiny random model of every supported family, and the matrix that compares each with the oracle."""

import copy
import functools
import itertools
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from h2o_stream import CacheConfig, attach
from tests.literature import PRIORITIES
from tests.oracle import Oracle, Rules
from tests.sweep import sweep_table

LARGEST = 2e-5
"""Largest allowed difference of a logit, relative to the largest logit, in float32."""

TIE = 1e-5
"""Relative difference of scores below which float32 may order them either way."""

CONTEXT = 128

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT, "initializer_range": 0.4, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
PER_HEAD = {**SIZES, "num_key_value_heads": 4}


@dataclass(frozen=True)
class Family:
    """A family in lab/docs/families.md.

    Attributes:
        name: the family's name.
        models: well-known models of the family.
        special: differences from Llama 2.
        make: makes a tiny random model; cached.
        learned: whether positions are learned, so that only ``absolute`` is possible.
        max_distance: largest distance the model was trained for, if not CONTEXT.
        native: whether single tokens are decoded by native steps.
    """

    name: str
    models: str
    special: str
    make: Callable[[], PreTrainedModel]
    learned: bool = False
    max_distance: int = CONTEXT
    native: bool = True

    @property
    def positions(self) -> tuple[str, ...]:
        return ("absolute",) if self.learned else ("gap", "rolling", "absolute")


def tiny(kind: str, config_kind: str = "", **settings: Any) -> Callable[[], PreTrainedModel]:
    def make() -> PreTrainedModel:
        torch.manual_seed(7)
        config = getattr(transformers, f"{config_kind or kind}Config")(**settings)
        return getattr(transformers, f"{kind}ForCausalLM")(config).eval()

    return functools.cache(make)


def nudged(model: Any) -> Any:
    """A copy whose norms and biases differ from one and zero, as in trained models."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(3)
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for parameter in (*model.parameters(), *biases):
        if parameter.dim() == 1 or not parameter.any():
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


LLAMA3 = rope(
    "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=CONTEXT // 4
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=CONTEXT // 4)
LONGROPE = rope(
    "longrope",
    short_factor=[1.0, 1.1, 1.2],
    long_factor=[1.0, 2.0, 4.0],
    partial_rotary_factor=0.75,
    original_max_position_embeddings=CONTEXT // 2,
)
PARTIAL = rope("default", partial_rotary_factor=0.5)
SLIDING = ["sliding_attention", "full_attention"]

LATENT = {
    **PER_HEAD, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 2,
}  # fmt: skip

LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
STATE_SPACE = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 1}
MULTIPLIERS = {
    "embedding_multiplier": 1.5, "lm_head_multiplier": 0.7, "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 1.1, "key_multiplier": 0.8, "mlp_multipliers": [1.2, 0.6], "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.5,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_local_experts": 4, "num_experts": 4}
HYBRID = ["linear_attention", "full_attention"]

FAMILIES = [
    Family("Llama 1, 2", "Llama 2, Vicuna, SmolLM2", "", tiny("Llama", **SIZES)),
    Family("Llama 3", "Llama 3.1, 3.2", "grouped queries, llama3 RoPE", tiny("Llama", **GROUPED, **LLAMA3)),
    Family("Llama, linear", "LongChat", "linear RoPE scaling", tiny("Llama", **GROUPED, **rope("linear", factor=2.0))),
    Family("Mistral", "Mistral 7B v0.3, Nemo", "grouped queries", tiny("Mistral", **GROUPED, sliding_window=None)),
    Family("Mistral, sliding", "Mistral 7B v0.1", "a sliding window in all layers",
        tiny("Mistral", **GROUPED, sliding_window=64), max_distance=64),
    Family("Qwen 2", "Qwen2.5", "biases on q, k, v", tiny("Qwen2", **GROUPED)),
    Family("Qwen 2, YaRN", "Qwen2.5 beyond 32k", "YaRN scaling", tiny("Qwen2", **GROUPED, **YARN)),
    Family("Qwen 3", "Qwen3", "normed queries and keys", tiny("Qwen3", **GROUPED)),
    Family("Phi-3", "Phi-3 mini 4k", "fused q, k, v; a sliding window in all layers",
        tiny("Phi3", **GROUPED, sliding_window=60), max_distance=60),
    Family("Phi-3, LongRoPE", "Phi-3.5, Phi-4 mini", "partial LongRoPE, kept within its short factors",
        tiny("Phi3", **GROUPED, **LONGROPE), max_distance=CONTEXT // 2),
    Family("Gemma 2", "Gemma 2", "soft-capping, every other layer sliding",
        tiny("Gemma2", **GROUPED, sliding_window=10, layer_types=SLIDING, query_pre_attn_scalar=8,
        attn_logit_softcapping=3.0, final_logit_softcapping=20.0)),
    Family("Gemma 3", "Gemma 3 (text)", "sliding layers with a RoPE of their own",
        tiny("Gemma3", "Gemma3Text", **GROUPED, sliding_window=10, layer_types=SLIDING, query_pre_attn_scalar=8)),
    Family("GPT-NeoX", "Pythia, GPT-NeoX 20B", "partial rotary, parallel MLP", tiny("GPTNeoX", **SIZES, **PARTIAL)),
    Family("GLM", "GLM-4 9B", "partial RoPE on adjacent pairs", tiny("Glm", **GROUPED, **PARTIAL)),
    Family("Cohere", "Command R", "RoPE on adjacent pairs", tiny("Cohere", **GROUPED)),
    Family("Cohere 2", "Command R7B, Command A",
        "sliding layers with RoPE on adjacent pairs, the others without positions",
        tiny("Cohere2", **GROUPED, sliding_window=10, layer_types=SLIDING)),
    Family("ERNIE 4.5", "ERNIE 4.5 0.3B", "RoPE on adjacent pairs", tiny("Ernie4_5", **GROUPED)),
    Family("Helium", "Helium 1", "RoPE on adjacent pairs",
        tiny("Helium", **{**GROUPED, "intermediate_size": 48})),
    Family("SmolLM3", "SmolLM3 3B", "every fourth layer without positions",
        tiny("SmolLM3", **GROUPED, no_rope_layers=[1, 0])),
    Family("EXAONE 4", "EXAONE 4", "sliding layers with RoPE, the others without positions",
        tiny("Exaone4", **GROUPED, sliding_window=10, layer_types=SLIDING)),
    Family("nanochat", "nanochat", "RoPE in the other direction", tiny("NanoChat", **GROUPED)),
    Family("DeepSeek V3", "DeepSeek V3, R1", "latent attention: RoPE on the last dimensions of a head",
        tiny("DeepseekV3", **LATENT)),
    Family("Qwen3-Next", "Qwen3-Next 80B", "linear layers (gated delta rule) beside full ones, experts",
        tiny("Qwen3Next", **GROUPED, **LINEAR, **EXPERTS, layer_types=HYBRID)),
    Family("Qwen 3.5", "Qwen 3.5 (text)", "linear layers (gated delta rule) beside full ones",
        tiny("Qwen3_5", "Qwen3_5Text", **GROUPED, **LINEAR, layer_types=HYBRID)),
    Family("OLMo hybrid", "OLMo hybrid 7B", "linear layers (gated delta rule) beside full ones without positions",
        tiny("OlmoHybrid", **GROUPED, **LINEAR, layer_types=HYBRID)),
    Family("Falcon-H1", "Falcon-H1", "attention and a state space side by side in each layer",
        tiny("FalconH1", **GROUPED, **{**STATE_SPACE, "mamba_d_state": 16}, **MULTIPLIERS, mamba_d_ssm=32)),
    Family("Granite 4", "Granite 4 hybrid", "state-space layers beside full ones without positions, experts",
        tiny("GraniteMoeHybrid", **GROUPED, **STATE_SPACE, **EXPERTS, shared_intermediate_size=32, layer_types=HYBRID)),
    Family("Bamba", "Bamba 9B", "state-space layers beside full ones",
        tiny("Bamba", **GROUPED, **STATE_SPACE, attn_layer_indices=[1])),
    Family("Jamba", "Jamba 1.5, 1.7", "state-space layers beside full ones without positions, experts",
        tiny("Jamba", **GROUPED, **EXPERTS, mamba_expand=1, mamba_d_state=8, attn_layer_period=2, attn_layer_offset=1),
        native=False),
    Family("Nemotron-H", "Nemotron-H, Nemotron Nano 2 and 3",
        "layers of one kind each: state space, experts, MLP, full attention without positions",
        tiny("NemotronH", **{key: GROUPED[key] for key in GROUPED if key not in ("num_hidden_layers",
        "initializer_range")}, layer_types=["linear_attention", "moe", "full_attention", "mlp"], mamba_num_heads=4,
        mamba_head_dim=8, n_groups=1, ssm_state_size=8, n_routed_experts=4, moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=32, initializer_range=0.1)),
    Family("MiniMax", "MiniMax-Text-01, M1", "linear layers (lightning attention) beside full ones, experts",
        tiny("MiniMax", **GROUPED, **EXPERTS, layer_types=HYBRID), native=False),
    Family("Kimi Linear", "Kimi Linear 48B",
        "linear layers (Kimi delta rule) beside latent attention without positions, experts",
        tiny("KimiLinear", **{**LATENT, **EXPERTS}, linear_head_dim=8, linear_num_heads=4, layer_types=HYBRID),
        native=False),
    Family("LFM2", "LFM2 350M to 2.6B", "convolutions beside full layers",
        tiny("Lfm2", **{**GROUPED, "num_hidden_layers": 3}, conv_bias=True, block_multiple_of=64,
        layer_types=["conv", "full_attention", "conv"])),
    Family("LFM2 MoE", "LFM2 8B-A1B", "convolutions beside full layers, experts",
        tiny("Lfm2Moe", **GROUPED, **EXPERTS, num_dense_layers=1, layer_types=["conv", "full_attention"]),
        native=False),
    Family("LFM3", "LFM3", "convolutions, sliding and full layers",
        tiny("Lfm3", **{**GROUPED, "num_hidden_layers": 3}, sliding_window=10, layer_types=["conv", "sliding_attention",
        "full_attention"]), native=False),
    Family("gpt-oss", "gpt-oss 20B, 120B", "learned sinks, every other layer sliding, experts",
        tiny("GptOss", **GROUPED, **EXPERTS, **YARN, sliding_window=10, layer_types=SLIDING)),
    Family("MiMo V2", "MiMo V2 Flash", "learned sinks in sliding layers, which have more KV heads",
        tiny("MiMoV2Flash", **GROUPED, **EXPERTS, v_head_dim=4, n_routed_experts=4, sliding_window=10,
        layer_types=SLIDING)),
    Family("Granite SWA", "Granite with sliding windows", "learned sinks, sliding layers with a RoPE of their own",
        tiny("GraniteSWA", **GROUPED, sliding_window=10, layer_types=SLIDING, layer_rope_theta=[10000.0, 500000.0],
        attention_multiplier=0.3)),
    Family("Llama 4", "Llama 4 Scout, Maverick (text)",
        "chunked layers with RoPE on adjacent pairs, the others without positions, experts",
        tiny("Llama4", "Llama4Text", **GROUPED, **EXPERTS, intermediate_size_mlp=32, attention_chunk_size=10,
        no_rope_layers=[1, 0], layer_types=["chunked_attention", "full_attention"])),
    Family("Gemma 4", "Gemma 4 (text)",
        "layers that share keys and values, embeddings of tokens in each layer, heads of two sizes",
        tiny("Gemma4", "Gemma4Text", **{**GROUPED, "num_hidden_layers": 4}, global_head_dim=16, sliding_window=10,
        layer_types=SLIDING * 2, num_kv_shared_layers=2, hidden_size_per_layer_input=8, vocab_size_per_layer_input=64)),
    Family("Gemma 3n", "Gemma 3n (text)",
        "four residual streams, layers that share keys and values, embeddings of tokens in each layer",
        tiny("Gemma3n", "Gemma3nText", **{**GROUPED, "num_hidden_layers": 4}, sliding_window=10,
        layer_types=SLIDING * 2, num_kv_shared_layers=2, hidden_size_per_layer_input=8, vocab_size_per_layer_input=64,
        laurel_rank=8)),
    Family("Qwen 3 MoE", "Qwen3 30B-A3B, 235B-A22B", "experts", tiny("Qwen3Moe", **GROUPED, **EXPERTS)),
    Family("Qwen 2 MoE", "Qwen1.5-MoE A2.7B, Qwen2 57B-A14B", "experts, one of them for all tokens, behind a gate",
        tiny("Qwen2Moe", **GROUPED, **EXPERTS, shared_expert_intermediate_size=32)),
    Family("GLM-4 MoE", "GLM-4.5, 4.6, 4.7", "experts by sigmoid, one of them for all tokens; the first layers dense",
        tiny("Glm4Moe", **GROUPED, **EXPERTS, n_routed_experts=4, first_k_dense_replace=1, routed_scaling_factor=1.7)),
    Family("OPT", "OPT 125M to 66B", "learned positions: `absolute` only, ends at the last one",
        tiny("OPT", **{**SIZES, "word_embed_proj_dim": 32, "ffn_dim": 32, "init_std": 0.4,
        "do_layer_norm_before": True}), learned=True),
]  # fmt: skip

RULES = {
    "h2o": "accumulated", "h2o-paper": "accumulated", "tova": "tova", "random": "random", "sink": "recency",
    "recent": "recency", **{policy: policy for policy in PRIORITIES}, "nexus": "nexus",
}  # fmt: skip
POLICIES = ("full", *RULES)

DIFFERENT = ("Llama 1, 2", "Gemma 2")
"""Two families that differ in heads, norms and sliding layers."""


def is_sampled(number: int) -> bool:
    """Whether `make test` takes this family for what hardly depends on the family."""
    return number % 16 == 0 or FAMILIES[number].name in DIFFERENT


each_family = pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=family.name, marks=() if is_sampled(number) else pytest.mark.exhaustive)
        for number, family in enumerate(FAMILIES)
    ],
)


def in_make_test(number: int, policy: str) -> bool:
    """Of h2o some families, of other policies one of two in turn."""
    return is_sampled(number) if policy == "h2o" else FAMILIES[number].name == DIFFERENT[POLICIES.index(policy) % 2]


def pairs(policies: Iterable[str]) -> list[Any]:
    """Every family with every policy; those that `make test` leaves out are exhaustive."""
    return [
        pytest.param(
            number,
            policy,
            id=f"{family.name}-{policy}",
            marks=() if in_make_test(number, policy) else pytest.mark.exhaustive,
        )
        for number, family in enumerate(FAMILIES)
        for policy in policies
    ]


LENGTHS = (26, 17, 9)
"""Prompt lengths of the rows of a batch; the first row is also run alone."""

STEPS = 8


def rules_of(config: CacheConfig, family: Family) -> Rules:
    plan = config.plan(family.max_distance)
    return Rules(
        plan.window, plan.heavy, plan.sinks, plan.decay, plan.positions, plan.span, RULES[plan.policy], plan.long_term
    )


def config_of(family: Family, policy: str, chunk: int, positions: str | None = None) -> CacheConfig:
    positions = "absolute" if family.learned else positions
    return CacheConfig(policy, window=12, positions=positions, span=18, chunk=chunk)


def tokens_of(row: int, policy: str, attempt: int = 0) -> list[int]:
    """Those of the literature would not know which of two equal keys to evict: no token comes twice."""
    count, generator = LENGTHS[row] + STEPS, torch.Generator().manual_seed(row + 100 * attempt)
    if policy in PRIORITIES:
        return (torch.randperm(61, generator=generator)[:count] + 3).tolist()
    return torch.randint(3, 64, (count,), generator=generator).tolist()


@functools.cache
def expected(number: int, config: CacheConfig, row: int) -> tuple[list[int], Tensor, dict[int, list[list[int]]]]:
    """The tokens of a row, its logits [n, V] alone, and the tokens each layer keeps at the end.

    Tokens are the first ones with which nothing comes close to a tie.
    """
    family, prompt = FAMILIES[number], LENGTHS[row]
    model = family.make()
    for attempt in range(8):
        tokens = tokens_of(row, config.policy, attempt)
        if config.policy == "full":
            return tokens, model(torch.tensor([tokens])).logits[0], {}
        oracle = Oracle(model, rules_of(config, family))
        logits = [oracle.feed(tokens[:prompt], config.chunk or 0)]
        logits += [oracle.feed([token]) for token in tokens[prompt:]]
        if oracle.margin > TIE:
            return tokens, torch.cat(logits), {layer: oracle.kept(layer) for layer in oracle.held}
    raise AssertionError(f"{family.name}, {config.policy}: row {row} always comes too close to a tie")


@functools.cache
def error(number: int, policy: str, chunk: int, rows: int, positions: str | None = None) -> float:
    """The largest difference between a logit and the oracle's, relative to the largest logit.

    Args:
        number: index of the family.
        policy: name of the policy.
        chunk: prefill chunk size; 0 is one-shot.
        rows: 1, or 3 for a left-padded batch.
        positions: None for the policy's default.
    """
    family = FAMILIES[number]
    model, config = family.make(), config_of(family, policy, chunk, positions)
    width, padding = LENGTHS[0], [LENGTHS[0] - length for length in LENGTHS[:rows]]
    wanted = [expected(number, config, row) for row in range(rows)]
    ids = torch.tensor([[0] * pad + tokens for pad, (tokens, _, _) in zip(padding, wanted, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (width + STEPS - pad) for pad in padding])
    with attach(model, config) as cache:
        ends = [0, *range(width, width + STEPS + 1)]
        chunks = [
            model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache).logits
            for start, end in itertools.pairwise(ends)
        ]
        evicting = [] if policy == "full" else cache.evicting_layers
        kept = {layer: cache.kept(layer).tolist() for layer in evicting}
    logits, worst = torch.cat(chunks, 1), 0.0
    for row, (pad, (_, alone, held)) in enumerate(zip(padding, wanted, strict=True)):
        for layer in evicting:
            assert [[i for i in head if i >= 0] for head in kept[layer][row]] == held[layer]
        worst = max(worst, float((logits[row, pad:] - alone).abs().max() / alone.abs().max()))
    return worst


CELLS = [(chunk, rows) for chunk in (5, 0) for rows in (1, 3)]
"""Chunked and one-shot, alone and in a padded batch."""

HARDEST = (5, 3)


def matrix() -> list[Any]:
    """`pairs` with `HARDEST` and with the other cells, which `make test` takes of h2o and of the full cache only."""
    others = [cell for cell in CELLS if cell != HARDEST]
    return [
        pytest.param(*pair.values, cells, id=f"{pair.id}-{name}", marks=pair.marks if taken else pytest.mark.exhaustive)
        for pair in pairs(POLICIES)
        for name, cells in (("hardest", [HARDEST]), ("others", others))
        for taken in [cells != others or pair.id in (f"{DIFFERENT[0]}-full", f"{DIFFERENT[1]}-h2o")]
    ]


def passed(number: int, policy: str) -> int:
    """How many of the ways of a family and policy are exact."""
    return sum(error(number, policy, *cell) < LARGEST for cell in CELLS)


def summary(count: Callable[[int, str], int] = passed) -> str:
    """The families for lab/docs/families.md, and what is not exact; `count` gives the exact ways of each."""
    names = [it.models if it.name in it.models else f"{it.name} ({it.models})" for it in FAMILIES]
    inexact = [
        f"{family.name} with {policy} ({ways} of {len(CELLS)} ways)"
        for number, family in enumerate(FAMILIES)
        for policy in POLICIES
        if (ways := count(number, policy)) < len(CELLS)
    ]
    text = f"{len(FAMILIES)} families: {'; '.join(names)}.\n\nNot exact: {'; '.join(inexact) or 'none'}."
    return "\n".join(textwrap.fill(part, 120) if part else "" for part in text.split("\n"))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    page = Path("lab/docs/families.md")
    text = page.read_text(encoding="utf-8")
    for mark, written in (("families", summary()), ("sweep", sweep_table())):
        head, begin, rest = text.partition(f"<!-- {mark} -->\n")
        _, end, tail = rest.partition(f"<!-- end of {mark} -->\n")
        text = f"{head}{begin}{written}\n{end}{tail}"
    page.write_text(text, encoding="utf-8")
