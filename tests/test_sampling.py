"""Sampling: seeds, limits on the candidates, and the same candidates as transformers' warpers leave."""

import time
from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
)

from h2o_stream import CacheConfig, ConfigError, H2OStreamError, SamplingConfig
from h2o_stream.config import BENCH_TEMPERATURES, DEFAULT_TEMPERATURE, FOCUSED_TEMPERATURE, model_sampling
from h2o_stream.engine.engine import Engine
from h2o_stream.engine.sampling import (
    LOOP_LENGTH,
    MAX_SAID_LOSS,
    SAID_LENGTH,
    Repetitions,
    Sampler,
    check_rng_state,
    resolve,
    with_changes,
)
from h2o_stream.loading.transformers_model import LoadedModel
from h2o_stream.models.generation_config import GenerationConfig
from h2o_stream.session.questions import Question, set_temperature

EXTREMES = {
    "temperature": (0, 1e-300, 1e-40, 5e-324, 1e-20, 1.0, 1e6, 1e300, -1e-300, 10**400, float("nan"), float("inf")),
    "top_p": (5e-324, 1e-40, 0.5, 1, 1 - 1e-16, 0, 10**400, float("nan")),
    "top_k": (0, 1, 5, 5.0, 2.5, 2**31 - 1, 2**31, 2**63, 10**400, -1),
    "min_p": (0, 5e-324, 1.0, 10**400, float("nan")),
    "repetition_penalty": (1e-300, 1e-6, 1e6, 1e40, 10**400, float("nan"), 0),
    "dry_multiplier": (0, 1e6, 1e300, 10**400, float("nan")),
    "dry_allowed_length": (0, 1, 2.0, 1.5, 2**31 - 1, 2**63, 10**400),
    "frequency_penalty": (-2, 2, 10**400, float("nan")), "repeat_last_n": (-1, 0, 2.0, float("nan"), 2**31 - 1, 2**64),
    "seed": (0, 2**63 - 1, 2**63, -1, 10**400), "max_tokens": (1, 4.0, 2**31 - 1, 2**31, 10**400),
}  # fmt: skip
"""Numbers at the edges of settings, and beyond them."""


@given(st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in EXTREMES.items()}),
       st.lists(st.sampled_from((0.0, -1e30, 1e30, -1e4, 20.0, 1e-40, 1.0)), min_size=8, max_size=8))  # fmt: skip
def test_numbers_at_the_edges(settings: dict[str, Any], logits: list[float]) -> None:
    """They are refused in a line that names the option, or sampled by."""
    try:
        config = SamplingConfig(**settings)
    except ConfigError as error:
        words = str(error)
        assert "--" in words
        assert "\n" not in words
        return
    samplers = [Sampler(config.of_choice(number), None) for number in range(2)]
    for sampler in samplers:
        assert 0 <= sampler.sample(scores_of(*logits), [1, 2, 1, 2]) < len(logits)


@pytest.mark.parametrize("wrong", [{"temperature": "hot"}, {"top_p": float("nan")}, {"top_k": -5}, {"min_p": [1]}])
def test_a_generation_config_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Sampler(SamplingConfig(), GenerationConfig(**wrong))
    assert Sampler(SamplingConfig(**dict.fromkeys(wrong, 1)), GenerationConfig(**wrong))


def scores_of(*scores: float) -> Any:
    return np.array(scores, np.float32)


