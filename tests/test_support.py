"""Refused models with their reasons, and unlisted models that work."""

from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from h2o_stream import CacheConfig, Engine, H2OStreamError, SamplingConfig, attach
from tests.families import GROUPED
from tests.fixtures import ids as tokens
from tests.fixtures import refusal
from tests.tolerance import assert_close

MOE = {"num_experts_per_tok": 1, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
LATENT |= {**MOE, "n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4}


def make(kind: str, config_kind: str = "", **settings: Any) -> PreTrainedModel:
    torch.manual_seed(3)
    settings = {**GROUPED, "num_hidden_layers": 4, **settings}
    config = getattr(transformers, f"{config_kind or kind}Config")(**settings)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


@pytest.mark.parametrize(("model", "words"), [
    (("GPTJ", "", {"rotary_dim": 4}), "does not take its attention from transformers' registry"),
    (("Bloom", "", {}), "does not take its attention from transformers' registry"),
    (("Mpt", "", {}), "does not take its attention from transformers' registry"),
    (("Nemotron", "", {}), "does not pass extra keywords on"),
], ids=lambda value: value[0] if isinstance(value, tuple) else "")  # fmt: skip
@pytest.mark.parametrize("positions", ["gap", "absolute"])
def test_refused_before_any_work(model: tuple[str, str, dict[str, Any]], words: str, positions: str) -> None:
    name, config_kind, settings = model
    refused = make(name, config_kind, **settings)
    attention = refused.config._attn_implementation
    assert words in refusal(refused, window=16, positions=positions)
    assert refused.config._attn_implementation == attention
    with attach(refused, CacheConfig("full")):
        pass


def test_another_form_of_rope_is_served_with_true_positions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make("Llama"), tokens(14)
    rotary = model.model.rotary_emb
    monkeypatch.setattr(rotary, "forward", lambda x, position_ids, own=rotary.forward: own(x, position_ids**2))
    assert "--positions absolute" in refusal(model, window=16)
    expected = model(ids).logits
    with attach(model, CacheConfig(window=16, positions="absolute")):
        assert_close(model(ids).logits, expected)


@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "settings"), [
    ("Mixtral", {"num_local_experts": 2}), ("Qwen3Moe", {"num_experts": 2, **MOE}), ("Olmo2", {}), ("Granite", {}),
    ("Phi", {}), ("Gemma", {}), ("Starcoder2", {}), ("Glm4", {}), ("SmolLM3", {"no_rope_layer_interval": 2}),
    ("DeepseekV2", {**LATENT, "topk_method": "greedy"}),
])  # fmt: skip
def test_others_work_as_well(name: str, settings: dict[str, Any]) -> None:
    model, ids = make(name, **settings), tokens(14)
    expected = model(ids).logits
    with attach(model, CacheConfig(window=16)):
        assert_close(model(ids).logits, expected)


def test_learned_positions() -> None:
    model = make("OPT", word_embed_proj_dim=32, ffn_dim=32, max_position_embeddings=40)
    for positions in ("gap", "rolling"):
        reason = f"no rotary positions, which {positions} re-assigns; use --pos"
        assert reason in refusal(model, window=16, positions=positions)
    with attach(model, CacheConfig(window=16)) as cache:
        assert cache.plan.positions == "absolute", "taken where none is given"
        model(tokens(40), past_key_values=cache)
        with pytest.raises(H2OStreamError, match="41 tokens pass the 40 positions"):
            model(tokens(1), past_key_values=cache)


def test_learned_positions_end_a_chat(tokenizer: PreTrainedTokenizerBase) -> None:
    """Whatever --at-context is, no position exceeds the last one."""
    sizes = {"vocab_size": len(tokenizer), "word_embed_proj_dim": 32, "ffn_dim": 32, "max_position_embeddings": 40}
    for cache in (CacheConfig(window=16, positions="absolute"), CacheConfig("full")):
        with Engine(make("OPT", **sizes), tokenizer, cache, SamplingConfig(temperature=0)) as engine:
            list(engine.prefill(range(100, 130)))
            *said, finished = engine.decode()
            assert (len(said), finished.reason) == (10, "context")
            assert "learned positions; reset" in finished.detail
            assert [event.reason for event in engine.prefill([100])] == ["context"]
