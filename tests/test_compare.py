"""The arithmetic behind comparisons."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_stream.compare.folder import Folder, JobResult, identity
from h2o_stream.compare.nll import paired_difference
from h2o_stream.compare.recall import measure_recall, plan_questions
from h2o_stream.config import POLICIES, CacheConfig
from h2o_stream.errors import ConfigError, DataError
from h2o_stream.models.load import LoadedModel


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


class TestFolder:
    def test_what_is_stored_is_found_under_its_key_only(self, tmp_path: Path) -> None:
        folder = Folder(tmp_path / "new")
        folder.store({"a": 1}, JobResult({"tok_s": 5.0}, torch.arange(3.0)))
        part = Folder(tmp_path / "new").load({"a": 1})
        assert part is not None
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


class TestRecall:
    def test_facts_are_where_the_plan_says(self, tokenizer: Any) -> None:
        text = tokenizer("A story about nothing in particular. " * 400)["input_ids"]
        plan = plan_questions(tokenizer, text, 3, [10, 300])
        assert [question[1:] for question in plan.questions] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
        for at, fact, which in plan.questions:
            end = at - plan.distances[which]
            said = tokenizer.decode(plan.tokens[end - 16 : end])
            cue, word = tokenizer.decode(plan.cues[fact]).strip(), tokenizer.decode([plan.answers[fact]])
            assert f"{cue}{word}" in said
        assert len(set(plan.choices)) == len(plan.choices) >= 20
        assert plan.length == plan.questions[-1][0] + len(plan.cues[2])

    def test_too_little_text_and_too_many_facts(self, tokenizer: Any) -> None:
        with pytest.raises(DataError, match="lower --facts or --distances"):
            plan_questions(tokenizer, [5] * 100, 2, [64])
        with pytest.raises(ConfigError, match="lower --facts"):
            plan_questions(tokenizer, [5] * 100, 99, [64])

    def test_a_question_leaves_no_trace_and_the_embedded_model_remembers(self, embedded: LoadedModel) -> None:
        """The same question in the same place gets the same answer."""
        tokenizer, model = embedded.tokenizer, embedded.model
        text = tokenizer("It was a quiet day in the village, and nobody had anything to do. " * 30)["input_ids"]
        config = CacheConfig("sink", 96, chunk=16)
        plan = plan_questions(tokenizer, text, 2, [16, 120, 120])
        *_, ours = measure_recall(model, config, plan)
        *_, theirs = measure_recall(model, CacheConfig("full"), plan)
        assert isinstance(ours, JobResult)
        assert isinstance(theirs, JobResult)
        margins, full = ours.values, theirs.values
        assert margins[:, 1].equal(margins[:, 2])
        assert full.min() > 0, "it can tell all of them"
        assert margins[:, 0].min() > 0
        assert margins[:, 1].max() < full[:, 1].min(), "evicted facts are not recalled"
