"""Statistics of a cache and ``h2o-compare heavy-hitters`` on known attention."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from h2o_lab.heavy_hitters.comparison import measure_attention
from h2o_lab.heavy_hitters.removal import REMOVED, removal_rule
from h2o_lab.heavy_hitters.statistics import (
    SparsityMeter,
    measuring_sparsity,
    power_law,
    share_of_top,
    sparsity,
    statistics,
)
from h2o_lab.heavy_hitters.words import cooccurrence, rank_correlation, word_attention
from h2o_stream import CacheConfig, attach
from tests import test_budgets
from tests.commands import invoke, records
from tests.tolerance import FLOAT32, assert_close

model = test_budgets.model
"""A fixture: heads with windows of different sizes."""


def ids(count: int) -> torch.Tensor:
    return torch.randint(3, 64, (1, count), generator=torch.Generator().manual_seed(4))


def test_sparsity_is_what_is_below_a_hundredth_of_the_largest() -> None:
    probs = torch.tensor([[0.9, 0.0089, 0.0091, 0.082], [0.5, 0.5, 0.0, 0.0]])
    visible = torch.tensor([[True] * 4, [True, True, True, False]])
    assert sparsity(probs, visible).tolist() == [0.25, pytest.approx(1 / 3)]


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_power_law(exponent: float) -> None:
    scores = torch.arange(1, 200, dtype=torch.float64) ** -exponent
    assert power_law(scores.flip(0)) == pytest.approx(exponent)
    assert math.isnan(power_law(scores[:2]))


def test_share_of_top() -> None:
    assert share_of_top(torch.tensor([1.0, 6.0, 2.0, 1.0]), 0.25) == pytest.approx(0.6)


def test_the_last_query_of_every_forward_counts() -> None:
    meter, visible = SparsityMeter(), torch.ones(1, 1, 2, dtype=torch.bool)
    assert math.isnan(meter.value)
    for last in ([1.0, 0.0], [0.5, 0.5], [0.0, 1.0], [1.0, 0.0]):
        meter(torch.tensor([[0.5, 0.5], last]).view(1, 1, 1, 2, 2), visible)
    assert meter.value == 0.375


@pytest.mark.parametrize(("decay", "chunk"), [(1.0, 0), (1.0, 7), (0.9, 7)])
def test_all_attention_is_on_what_is_held_until_something_is_evicted(grouped: Any, decay: float, chunk: int) -> None:
    with attach(grouped, CacheConfig("h2o", 32, decay=decay, chunk=chunk)) as cache, measuring_sparsity(cache):
        grouped(ids(30), past_key_values=cache)
        for layer in statistics(cache):
            assert layer.mass == pytest.approx(1.0, rel=FLOAT32)
            assert layer.scores.sum() * cache.kept().shape[1] == pytest.approx(
                3 * 2 * (30 if decay == 1 else (1 - decay**30) / (1 - decay)), rel=FLOAT32
            )
            assert 0 < layer.sparsity < 1
        grouped(ids(30), past_key_values=cache)
        assert all(0 < layer.mass < 1 for layer in statistics(cache))


def test_the_part_is_not_known_where_queries_count_more_than_they_decay(grouped: LlamaForCausalLM) -> None:
    with attach(grouped, CacheConfig("h2o", 32, chunk=0)) as cache:
        grouped(ids(90), past_key_values=cache)
        assert all(math.isnan(layer.mass) for layer in statistics(cache))


def test_policies_without_scores_and_an_empty_cache(grouped: LlamaForCausalLM) -> None:
    with attach(grouped, CacheConfig("recent", 16)) as cache, measuring_sparsity(cache):
        assert all(math.isnan(layer.sparsity) for layer in statistics(cache))
        grouped(ids(30), past_key_values=cache)
        for layer in statistics(cache):
            assert math.isnan(layer.mass)
            assert math.isnan(layer.exponent)
            assert layer.scores.numel() == 0
            assert 0 < layer.sparsity < 1


@pytest.mark.parametrize("policy", ["h2o", "full"])
def test_sparsity_is_measured_when_asked(grouped: LlamaForCausalLM, policy: str) -> None:
    with attach(grouped, CacheConfig(policy, 16)) as cache:
        grouped(ids(30))
        assert all(math.isnan(layer.sparsity) for layer in statistics(cache))
        with measuring_sparsity(cache):
            grouped(ids(30))  # a new stream is measured, too
            assert all(0 < layer.sparsity < 1 for layer in statistics(cache))
        assert all(math.isnan(layer.sparsity) for layer in statistics(cache))


def test_what_is_observed_is_what_transformers_attends_to(grouped: LlamaForCausalLM) -> None:
    """Sparsity, sums and the mass of `recent`, from the attentions of an eager forward."""
    tokens, window, chunk = ids(48), 16, 4
    grouped.set_attn_implementation("eager")
    attentions = grouped(tokens, output_attentions=True).attentions
    grouped.set_attn_implementation("sdpa")
    *_, layers = measure_attention(grouped, tokens[0].tolist(), [CacheConfig("recent", window)], chunk)
    for layer, probs in zip(layers, attentions, strict=True):
        causal = torch.ones(48, 48, dtype=torch.bool).tril()
        assert layer.sparsity == pytest.approx(float(sparsity(probs, causal).mean()), rel=FLOAT32)
        sums = probs[0].view(2, 3, 48, 48).sum((1, 2)).sort(-1, descending=True).values.mean(0)
        assert_close(layer.scores, sums)
        near = [
            float(probs[0, :, i, max(start - window, 0) : i + 1].sum(-1).mean())
            for start in range(0, 48, chunk)
            if start > window
            for i in range(start, start + chunk)
        ]
        assert layer.mass["recent"] == pytest.approx(sum(near) / len(near), rel=FLOAT32)


def test_the_attention_that_falls_on_what_is_held(model: Any) -> None:
    *_, layers = measure_attention(
        model, test_budgets.TOKENS[0].tolist(), [test_budgets.config_of(), CacheConfig("sink", test_budgets.WINDOW)], 7
    )
    assert all(0 < layer.mass["h2o"] < 1 and 0 < layer.mass["sink"] < 1 for layer in layers)


def test_statistics_are_means_over_heads(model: Any) -> None:
    with attach(model, test_budgets.config_of()) as cache, measuring_sparsity(cache):
        model(test_budgets.TOKENS, past_key_values=cache)
        measured = statistics(cache)
        assert [layer.layer for layer in measured] == [0, 1, 2]
        assert [len(layer.scores) for layer in measured] == [max(sizes) for sizes in test_budgets.BY_HEAD]
        assert all(0 < layer.mass < 1 and 0 <= layer.sparsity < 1 for layer in measured)


@pytest.mark.parametrize("by", ["heavy", "random"])
def test_a_fraction_is_removed_for_good(by: str) -> None:
    scores = torch.rand(2, 100, generator=torch.Generator().manual_seed(3))
    choose, visible = removal_rule(0.2, by, spared=4, recent=10), torch.ones(2, 50, dtype=torch.bool)
    first = choose(0, scores[:, :50], visible)
    second = choose(0, scores, torch.cat((first, visible), 1))
    assert (~first).sum(1).tolist() == [10, 10]
    assert (~second).sum(1).tolist() == [20, 20]
    assert not second[:, :50][~first].any(), "none comes back"
    assert second[:, :4].all()
    assert second[:, -10:].all()
    heaviest = scores[:, 4:40].topk(10).indices + 4
    assert (not first.gather(1, heaviest).any()) == (by == "heavy")


class TestWords:
    def test_rank_correlation(self) -> None:
        x = torch.tensor([1.0, 2.0, 2.0, 5.0])
        assert rank_correlation(x, x**3) == pytest.approx(1)
        assert rank_correlation(x, -x) == pytest.approx(-1)
        assert rank_correlation(x, torch.tensor([1.0, 3.0, 2.0, 4.0])) == pytest.approx(9 / math.sqrt(90))
        assert math.isnan(rank_correlation(x, torch.ones(4)))

    def test_cooccurrence_counts_different_words_nearby(self) -> None:
        tokens = [7, 8, 7, 9, *[1] * 6, 9, 7]
        assert cooccurrence(tokens, [7, 8, 9, 1]).tolist() == [3, 3, 3, 3]
        assert cooccurrence([7, 8, *[1] * 6, 9], [7, 8, 9, 1]).tolist() == [2, 2, 1, 3]

    def test_even_attention_is_one_for_every_word(self) -> None:
        tokens = torch.randint(0, 12, (200,), generator=torch.Generator().manual_seed(2)).tolist()
        even = torch.tensor([sum(1 / (query + 1) for query in range(key, 200)) for key in range(200)])
        found = word_attention(tokens, even)
        assert found.by_cooccurrence == pytest.approx([1.0] * 10, rel=1e-5)
        assert found.frequency > 0.5, "frequent words receive more in the sum"
        favored = even * torch.tensor([5.0 if token == 3 else 1.0 for token in tokens])
        assert 2 < max(word_attention(tokens, favored).by_cooccurrence) < 5.001
        assert word_attention([*tokens[:-1], 3], even * 2).by_cooccurrence == pytest.approx([2.0] * 10, rel=1e-5)


@pytest.mark.usefixtures("no_charts")
def test_what_is_lost_without_heavy_hitters(tiny_folder: Path, text: Path, tmp_path: Path) -> None:
    done = invoke(
        "h2o-compare", "heavy-hitters", "-m", tiny_folder, "--text", text, "--tokens", "150", "--window", "24",
        "--chunk", "8", "--policies", "h2o", "--remove", "10,50", "--out", tmp_path / "out", "--dtype", "float32", "-q",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    _, *found = records((tmp_path / "out" / "records.jsonl").read_text())
    removals = [record for record in found if record["type"] == "heavy-hitters-removal"]
    assert [(record["removed"], record["percent"]) for record in removals] == [
        ("nothing", 0),
        *((way, percent) for percent in (10, 50) for way in REMOVED),
    ]
    assert len({record["nll"] for record in removals}) == len(removals), "each removes other tokens"
    assert removals[0]["to_full"]["mean"] == 0
    assert all(set(record["words"]) >= {"frequency", "per_token"} for record in found if record not in removals)
    assert {"removal.png", "words.png", "power-law.png"} <= {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("no_charts")
def test_heavy_hitters(tiny_folder: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    base = ["heavy-hitters", "-m", tiny_folder, "--text", text, "--tokens", "240", "--window", "32", "--chunk", "8"]
    done = invoke("h2o-compare", *base, "--policies", "recent,h2o", "--out", out, "--jsonl", "-")
    assert done.exit_code == 0, done.stderr
    run, *found = records(done.stdout)
    layers = [record for record in found if record["type"] == "heavy-hitters"]
    assert (run["window"], run["tokens"]) == (32, 240)
    assert [layer["layer"] for layer in layers] == [0, 1]
    for layer in layers:
        assert 0 <= layer["sparsity"] < 1
        assert 0.1 < layer["top_share"] < 1
        assert set(layer["mass"]) == {"recent", "h2o", "best"}
        assert layer["mass"]["best"] >= max(layer["mass"].values()) - 1e-6
        assert min(layer["mass"].values()) > 0
    assert "…" not in done.stderr, "no figure is cut"
    assert "| layer | sparsity |" in (out / "heavy-hitters.md").read_text()
    for name in ("sparsity", "power-law", "mass"):
        assert (out / f"{name}.png").exists()


@pytest.mark.parametrize(("more", "words"), [
    (["--tokens", "401"], "the model has 400 positions; lower --tokens"),
    (["--tokens", "30"], "raise --tokens"),
    (["--out", "/proc/nothing"], "--out /proc/nothing"),
])  # fmt: skip
def test_heavy_hitters_refuses(tiny_folder: Path, text: Path, tmp_path: Path, more: Any, words: str) -> None:
    base = ["heavy-hitters", "-m", tiny_folder, "--text", text, "--window", "32", "--out", tmp_path / "out", "-q"]
    done = invoke("h2o-compare", *base, *more)
    assert done.exit_code in (1, 2)
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
