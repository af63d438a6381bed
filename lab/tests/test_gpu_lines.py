"""``h2o-compare gpu`` on a CPU, of a tiny model: every line is measured, and what was left out the next time."""

from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_lab.gpu import comparison
from h2o_lab.gpu.options import GpuOptions
from h2o_stream.base.processes import Processes
from h2o_stream.compare.catalog import COMPARISONS
from h2o_stream.errors import H2OStreamError
from h2o_stream.session.jsonl import JsonlWriter
from h2o_stream.ui.comparison import run_comparison
from h2o_stream.ui.terminal import Terminal
from tests.fixtures import make_llama


def run(folder: Path, capsys: pytest.CaptureFixture[str], **settings: Any) -> str:
    make_llama(groups=2).config.save_pretrained(folder)
    options = GpuOptions(random_weights=folder, windows=(24,), stream=2000, out=folder / "out", **settings)
    run_comparison(comparison.Gpu(options), options.out, Terminal("off"), JsonlWriter(None), Processes())
    return (folder / "out" / "records.jsonl").read_text() + capsys.readouterr().err


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison.Gpu, "device", "cpu")
    monkeypatch.setitem(COMPARISONS._items, "gpu", GpuOptions)
    tiny = {"PROMPTS": (40,), "LONG": 60, "SHAPES": ((20, 8),), "BUDGET": 1 << 16, "ROWS": 2, "STEPS": 2}
    for name, value in {**tiny, "FIRST": ("Llama 3",)}.items():
        monkeypatch.setattr(comparison, name, value)
    monkeypatch.setattr(comparison, "_families", lambda: {"Llama 3": make_llama})


@pytest.mark.usefixtures("on_cpu")
def test_all_lines_in_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run(tmp_path, capsys, minutes=0)
    assert first.count('"type": "gpu"') == 1
    assert "lines are left" in first
    whole = run(tmp_path, capsys)
    for line in ("bandwidth", "family Llama 3", "step, window 24", "step of 2 rows", "prompt of 60",
                 "full cache, compiled", "stream", "batch of 20+8"):  # fmt: skip
        assert f'"what": "{line}' in whole, line
    assert "failed" not in whole


def test_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(H2OStreamError, match="no GPU here"):
        run(tmp_path, capsys)
