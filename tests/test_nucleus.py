"""The candidates of a token are those that transformers' warpers leave, also on a device."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from h2o_stream import H2OStreamError, SamplingConfig
from h2o_stream.engine.device_logits import TensorLogits
from h2o_stream.engine.nucleus import largest, nucleus
from h2o_stream.engine.sampling import (
    Sampler,
)
from tests.in_turn import in_turn
from tests.test_gpu_graphs import FROM_HOST, HostFree
from tests.test_sampling import scores_of


def warpers(**settings: Any) -> LogitsProcessorList:
    """Those of transformers for settings of ours."""
    kinds = {
        "repetition_penalty": RepetitionPenaltyLogitsProcessor, "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper,
    }  # fmt: skip
    return LogitsProcessorList([kind(settings[name]) for name, kind in kinds.items() if settings.get(name)])


@in_turn("spread", [0.1, 1.0, 4.0])
@in_turn("top_p", [0.1, 0.9, 0.999])
def test_the_nucleus_is_that_of_transformers(spread: float, top_p: float) -> None:
    """Including flat distributions, whose nucleus is most of the vocabulary."""
    for scores in torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)) * spread:
        wanted = TopPLogitsWarper(top_p)(torch.zeros(1, 0), scores[None])[0]
        assert nucleus(scores.numpy(), top_p).tolist() == wanted.isfinite().nonzero()[:, 0].tolist()


@in_turn("temperature", [0.5, 1.0, 1.3])
@in_turn("top_k", [0, 7])
@in_turn("top_p", [0.8, 1.0])
@in_turn("min_p", [0.0, 0.05])
def test_candidates_are_those_transformers_leaves(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    sampler, theirs = Sampler(SamplingConfig(**settings, seed=0), None), warpers(**settings)
    for scores in 3 * torch.randn(5, 2000, generator=torch.Generator().manual_seed(1)):
        wanted = theirs(torch.zeros(1, 0), scores[None].clone())[0]
        ids, ours = sampler.candidates(scores.numpy())
        assert ids.tolist() == wanted.isfinite().nonzero()[:, 0].tolist()
        assert np.array_equal(ours, wanted[ids])


def test_equal_scores_and_forbidden_tokens() -> None:
    """Ties keep the first tokens, and tokens without probability are never sampled."""
    assert nucleus(scores_of(*[0.0] * 10), 0.35).tolist() == [0, 1, 2, 3]
    scores = scores_of(-np.inf, 0.0, -np.inf, 0.0)
    for settings in ({"top_p": 0.9}, {"top_p": 1.0}, {"top_k": 4}):
        sampler = Sampler(SamplingConfig(temperature=1.0, seed=0, **settings), None)
        assert sampler.candidates(scores)[0].tolist() == [1, 3]
        assert {sampler.sample(scores, []) for _ in range(50)} == {1, 3}


@in_turn("settings", [
    {"temperature": 0}, {"temperature": 0, "repetition_penalty": 1.3}, {}, {"temperature": 1e-30}, {"top_p": 1.0},
    {"top_k": 7}, {"top_k": 900, "top_p": 1.0}, {"min_p": 0.05, "top_p": 1.0}, {"temperature": 1.3, "top_p": 0.999},
    {"repetition_penalty": 1.2, "top_k": 40, "min_p": 0.01}, {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repeat_last_n": 4, "logit_bias": ((3, 5.0), (7, -100.0))},
    {"min_tokens": 50, "logit_bias": ((5, 30.0),)},
])  # fmt: skip
def test_a_device_samples_the_same(settings: dict[str, Any]) -> None:
    """Masks on a device and lists on the host, with ties as of bfloat16."""
    here, there = (Sampler(SamplingConfig(**({"temperature": 0.8, "seed": 1} | settings)), None) for _ in range(2))
    reply = [3, 5, 5, 8, 3, 5]
    for sampler in (here, there):
        sampler.end_tokens, sampler.forbidden = [5, 6], {5: 9}
    for scores in 2 * torch.randn(30, 500, generator=torch.Generator().manual_seed(1)):
        scores[[5, 9, 11]] = torch.tensor([9.0, 9.0, -torch.inf])
        logits = scores.bfloat16().float()
        with HostFree(FROM_HOST - {torch.ops.aten.lift_fresh}):  # nothing waits for the device before all is queued
            token = there.sample(TensorLogits(logits), reply)
        assert here.sample(logits.numpy(), reply) == token
    assert np.array_equal(here.rng_state, there.rng_state)


def test_a_device_samples_nothing_from_what_is_no_number_and_leaves_masks_to_the_host() -> None:
    logits = TensorLogits(torch.tensor([1.0, torch.nan]))
    for temperature in (0, 1):
        with pytest.raises(H2OStreamError, match="not numbers"):
            Sampler(SamplingConfig(temperature=temperature), None).sample(logits)
    sampler = Sampler(SamplingConfig(temperature=0), None)
    assert sampler.sample(TensorLogits(torch.tensor([2.0, 1.0])), (), lambda scores: scores - [9, 0]) == 1


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 30}, {"top_p": 0.8}, {"min_p": 0.05}, {"temperature": 0.5, "repetition_penalty": 1.3}]
)
def test_draws_are_distributed_as_in_transformers(settings: dict[str, Any]) -> None:
    """By a chi-squared test with one degree of freedom for each token that can be sampled."""
    config = {"temperature": 1.0, "top_p": 1.0, "seed": 0, **settings}
    sampler, count, tokens = Sampler(SamplingConfig(**config), None), 4_000, [3, 5, 5, 8]
    scores = torch.randn(50, generator=torch.Generator().manual_seed(2))
    left = warpers(**config)(torch.tensor([tokens]), scores[None].clone())[0]
    expected = count * left.softmax(-1).double().numpy()
    drawn = np.bincount([sampler.sample(scores.numpy(), tokens) for _ in range(count)], minlength=50)
    possible = expected > 0
    assert not drawn[~possible].any()
    chi_squared, freedom = ((drawn - expected)[possible] ** 2 / expected[possible]).sum(), possible.sum() - 1
    assert chi_squared < freedom + 4 * (2 * freedom) ** 0.5


@given(st.integers(1, 5000), st.integers(1, 40), st.integers(0, 2**32))
def test_the_largest_scores(size: int, count: int, seed: int) -> None:
    """Many equal ones, and impossible ones, too."""
    scores = np.random.default_rng(seed).integers(-99, 99, size).astype(np.float32)
    scores[scores < -90] = -np.inf
    assert largest(scores, count) == np.sort(scores)[-min(count, size)]
