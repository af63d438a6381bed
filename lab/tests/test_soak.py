"""Soak runs in miniature: their audits, and exact continuation after an interruption."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_lab.soak.comparison import TINY, Soak
from h2o_lab.soak.options import SoakOptions
from h2o_stream.attachment.attach import attach
from h2o_stream.cache.audit import audit
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.compare.folder import JobResult
from h2o_stream.config import CacheConfig, ModelConfig
from h2o_stream.errors import DataError, H2OStreamError
from tests.commands import invoke, records

IDS = torch.randint(3, 60, (1, 90), generator=torch.Generator().manual_seed(1))


def set_to(name: str, value: float) -> Callable[[HeadGroup], None]:
    def harm(layer: HeadGroup) -> None:
        tensor = getattr(layer, name)
        place = int((layer.index[0, 0] >= 0).nonzero()[3])
        tensor[0, 0, place] = value

    return harm


def hold_twice(layer: HeadGroup) -> None:
    places = (layer.index[0, 0] >= 0).nonzero().flatten()
    layer.index[0, 0, places[3]] = layer.index[0, 0, places[4]]


class TestAudit:
    @pytest.mark.parametrize("policy", ["h2o", "h2o-paper", "tova", "sink", "recent", "random"])
    def test_what_is_right_passes(self, tiny: Any, policy: str) -> None:
        with attach(tiny, CacheConfig(policy, 24)) as cache:
            for part in IDS.split([7, 40, 1, 1, 1, 20, 20], 1):
                tiny(part, past_key_values=cache)
                assert audit(cache.evicting_groups) >= 0  # type: ignore[arg-type]

    @pytest.mark.parametrize(("harm", "words"), [
        (hold_twice, "a token is held twice"),
        (set_to("scores", float("nan")), "a score is negative or no number"),
        (set_to("scores", -1.0), "a score is negative or no number"),
        (set_to("scores", float("inf")), "a score is negative or no number"),
        (set_to("rank", 0), "ranks are not the order"),
        (set_to("index", -1), "tokens are held"),
        (set_to("long_term_scores", float("inf")), "a long-term score is no number"),
        (lambda layer: layer.seen.add_(1), "were counted here"),
        (lambda layer: layer.free.copy_((layer.index >= 0).int().argmax(-1, keepdim=True)), "the free slot holds"),
    ])  # fmt: skip
    def test_what_is_wrong_is_found(self, tiny: Any, harm: Callable[[HeadGroup], None], words: str) -> None:
        with attach(tiny, CacheConfig("h2o", 24, budgets="equal")) as cache:
            tiny(IDS, past_key_values=cache)
            audit(cache.evicting_groups)  # type: ignore[arg-type]
            harm(cache.head_groups[1])  # type: ignore[arg-type]
            with pytest.raises(H2OStreamError, match=f"slots 1: .*{words}"):
                audit(cache.evicting_groups)  # type: ignore[arg-type]


def soak(text: Path, out: Path) -> Soak:
    options = SoakOptions(
        model=ModelConfig(TINY), window=64, text=text, tokens=3_000, passes=2, engine="eager", out=out
    )
    made = Soak(options)
    made.begin(print)
    return made


def run_jobs(made: Soak, numbers: range) -> list[dict[str, Any]]:
    jobs = made.jobs()
    return [event.figures for number in numbers for event in jobs[number].run() if isinstance(event, JobResult)]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(torch.randint(32, 120, (8000,), generator=torch.Generator().manual_seed(2)).tolist()))
    return path


@pytest.mark.exhaustive
def test_an_interrupted_stream_continues_exactly(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h2o_lab.soak.comparison._READ", 128)
    monkeypatch.setattr("h2o_lab.soak.comparison._REPLY", 16)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    whole = run_jobs(soak(text, tmp_path / "one"), range(8))
    first = soak(text, tmp_path / "two")
    begun = run_jobs(first, range(5))
    first.close()
    rest = run_jobs(soak(text, tmp_path / "two"), range(5, 8))
    for one, two in zip(whole, begun + rest, strict=True):
        assert one["losses"] == two["losses"]
        assert one["seen"] == two["seen"]
    with pytest.raises(DataError, match="begin again in another folder"):
        run_jobs(soak(text, tmp_path / "two"), range(2, 3))


@pytest.mark.exhaustive
def test_in_the_shell(tmp_path: Path, own_cache: Path) -> None:
    base = ["soak", "--model", "tiny", "--tokens", "20000", "--passes", "4", "--window", "64"]
    done = invoke("h2o-compare", *base, "--out", tmp_path / "out", "--jsonl", "-")
    assert done.exit_code == 0, done.stderr
    _, *found = records(done.stdout)
    assert found[-1]["seen"] >= 20_000
    assert len({record["cache_bytes"] for record in found}) == 1
    assert {number for record in found for number in record["nll_by_pass"]} == {"0", "1", "2", "3"}
    assert "the same text again and again" in (tmp_path / "out" / "soak.md").read_text()
    short = invoke("h2o-compare", *base, "--text", tmp_path / "out" / "soak.md")
    assert short.exit_code == 1
    assert "raise --passes" in short.stderr
    missing = invoke("h2o-compare", *base, "--text", tmp_path / "nothing")
    assert missing.exit_code == 1
    assert "nothing: No such file" in missing.stderr
