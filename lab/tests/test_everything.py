"""``h2o-compare all``: what cannot run is left out, and said."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_lab.report.everything import LeftOut, lines_of, read_left_out, write_left_out
from h2o_lab.throughput.options import Shape
from h2o_stream.compare import nll
from h2o_stream.compare.catalog import COMPARISONS
from h2o_stream.compare.options import InAll
from h2o_stream.config import POLICIES
from h2o_stream.errors import DataError
from tests.commands import invoke, records
from tests.fixtures import with_exhaustive

pytestmark = pytest.mark.usefixtures("no_charts")

TINY: dict[str, dict[str, Any]] = {
    "nll": {"tokens": 60, "windows": (32, 401)},
    "recall": {"facts": 1, "distances": (8,), "policies": ("sink",), "windows": (64,)},
    "throughput": {"shapes": (Shape(300, 200),), "cache_budget": "1MiB"},
}
"""The second window and the shape are beyond the 400 positions of the tiny model."""

FEW: dict[str, dict[str, Any]] = {"nll": {"tokens": 80, "windows": (32, 64), "policies": ("full", "tova", "sink")}}


def measure(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, dict[str, Any]]) -> None:
    """Let `all` run only these comparisons."""
    for name, options in COMPARISONS.items():
        monkeypatch.setattr(options, "in_all", InAll(quick=sizes[name], thorough={}) if name in sizes else None)


@pytest.fixture
def arguments(tiny_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    measure(monkeypatch, TINY)
    return ["all", "-m", tiny_folder, "--text", text, "--out", tmp_path / "out", "--quick", "--jsonl", "-"]


def left_out_of(output: str) -> list[tuple[str, str | None]]:
    return [(r["comparison"], r["job"]) for r in records(output) if r["type"] == "left-out"]


@pytest.mark.parametrize("tokens", with_exhaustive([60], [120]))
def test_what_the_model_cannot_do_is_left_out_and_the_rest_measured(
    arguments: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    monkeypatch.setitem(TINY["nll"], "tokens", tokens)
    done = invoke("h2o-compare", *arguments)
    assert done.exit_code == 0, done.stderr
    evicting = sorted(policy for policy in POLICIES if policy != "full")
    losses = [record for record in records(done.stdout) if record["type"] == "nll"]
    assert sorted(record["policy"] for record in losses) == sorted(["full", *evicting])
    assert {record["window"] for record in losses} == {None, 32}
    missing = left_out_of(done.stdout)
    assert sorted(missing) == sorted([*(("nll", f"{policy} 401") for policy in evicting), ("throughput", None)])
    assert "left out: throughput: 300+200 needs 500 positions" in done.stderr
    page = (tmp_path / "out" / "report.html").read_text()
    assert "not measured" in page
    assert "window 401 + chunk 1" in page
    assert "throughput: 300+200 needs 500 positions, the model has 400" in (tmp_path / "out" / "report.md").read_text()
    first = [record for record in records(done.stdout) if record["type"] != "run"]
    again = invoke("h2o-compare", *arguments, "-q")
    assert [record for record in records(again.stdout) if record["type"] != "run"] == first, "speeds too are resumed"
    report = invoke("h2o-compare", "report", tmp_path / "out", "--to", tmp_path / "later.md")
    assert report.exit_code == 0, report.stderr
    assert "## Not measured" in (tmp_path / "later.md").read_text()


@pytest.mark.exhaustive
def test_a_policy_that_exhausts_memory_is_left_out(arguments: list[object], monkeypatch: Any, tmp_path: Path) -> None:
    measure(monkeypatch, FEW)
    stream = nll.stream_nll

    def limited(model: Any, config: Any, tokens: Any, *more: Any) -> Any:
        if (config.policy, config.window) == ("tova", 32):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried\nto allocate")
        return stream(model, config, tokens, *more)

    monkeypatch.setattr(nll, "stream_nll", limited)
    done = invoke("h2o-compare", *arguments)
    assert done.exit_code == 0, done.stderr
    assert left_out_of(done.stdout) == [("nll", "text.txt tova 32")]
    assert "left out: nll, text.txt tova 32: out of memory:" in done.stderr
    windows = [record["window"] for record in records(done.stdout) if record.get("policy") == "tova"]
    assert windows == [64]
    monkeypatch.undo()
    measure(monkeypatch, FEW)
    again = invoke("h2o-compare", *arguments)
    assert left_out_of(again.stdout) == [], "it is tried again"
    assert read_left_out(tmp_path / "out") == []
    assert len([record for record in records(again.stdout) if record["type"] == "nll"]) == len(POLICIES) * 2 - 1


@pytest.mark.exhaustive
def test_a_comparison_with_a_bug_does_not_end_the_others(arguments: list[object], monkeypatch: Any) -> None:
    measure(monkeypatch, {**FEW, "recall": TINY["recall"]})
    monkeypatch.setattr("h2o_lab.recall.comparison.read_facts", lambda count: 1 / 0)
    done = invoke("h2o-compare", *arguments)
    assert done.exit_code == 0, done.stderr
    assert ("recall", None) in left_out_of(done.stdout)
    assert "recall: unexpected ZeroDivisionError: division by zero" in done.stderr


def test_nothing_at_all(arguments: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    measure(monkeypatch, FEW)
    monkeypatch.setattr(nll, "stream_nll", lambda *_: (_ for _ in ()).throw(MemoryError("out of memory")))
    done = invoke("h2o-compare", *arguments, "-q")
    assert done.exit_code == 1
    assert done.stderr.startswith("h2o-compare: nothing could be measured; nll, text.txt full, ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [(["-m", "nowhere/nothing", "--offline"], "nowhere/nothing"), (["--text", "nothing.txt"], "--text nothing.txt")],
)
def test_what_nothing_can_run_with_ends_it_at_once(arguments: list[object], more: list[str], words: str) -> None:
    done = invoke("h2o-compare", *arguments, *more, "-q")
    assert done.exit_code == 1
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert left_out_of(done.stdout) == []


def test_reasons_are_listed_once(tmp_path: Path) -> None:
    left_out = [
        LeftOut("nll", "sink 9", "too large"),
        LeftOut("speed", None, "broken"),
        LeftOut("nll", "h2o 9", "too large"),
    ]
    assert lines_of(left_out) == ["nll, sink 9, h2o 9: too large", "speed: broken"]
    write_left_out(tmp_path, left_out)
    assert read_left_out(tmp_path) == left_out
    (tmp_path / "left-out.jsonl").write_text(json.dumps({"comparison": "nll"}) + "\n")
    with pytest.raises(DataError, match=r"left-out.jsonl: a line has no 'job'"):
        read_left_out(tmp_path)


def test_a_tokenizer_without_a_chat_template(
    arguments: list[object], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat then has the plain form, which every model can read."""
    measure(monkeypatch, {"recall": TINY["recall"]})
    bare = Path(shutil.copytree(tiny_folder, tmp_path / "bare"))
    for path in bare.glob("chat_template*"):
        path.unlink()
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    done = invoke("h2o-compare", *arguments, "-m", bare)
    assert done.exit_code == 0, done.stderr
    assert [record["type"] for record in records(done.stdout)].count("recall") == 4


def test_an_interruption_says_how_to_resume(arguments: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("h2o_stream.ui.comparison.run_job", interrupt)
    done = invoke("h2o-compare", *arguments)
    assert done.exit_code == 130
    assert "the same command goes on from there" in done.stderr
