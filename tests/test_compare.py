"""The arithmetic behind comparisons."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy
import pytest
from numpy.typing import NDArray

from h2o_stream.compare.catalog import COMPARISONS
from h2o_stream.compare.folder import Folder, JobResult, identity
from h2o_stream.compare.models import endless
from h2o_stream.compare.nll import paired_difference, stream_nll
from h2o_stream.compare.options import configs_of
from h2o_stream.config import POLICIES, CacheConfig, ModelConfig
from h2o_stream.errors import DataError
from h2o_stream.loading.loading import load_model
from h2o_stream.loading.transformers_model import load
from tests.family_models import TEXT, written


def noise(count: int, seed: int) -> NDArray[numpy.float32]:
    return numpy.random.default_rng(seed).standard_normal(count, numpy.float32)


class TestBootstrap:
    def test_the_interval_holds_the_truth_about_as_often_as_it_says(self) -> None:
        inside = 0
        for seed in range(200):
            interval = paired_difference(0.1 + noise(2048, seed), numpy.zeros(2048), seed=seed)
            inside += interval.low <= 0.1 <= interval.high
        assert 175 <= inside <= 199

    def test_neighbours_that_are_alike_widen_it(self) -> None:
        independent = noise(4096, 0)
        alike = noise(64, 0).repeat(64)
        theirs = numpy.zeros(4096)
        narrow, wide = paired_difference(independent, theirs), paired_difference(alike, theirs)
        assert (wide.high - wide.low) > 4 * (narrow.high - narrow.low)

    def test_only_shared_tokens_are_compared(self) -> None:
        ours = numpy.repeat((2.0, 50.0), (100, 500))
        interval = paired_difference(ours, numpy.ones(100))
        assert interval == (1.0, 1.0, 1.0)

    def test_it_is_the_same_when_computed_again(self) -> None:
        assert paired_difference(noise(500, 1), noise(500, 2)) == paired_difference(noise(500, 1), noise(500, 2))


class TestFolder:
    run: dict[str, Any] = {"command": "h2o-compare nll", "model": "m", "cache": [{"policy": "full"}], "versions": "1"}

    def test_the_same_comparison_may_run_again_with_more_policies(self, tmp_path: Path) -> None:
        folder = Folder(tmp_path)
        folder.claim(self.run)
        folder.claim({**self.run, "versions": "2", "policy": ["full"]})
        assert json.loads((tmp_path / "run.json").read_text())["versions"] == "1", "the first run's versions stay"
        folder.claim({**self.run, "cache": [{"policy": "h2o"}, {"policy": "full"}]})
        assert len(json.loads((tmp_path / "run.json").read_text())["cache"]) == 2

    @pytest.mark.parametrize(("other", "words"), [
        ({"model": "n"}, "its model is m, here it is n"),
        ({"tokens": 5}, "its tokens is None"),
        ({"command": "h2o-compare speed"}, "choose another folder"),
        ({"cache": [{"policy": "h2o"}]}, "policies that this run leaves out"),
    ])  # fmt: skip
    def test_another_run_is_refused(self, tmp_path: Path, other: dict[str, Any], words: str) -> None:
        Folder(tmp_path).claim(self.run)
        with pytest.raises(DataError, match=words):
            Folder(tmp_path).claim({**self.run, **other})

    def test_a_damaged_folder_is_not_mistaken_for_ours(self, tmp_path: Path) -> None:
        (tmp_path / "run.json").write_text("[]")
        with pytest.raises(DataError, match="is this the --out folder"):
            Folder(tmp_path).claim(self.run)

    def test_what_is_stored_is_found_under_its_key_only(self, tmp_path: Path) -> None:
        folder = Folder(tmp_path / "new")
        folder.store({"a": 1}, JobResult({"tok_s": 5.0}, numpy.arange(3.0)))
        part = Folder(tmp_path / "new").load({"a": 1})
        assert part.values.tolist() == [0, 1, 2]
        assert part.figures == {"tok_s": 5.0}
        assert folder.load({"a": 2}) is None

    def test_no_folder_keeps_nothing(self) -> None:
        folder = Folder(None)
        folder.store({"a": 1}, JobResult())
        assert folder.load({"a": 1}) is None

    def test_a_folder_that_cannot_be_made(self) -> None:
        with pytest.raises(DataError, match="--out /proc/nothing"):
            Folder(Path("/proc/nothing"))


def test_a_figure_is_another_one_when_a_default_changes(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a comparison continued with the figures of a former default."""
    before = identity(tiny, CacheConfig())
    assert identity(tiny, CacheConfig()) == before
    assert identity(tiny, CacheConfig(decay=0.5)) != before
    monkeypatch.setitem(POLICIES, "h2o", replace(POLICIES["h2o"], heavy_share=0.1))
    assert identity(tiny, CacheConfig()) != before


def test_auto_is_the_window_that_chats_choose() -> None:
    auto, number = configs_of(("h2o",), ("auto", 256), (0,), {})
    assert auto == CacheConfig(auto_window=1)
    assert number == CacheConfig(window=256)
    assert configs_of(("h2o",), ("auto",), (0,), {"heavy": 64}) == [CacheConfig(heavy=64)]


@pytest.mark.parametrize("name", sorted({*COMPARISONS.registered, *COMPARISONS.entry_points()} - {"gpu"}))
def test_windows_of_any_comparison_may_be_auto(name: str) -> None:
    """But for that of GPUs, which are to be compared at equal windows."""
    windows = get_type_hints(COMPARISONS[name], include_extras=True)["windows"]
    for option in getattr(windows, "__metadata__", ()):
        assert option.parse("64,auto", "--windows") == (64, "auto")


@pytest.mark.parametrize("config", [CacheConfig(window=16, chunk=8, budgets="equal"), CacheConfig("full")])
def test_losses_without_torch_are_those_of_torch(tmp_path: Path, config: CacheConfig) -> None:
    source = ModelConfig(str(written(tmp_path, "Llama")), dtype="float32")
    models = load_model(source, CacheConfig(), "auto", print, print).model, load(source).model
    native, eager = (
        list(stream_nll(model, chosen, TEXT[:60], engine="eager"))[-1]
        for model, chosen in zip(models, (endless(config), config), strict=True)
    )
    assert (native.figures["steps"][:6], eager.figures["steps"][:6]) == ("native", "eager:")
    assert native.values.mean() == pytest.approx(eager.values.mean(), abs=1e-3)