class TestSampling:
    def draws(self, count: int = 40, **settings: Any) -> list[int]:
        sampler = Sampler(SamplingConfig(**settings), None)
        logits = scores_of(3.0, 2.0, 1.0, 0.0, -1.0)
        return [sampler.sample(logits, [0]) for _ in range(count)]

    def test_a_seed_repeats_itself(self) -> None:
        assert self.draws(seed=3) == self.draws(seed=3)
        assert self.draws(seed=3) != self.draws(seed=4)

    def test_an_unseeded_run_has_a_random_seed(self) -> None:
        sampler = Sampler(SamplingConfig(), None)
        assert Sampler(SamplingConfig(), None).seed != sampler.seed

    @pytest.mark.parametrize(
        ("settings", "replied", "token"),
        [
            ({"frequency_penalty": 0.4}, 3, 1),  # token 0 twice: 3 - 0.8 is below 2.6
            ({"frequency_penalty": 0.4}, 1, 0),  # once
            ({"presence_penalty": 0.5}, 3, 1),
            ({"presence_penalty": 0.5}, 0, 0),  # the prompt does not count
            ({"presence_penalty": -2.0}, 1, 0),
            ({"frequency_penalty": 2.0, "repeat_last_n": 1}, 3, 1),
            ({"frequency_penalty": 2.0, "repeat_last_n": 0}, 3, 0),
            ({"repetition_penalty": 2.0}, 0, 0),
            ({"repetition_penalty": 2.0}, 1, 1),
            ({"repetition_penalty": 2.0, "repeat_last_n": 0}, 1, 0),
        ],
    )
    def test_penalties_of_replies(self, settings: dict[str, Any], replied: int, token: int) -> None:
        logits = scores_of(3.0, 2.6, 1.0)
        sampler = Sampler(SamplingConfig(temperature=0, **settings), None)
        assert sampler.sample(logits, [0, 2, 0][3 - replied :]) == token
        assert logits.tolist() == scores_of(3.0, 2.6, 1.0).tolist()

    @pytest.mark.parametrize("penalty", [0.9, 1.1, 2.0])
    def test_the_penalty_is_that_of_transformers(self, penalty: float) -> None:
        random = torch.Generator().manual_seed(1)
        scores = torch.randn(500, generator=random).index_fill(0, torch.tensor([7, 8]), -torch.inf)
        tokens = torch.cat([torch.randint(0, 500, (300,), generator=random), torch.tensor([7, 3, 3])])
        before = scores.clone()
        expected = RepetitionPenaltyLogitsProcessor(penalty)(tokens[None], scores[None])[0]
        sampler = Sampler(SamplingConfig(repetition_penalty=penalty), None)
        assert np.array_equal(with_changes(scores.numpy(), sampler._penalties(tokens.tolist())), expected)
        assert torch.equal(scores, before), "the model's logits stay as they were"
        assert not torch.equal(expected, before)

    @pytest.mark.parametrize("temperature", [0.0, 0.7])
    def test_nan_logits_are_never_sampled_from(self, temperature: float) -> None:
        sampler = Sampler(SamplingConfig(temperature=temperature), None)
        sampler.sample(scores_of(1.0, -np.inf, 2.0), [0])
        with pytest.raises(H2OStreamError, match="not numbers"):
            sampler.sample(scores_of(1.0, np.nan, 2.0), [0])

    def test_the_model_recommends_and_the_user_decides(self) -> None:
        class Recommended:
            temperature, top_p, top_k = 0.0, None, 50

        assert Sampler(SamplingConfig(), Recommended).greedy
        assert not Sampler(SamplingConfig(temperature=1.0), Recommended).greedy


class Recommended:
    """A generation config."""

    temperature, top_k, repetition_penalty = 0.6, 20, None


