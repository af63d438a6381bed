"""How near decode steps are to the model in float32, by `h2o-compare divergence`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_lab.divergence.comparison import divergence
from h2o_stream.compare.catalog import PEERS
from tests.commands import invoke, records
from tests.family_models import MODELS, written
from tests.likely_text import likely_lines
from tests.test_speed import Forks


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The file of a model, and a text that it knows."""
    folder = tmp_path_factory.mktemp("divergence")
    text = folder / "text.txt"
    text.write_text("".join(likely_lines(MODELS["Qwen 2"].make())), encoding="utf-8")
    return written(folder, "Qwen 2"), text


def compared(place: tuple[Path, Path], *options: str) -> list[dict[str, Any]]:
    file, text = place
    arguments = ["divergence", "-m", file, "--text", text, "--tokens", 40, "--jsonl", "-"]
    result = invoke("h2o-compare", *arguments, *options)
    assert result.exit_code == 0, result.stderr
    return [record for record in records(result.stdout) if record["type"] == "divergence"]


def test_steps_in_float32_are_nearly_exact(place: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is not installed is left out."""
    monkeypatch.setattr("h2o_stream.base.resources.find_spec", lambda name: None)
    (record,) = compared(place, "--dtype", "float32")
    assert (record["engine"], record["dtype"], record["tokens"]) == ("h2o-stream", "float32", 40)
    assert record["kl"] < 1e-6
    assert record["kl_first"] < 1e-6
    assert record["same_first_choice"] == 1


def test_in_bfloat16_they_are_less_so(place: tuple[Path, Path]) -> None:
    (record,) = compared(place, "--dtype", "bfloat16", "--peers", "")
    assert 1e-8 < record["kl"] <= record["kl_p99"] < 0.1


@pytest.mark.parametrize("peer", ["llama.cpp", "ik_llama.cpp"])
def test_other_engines_stand_beside_ours(peer: str, place: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(PEERS[peer].removesuffix("-python").replace("-", "_"))
    monkeypatch.setattr("h2o_stream.compare.speed.worker.get_context", lambda _: Forks)
    ours, theirs = compared(place, "--dtype", "float32", "--peers", peer)
    assert (ours["engine"], theirs["engine"], theirs["tokens"]) == ("h2o-stream", peer, 40)
    assert ours["kl"] < theirs["kl"] < 0.01


def test_the_divergence_is_that_of_its_definition() -> None:
    exact, other = (torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).log_softmax(-1)).unbind()
    expected = torch.nn.functional.kl_div(other, exact, log_target=True, reduction="sum")
    assert divergence(exact, other) == pytest.approx(float(expected), rel=1e-5)
    assert divergence(exact, exact) == 0
