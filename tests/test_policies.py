"""Policies on their own, and the example in docs/policies.md."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from h2o_stream import CacheConfig, ConfigError, attach, config
from h2o_stream.cache.policies import Candidates, make_policy
from tests.literature import PRIORITIES


def test_random_draws_uniformly_and_independently() -> None:
    """Over many evictions each of ten places has the lowest priority about equally often."""
    policy = make_policy(CacheConfig("random", 16).plan())
    index = torch.arange(10).expand(1, 4, 10)
    lowest = torch.cat(
        [
            policy.priority(Candidates(index.float(), index, index, torch.tensor([[[seen]]]))).argmin(-1).flatten()
            for seen in range(1000)
        ]
    )
    counts = torch.bincount(lowest, minlength=10)
    assert counts.min() > 320
    assert counts.max() < 480


def test_random_differs_by_layer() -> None:
    plan, index = CacheConfig("random", 16).plan(), torch.arange(10).expand(1, 2, 10)
    view = Candidates(index.float(), index, index, torch.tensor([[[20]]]))
    draws = [make_policy(plan, layer).priority(view) for layer in (0, 1)]
    assert not draws[0].equal(draws[1])
    assert not draws[0][0, 0].equal(draws[0][0, 1])


def test_budgets_of_every_policy() -> None:
    budgets = {
        name: (plan.sinks, plan.heavy, plan.recent, plan.positions)
        for name in config.POLICIES
        if name != "full"
        for plan in [CacheConfig(name, 100).plan()]
    }
    assert budgets == {
        "h2o": (4, 48, 48, "gap"), "h2o-paper": (0, 50, 50, "rolling"), "tova": (0, 99, 1, "rolling"),
        "random": (4, 48, 48, "rolling"), "sink": (4, 0, 96, "rolling"), "recent": (0, 0, 100, "rolling"),
        **dict.fromkeys((*PRIORITIES, "nexus"), (4, 48, 48, "gap")),
    }  # fmt: skip


@pytest.mark.parametrize(("settings", "words"), [
    ({"window": 2.5}, "--window"), ({"positions": "relative"}, "--positions"), ({"policy": "best"}, "--policy"),
])  # fmt: skip
def test_wrong_budgets_name_the_option(settings: dict[str, Any], words: str) -> None:
    """In code; test_bad_input.py has the others."""
    with pytest.raises(ConfigError, match=words):
        CacheConfig(**settings)


@pytest.mark.parametrize(("settings", "words"), [({"window": 500}, "lower --window"), ({"span": 400}, "lower --span")])
def test_budgets_that_do_not_fit_the_model(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CacheConfig(**{"window": 64, "chunk": 64, **settings}).plan(512)


def test_the_default_plan() -> None:
    plan = CacheConfig().plan(8192)
    assert (plan.sinks, plan.heavy, plan.recent, plan.decay, plan.positions) == (4, 126, 126, 0.99, "gap")
    assert plan.span + plan.window + plan.chunk == 8192
    assert CacheConfig("h2o-paper", 256, heavy=128).plan(8192).recent == 128


class TestRatios:
    """As in h2o_hf: ``int(ratio * length of the prompt)``."""

    @pytest.mark.parametrize(("prompt", "heavy", "recent"), [(50, 5, 10), (57, 5, 11), (9, 0, 1), (3, 0, 1)])
    def test_they_resolve_against_the_first_prompt(self, tiny: Any, prompt: int, heavy: int, recent: int) -> None:
        ids = torch.randint(3, 64, (1, prompt))
        with attach(tiny, CacheConfig("h2o-paper", heavy_ratio=0.1, recent_ratio=0.2, chunk=0)) as cache:
            for _ in range(2):  # resolved again for every stream
                tiny(ids)
                tiny(ids[:, :1], past_key_values=cache)
                assert (cache.plan.heavy, cache.plan.recent) == (heavy, recent)
                assert cache.kept().shape[-1] == min(heavy + recent, prompt)

    def test_the_length_of_a_prompt_in_chunks_is_announced(self, tiny: LlamaForCausalLM) -> None:
        with attach(tiny, CacheConfig("h2o", heavy_ratio=0.1, recent_ratio=0.2)) as cache:
            cache.begin(100)
            tiny(torch.randint(3, 64, (1, 50)), past_key_values=cache)
            assert cache.plan.window == 4 + 10 + 20

    def test_windows_grow_for_pins_when_the_prompt_is_known(self, tiny: LlamaForCausalLM) -> None:
        with attach(tiny, CacheConfig("h2o", recent_ratio=0.2)) as cache:
            cache.pin(0, 30)
            assert cache.counts().grown == 0
            tiny(torch.randint(3, 64, (1, 100)), past_key_values=cache)
            assert (cache.counts().window, cache.counts().grown) == (30 + 12, 30 + 12 - 24)
            assert cache.kept()[0, 0, :30].tolist() == list(range(30))


def test_the_example_of_the_docs(tmp_path: Path, tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", Path("docs/policies.md").read_text(encoding="utf-8"), re.S)
    assert [name for name, _ in blocks] == ["peak.py", "use.py"]
    for name, code in blocks:
        (tmp_path / name).write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(config.POLICIES, "peak", config.POLICIES["h2o"])  # undone after the test
    inputs = {"input_ids": torch.randint(3, 64, (1, 60)), "attention_mask": torch.ones(1, 60)}
    names = {"model": tiny, "inputs": inputs}
    exec(compile(blocks[1][1], "use.py", "exec"), names)
    assert names["kept"].shape[-1] == 32
    sys.modules.pop("peak", None)


def test_tova_leaves_empty_slots_empty(tiny: LlamaForCausalLM) -> None:
    """Steps done eagerly gave them a score of 0, and the saved state was refused."""
    with attach(tiny, CacheConfig("tova", window=16), engine="eager") as cache:
        for part in torch.arange(3, 9).view(1, 6).split([3, 1, 1, 1], 1):
            tiny(part, past_key_values=cache)
        cache.load_state_dict(cache.state_dict())
        assert cache.seen_tokens == 6


def test_nexus_keeps_a_token_as_often_as_its_weight_says() -> None:
    """Of four tokens the best stays in proportion to the weights; the least of four pairs, too, is sometimes drawn."""
    weights, kept = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.zeros(4)
    for seed in range(50):
        policy = make_policy(CacheConfig("nexus", 16, seed=seed).plan())
        index = (torch.arange(4) + 4 * torch.arange(40)[:, None]).view(40, 1, 4).expand(40, 2, 4)
        priority = policy.priority(Candidates(weights.expand(40, 2, 4), index, index, torch.full((40, 1, 1), 200)))
        kept += torch.bincount(priority.argmax(-1).flatten(), minlength=4)
    assert ((kept / kept.sum() - weights / 10).abs() < 0.02).all()


def test_nexus_draws_once_for_each_token_and_head() -> None:
    policy, index = make_policy(CacheConfig("nexus", 16).plan()), torch.arange(9).expand(1, 2, 9)
    ones = torch.ones(1, 2, 9)
    draws = [policy.priority(Candidates(ones, index, index, torch.tensor([[[seen]]]))) for seen in (9, 50)]
    assert draws[0].equal(draws[1])
    assert not draws[0][0, 0].equal(draws[0][0, 1])
    assert policy.priority(Candidates(0 * ones, index, index, torch.tensor([[[9]]]))).equal(0 * ones)