class TestSources:
    def test_first_the_user_then_the_model_then_our_table_then_our_defaults(self) -> None:
        settings, sources = resolve(SamplingConfig(top_k=5), Recommended, {"dry_allowed_length": 4, "temperature": 9})
        assert settings == {
            "temperature": 0.6, "top_p": 0.95, "top_k": 5, "min_p": 0, "repetition_penalty": 1, "dry_multiplier": 0.8,
            "dry_allowed_length": 4,
        }  # fmt: skip
        assert sources == {
            "temperature": "generation_config", "top_p": "default", "top_k": "given", "min_p": "default",
            "repetition_penalty": "default", "dry_multiplier": "default", "dry_allowed_length": "model",
        }  # fmt: skip

    @pytest.mark.parametrize("penalized", [{"temperature": 0.0}, {"repetition_penalty": 1.1}])
    def test_one_rule_against_repetition_at_a_time(self, penalized: dict[str, float]) -> None:
        assert resolve(SamplingConfig(**penalized), None, {})[0]["dry_multiplier"] == 0
        assert resolve(SamplingConfig(dry_multiplier=0.5, **penalized), None, {})[0]["dry_multiplier"] == 0.5

    def test_a_generation_config_goes_before_our_table(self) -> None:
        class Penalized:
            repetition_penalty = 1.3

        assert resolve(SamplingConfig(), Penalized, {"repetition_penalty": 1.1})[0]["repetition_penalty"] == 1.3

    def test_greedy_takes_the_most_probable_token_unless_the_user_wants_a_penalty(self) -> None:
        logits, penalized = scores_of(3.0, 2.9), {"repetition_penalty": 2.0}
        assert Sampler(SamplingConfig(temperature=0.0), None, penalized).sample(logits, [0]) == 0
        assert Sampler(SamplingConfig(temperature=0.0, repetition_penalty=1.1), None).sample(logits, [0]) == 1
        assert Sampler(SamplingConfig(temperature=1e-3, seed=0), None, penalized).sample(logits, [0]) == 1

    def test_the_embedded_model_has_its_own_under_all_its_names(self) -> None:
        for name in ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"):
            assert model_sampling(name)["dry_allowed_length"] > 0
        assert "dry_allowed_length" not in model_sampling("HuggingFaceTB/SmolLM2-1.7B-Instruct")
        assert model_sampling("Qwen/Qwen3-0.6B") == {}

    def test_new_settings_keep_the_model_s_defaults(self, served_embedded: LoadedModel) -> None:
        defaults = {"repetition_penalty": 1.1}
        with Engine(
            served_embedded.model, served_embedded.tokenizer, CacheConfig(window=64), sampling_defaults=defaults
        ) as engine:
            assert engine.sampler.settings["repetition_penalty"] == 1.1
            engine.set_sampling(SamplingConfig(temperature=0.3))
            assert engine.sampler.settings["repetition_penalty"] == 1.1

    def test_the_bench_temperature_is_that_of_the_category(self, served_embedded: LoadedModel) -> None:
        sampling = SamplingConfig(temperature="bench")
        with Engine(served_embedded.model, served_embedded.tokenizer, CacheConfig(window=64), sampling) as engine:
            seed, used = engine.sampler.seed, {}
            for category in (*BENCH_TEMPERATURES, "of my own"):
                set_temperature(engine, sampling, Question(1, category, ("Hi",)))
                used[category] = engine.sampler.settings["temperature"]
            assert used == {**BENCH_TEMPERATURES, "of my own": DEFAULT_TEMPERATURE}
            assert engine.sampler.seed == seed

    def test_without_bench_nothing_changes(self, served_embedded: LoadedModel) -> None:
        with Engine(served_embedded.model, served_embedded.tokenizer, CacheConfig(window=64)) as engine:
            sampler = engine.sampler
            set_temperature(engine, engine.sampling, Question(1, "math", ("Hi",)))
            assert engine.sampler is sampler


