"""The arithmetic behind comparisons."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from h2o_stream.compare.bootstrap import paired_difference
from h2o_stream.compare.results import Results
from h2o_stream.errors import DataError


def noise(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


class TestBootstrap:
    def test_the_interval_holds_the_truth_about_as_often_as_it_says(self) -> None:
        inside = 0
        for seed in range(200):
            interval = paired_difference(0.1 + noise(2048, seed), torch.zeros(2048), seed=seed)
            inside += interval.low <= 0.1 <= interval.high
        assert 175 <= inside <= 199

    def test_neighbours_that_are_alike_widen_it(self) -> None:
        independent = noise(4096, 0)
        alike = noise(64, 0).repeat_interleave(64)
        theirs = torch.zeros(4096)
        narrow, wide = paired_difference(independent, theirs), paired_difference(alike, theirs)
        assert (wide.high - wide.low) > 4 * (narrow.high - narrow.low)

    def test_only_shared_tokens_are_compared(self) -> None:
        ours = torch.cat((torch.full((100,), 2.0), torch.full((500,), 50.0)))
        interval = paired_difference(ours, torch.ones(100))
        assert interval == (1.0, 1.0, 1.0)

    def test_it_is_the_same_when_computed_again(self) -> None:
        assert paired_difference(noise(500, 1), noise(500, 2)) == paired_difference(noise(500, 1), noise(500, 2))


class TestResults:
    def test_what_is_stored_is_found_under_its_key_only(self, tmp_path: Path) -> None:
        results = Results(tmp_path / "new")
        results.store({"a": 1}, torch.arange(3.0), {"tok_s": 5.0})
        values, figures = Results(tmp_path / "new").load({"a": 1}) or (None, None)
        assert values is not None
        assert values.tolist() == [0, 1, 2]
        assert figures == {"tok_s": 5.0}
        assert results.load({"a": 2}) is None

    def test_no_folder_keeps_nothing(self) -> None:
        results = Results(None)
        results.store({"a": 1}, torch.arange(3.0), {})
        assert results.load({"a": 1}) is None

    def test_a_folder_that_cannot_be_made(self) -> None:
        with pytest.raises(DataError, match="--out /proc/nothing"):
            Results(Path("/proc/nothing"))
