"""A saved cache goes on as if it had never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from h2o_stream import CacheConfig, H2OStreamError, attach
from tests.conftest import make_llama
from tests.families import FAMILIES

TOKENS = torch.randint(3, 64, (2, 80), generator=torch.Generator().manual_seed(0))


def going_on(model: Any, cache: Any) -> torch.Tensor:
    """Decode steps, a prefill and more steps: the logits."""
    parts = TOKENS[:, 40:].split([1, 1, 1, 20, 1, 1, 15], 1)
    return torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)


@pytest.mark.parametrize("policy", ["h2o", "h2o-paper", "tova", "random", "sink", "recent", "full"])
@pytest.mark.parametrize("kv_bits", [16, 4])
def test_it_goes_on_bit_for_bit(tmp_path: Path, grouped: LlamaForCausalLM, policy: str, kv_bits: int) -> None:
    config = CacheConfig(policy, window=24, chunk=8, kv_bits=16 if policy == "full" else kv_bits)
    mask = torch.ones(2, 40).index_fill(1, torch.arange(9), 0).logical_or(torch.tensor([[True], [False]])).long()
    with attach(grouped, config) as cache:
        cache.pin(6, 9)
        grouped(TOKENS[:, :40], attention_mask=mask, past_key_values=cache)
        save_file(cache.state_dict(), tmp_path / "state.safetensors")
        expected, seen = going_on(grouped, cache), cache.seen_tokens
    with attach(grouped, config) as cache:
        cache.load_state_dict(load_file(tmp_path / "state.safetensors"))
        assert going_on(grouped, cache).equal(expected)
        assert cache.seen_tokens == seen
        if policy != "full":
            assert cache.pins == (range(6, 9),)


def test_a_state_is_a_copy(tiny: LlamaForCausalLM) -> None:
    with attach(tiny, CacheConfig(window=24)) as cache:
        tiny(TOKENS[:, :40], past_key_values=cache)
        state = cache.state_dict()
        first = going_on(tiny, cache)
        cache.load_state_dict(state)
        assert going_on(tiny, cache).equal(first)
        cache.load_state_dict(state)
        assert going_on(tiny, cache).equal(first)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family(family: Any) -> None:
    model = family.make()
    with attach(model, CacheConfig(window=12, positions=family.positions[0], chunk=5)) as cache:
        model(TOKENS[:, :40], past_key_values=cache)
        state = cache.state_dict()
        first = going_on(model, cache)
        cache.load_state_dict(state)
        assert going_on(model, cache).equal(first)


def test_ratios_are_those_of_the_saved_stream(tiny: LlamaForCausalLM) -> None:
    config = CacheConfig("h2o-paper", heavy_ratio=0.25, recent_ratio=0.25)
    with attach(tiny, config) as cache:
        tiny(TOKENS[:, :40], past_key_values=cache)
        state = cache.state_dict()
    with attach(tiny, config) as cache:
        cache.load_state_dict(state)
        assert (cache.plan.heavy, cache.plan.recent) == (10, 10)
        tiny(TOKENS[:, 40:41], past_key_values=cache)
        assert cache.kept().shape[-1] == 20


class TestRefused:
    def state(self, model: Any, **settings: Any) -> dict[str, torch.Tensor]:
        with attach(model, CacheConfig(**{"window": 24, **settings})) as cache:
            model(TOKENS[:, :40], past_key_values=cache)
            return cache.state_dict()

    @pytest.mark.parametrize(
        ("model", "settings", "words"),
        [
            ({"seed": 1}, {}, "another model"),
            ({}, {"window": 25}, "another policy"),
            ({}, {"policy": "tova"}, "another policy"),
            ({}, {"kv_bits": 4}, "another policy"),
            ({}, {"decay": 0.5}, "another policy"),
        ],
    )
    def test_another_model_or_policy(self, model: Any, settings: Any, words: str) -> None:
        state, other = self.state(make_llama()), make_llama(**model)
        with (
            attach(other, CacheConfig(**{"window": 24, **settings})) as cache,
            pytest.raises(H2OStreamError, match=words),
        ):
            cache.load_state_dict(state)

    def test_another_dtype(self) -> None:
        state, other = self.state(make_llama()), make_llama()
        with attach(other.to(torch.bfloat16), CacheConfig(window=24)) as cache, pytest.raises(H2OStreamError):
            cache.load_state_dict(state)

    @pytest.mark.parametrize("policy", ["h2o", "full"])
    @pytest.mark.parametrize("what", ["fingerprint", "1.keys", "progress"])
    def test_an_incomplete_state(self, tiny: LlamaForCausalLM, policy: str, what: str) -> None:
        state = self.state(tiny, policy=policy)
        del state[what]
        with attach(tiny, CacheConfig(policy, window=24)) as cache, pytest.raises(H2OStreamError):
            cache.load_state_dict(state)

    def test_a_damaged_state_leaves_an_empty_cache(self, tiny: LlamaForCausalLM) -> None:
        state = self.state(tiny)
        state["1.scores"] = state["1.scores"][..., :-1]
        with attach(tiny, CacheConfig(window=24)) as cache:
            with pytest.raises(H2OStreamError, match="scores is"):
                cache.load_state_dict(state)
            assert cache.seen_tokens == 0
            tiny(TOKENS[:, :40], past_key_values=cache)

    @pytest.mark.parametrize("policy", ["h2o", "full"])
    def test_an_empty_cache_has_no_state(self, tiny: LlamaForCausalLM, policy: str) -> None:
        with attach(tiny, CacheConfig(policy, window=24)) as cache, pytest.raises(H2OStreamError, match="empty"):
            cache.state_dict()
