"""`--engine auto|eager` and its former names."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from h2o_stream import CacheConfig, ConfigError, attach
from h2o_stream.cli.options import ENGINE
from h2o_stream.config import Settings
from h2o_stream.engine.engine import Engine
from tests.commands import invoke


@pytest.mark.parametrize(("options", "choice"), [({}, "auto"), ({"engine": "eager"}, "eager")])
def test_what_is_chosen(options: dict[str, Any], choice: str) -> None:
    assert ENGINE.make(**options) == choice


def test_others_are_refused(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="--engine takes auto, eager"):
        Settings(engine="compiled")  # type: ignore[arg-type]
    assert invoke("h2o-chat", "-m", tiny_folder, "-p", "Hello.", "--engine", "fast").exit_code == 2


@pytest.mark.parametrize(("option", "steps"), [("eager", "steps: eager"), ("auto", "steps: ")])
def test_verbose_shows_the_engine(tiny_folder: Path, option: str, steps: str) -> None:
    base = ["-m", tiny_folder, "-p", "Hello.", "-n", 4, "--device", "cpu", "--engine", option]
    done = invoke("h2o-chat", *base, "-v")
    assert done.exit_code == 0, done.stderr
    assert done.stderr.count(steps) == 1
    assert "steps:" not in invoke("h2o-chat", *base).stderr


def test_the_cache_reports_the_engine(tiny: PreTrainedModel) -> None:
    with attach(tiny, CacheConfig(window=16), engine="eager") as cache:
        assert cache.engine_note == "eager: --engine eager"


def test_counts_are_made_when_somebody_looks(talker: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have a cost, so they are not computed for every token."""
    from h2o_stream.config import SamplingConfig
    from h2o_stream.engine.events import Token

    with Engine(talker(), tokenizer, CacheConfig(window=16), SamplingConfig(max_tokens=12, seed=0)) as engine:
        list(engine.prefill([5, 6, 7]))
        looked: list[int] = []
        counts = engine.cache.counts
        monkeypatch.setattr(engine.cache, "counts", lambda: looked.append(0) or counts())
        for event in engine.decode():
            if isinstance(event, Token):
                assert not looked
                assert event.seen == len(engine.tokens)
        assert not looked