class TestSequences:
    """DRY: a token loses that would lengthen a sequence of the reply."""

    def loss(self, reply: list[int], token: int, **settings: float) -> float:
        """What a token loses after a reply."""
        config = SamplingConfig(temperature=0, **({"dry_multiplier": 0.5, "dry_base": 2.0} | settings))  # type: ignore[arg-type]
        return -float(with_changes(np.zeros(64, np.float32), Sampler(config, None)._penalties(reply))[token])

    @pytest.mark.parametrize(("allowed", "loss"), [(1, 2.0), (2, 1.0), (3, 0.5), (4, 0.0)])
    def test_by_its_length(self, allowed: int, loss: float) -> None:
        reply = [9, 1, 2, 3, 4, 8, 1, 2, 3]
        assert self.loss(reply, 4, dry_allowed_length=allowed) == loss
        assert self.loss(reply, 8, dry_allowed_length=allowed) == 0

    def test_the_longest_counts(self) -> None:
        assert self.loss([2, 3, 4, 7, 1, 2, 3, 4, 8, 1, 2, 3], 4, dry_allowed_length=1) == 2.0

    @given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 50), st.integers(0, 40))
    def test_lengths_and_distances(self, reply: list[int], count: int, first: int) -> None:
        """Of the last tokens, also where some of the steps before were not looked at."""
        repetitions = Repetitions()
        for size in range(min(first + 1, len(reply)), len(reply) + 1):
            found = repetitions.find(np.array(reply[:size]), min(count, size))
        last = reply[-count:]
        naive = set()
        for end in range(len(last) - 1):
            length = 0
            while length <= end and last[end - length] == last[-1 - length]:
                length += 1
            if length:
                naive.add((last[end + 1], length, len(last) - 1 - end))
        assert set(zip(*(array.tolist() for array in found), strict=True)) == naive

    def test_a_token_costs_the_same_in_a_reply_that_repeats_itself(self) -> None:
        """As long sequences as tokens before, as often as these, made seconds of the last tokens."""
        sampler, reply = Sampler(SamplingConfig(dry_multiplier=1e-300), None), list[int]()
        started = time.thread_time()
        for _ in range(2000):
            reply.append(5)
            sampler._penalties(reply)
        assert time.thread_time() - started < 3

    @pytest.mark.parametrize("period", [1, 5, 30])
    def test_loops_end(self, period: int) -> None:
        """By default, what follows itself: after two times, or after so many tokens as a row of a table may take."""
        reply = list(islice(cycle(range(period)), 2 * period + 60))
        losses = [self.loss(reply[:count], reply[count]) for count in range(len(reply))]
        assert next(count for count, loss in enumerate(losses) if loss) == period + SAID_LENGTH
        looping = period + max(period, LOOP_LENGTH)
        assert max(losses[: looping + 1]) <= MAX_SAID_LOSS
        assert losses[looping + 7] > 30, "no model is so sure"

    def test_sentences_are_not_said_again_unless_the_model_is_sure(self) -> None:
        said = list(range(20))
        assert self.loss([*said, 40, 41, *said[:11]], 11) == 0
        assert self.loss([*said, 40, 41, *said[:12]], 12) == 0.5
        assert self.loss([*said, 40, 41, *said[:19]], 19) == MAX_SAID_LOSS

    def test_what_only_begins_alike_is_no_loop(self) -> None:
        """A list of objects with the same names."""
        reply = [token for row in range(10, 20) for token in [*range(8), row]]
        assert all(self.loss(reply[:count], reply[count]) == 0 for count in range(1, len(reply)))

    def test_a_token_without_alternative_stays_possible(self) -> None:
        scores = np.full(8, -np.inf, np.float32)
        scores[1] = 0
        assert Sampler(SamplingConfig(dry_multiplier=9, dry_base=4.0, seed=0), None).sample(scores, [1] * 500) == 1


class TestFocus:
    """A reply to what was just read follows it: our own temperature is lower, everybody else's stays."""

    @pytest.mark.parametrize(("config", "recommended", "temperature"), [
        (SamplingConfig(), None, FOCUSED_TEMPERATURE), (SamplingConfig(temperature=0.7), None, 0.7),
        (SamplingConfig(), Recommended, 0.6),
    ])  # fmt: skip
    def test_temperature(self, config: SamplingConfig, recommended: Any, temperature: float) -> None:
        logits = scores_of(3.0, 2.9)
        sampler = Sampler(config, recommended)
        sampler.focused = True
        assert np.allclose(sampler.candidates(logits)[1], logits / temperature)


class TestStateOfTheGenerator:
    def test_it_continues(self) -> None:
        one, other = (Sampler(SamplingConfig(temperature=1.0, top_p=1.0, seed=seed), None) for seed in (1, 2))
        logits = scores_of(*[0.0] * 1000)
        one.sample(logits, [])
        other.rng_state = state = one.rng_state
        check_rng_state(state)
        expected = [one.sample(logits, []) for _ in range(20)]
        assert [other.sample(logits, []) for _ in range(20)] == expected
        assert not np.array_equal(one.rng_state, state)

    def test_one_of_an_earlier_version_is_a_seed(self) -> None:
        logits, draws = scores_of(*[0.0] * 1000), list[list[int]]()
        for seed in (1, 1, 2):
            sampler = Sampler(SamplingConfig(temperature=1.0, top_p=1.0), None)
            state = torch.Generator().manual_seed(seed).get_state().numpy()
            check_rng_state(state)
            sampler.rng_state = state
            draws.append([sampler.sample(logits, []) for _ in range(20)])
        assert draws[0] == draws[1] != draws[2]

    @pytest.mark.parametrize("state", [np.zeros(31, np.uint8), np.zeros((1, 32), np.uint8), np.zeros(32, np.int8)])
    def test_no_other_one_is_accepted(self, state: Any) -> None:
        with pytest.raises(H2OStreamError, match="random generator"):
            check_rng_state(state)
