"""Passes: a token and guesses at once, with the logits and the slots of steps, whichever guesses are wrong."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy
import pytest

from h2o_stream.config import CacheConfig, ModelConfig
from h2o_stream.loading.loading import load_model
from h2o_stream.native import library
from h2o_stream.native.stepper import Stepper
from h2o_stream.runtime.model import RuntimeModel, ServedRuntime
from tests.family_models import TEXT, written
from tests.test_native_batch import model  # noqa: F401 - a fixture

pytestmark = pytest.mark.skipif(library.loaded() is None, reason="there is no compiled library")

CONFIGS = {
    "h2o": CacheConfig(window=48),
    "h2o-paper": CacheConfig("h2o-paper", window=48),
    "tova": CacheConfig("tova", window=40),
    "recent": CacheConfig("recent", window=40),
    "random": CacheConfig("random", window=40, kv_bits=8),
    "few bits": CacheConfig(window=64, kv_bits=4, positions="rolling"),
    "absolute": CacheConfig(window=48, kv_bits=6, positions="absolute"),
}

TOKENS = [5 + 13 * i * i % 4001 for i in range(800)]


def same_states(one: ServedRuntime, other: ServedRuntime) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(numpy.array_equal(first[name], second[name]) for name in first)


def follow(passing: ServedRuntime, stepped: ServedRuntime, tokens: list[int], right: Callable[[int], int]) -> int:
    """Feed tokens to both, with `right(i)` right guesses in pass number i and then wrong ones; the number of passes."""
    passes = done = 0
    while done < len(tokens):
        ahead = tokens[done + 1 : done + 1 + right(passes)]
        guesses = [*ahead, *((token + 1) % 61 for token in tokens[done + 1 + len(ahead) : done + 8])]
        for place in range(done, done + 1 + len(ahead)):
            logits, taken = passing.step(tokens[place], partial(list, guesses))
            passes += taken > 1
            assert numpy.array_equal(logits, stepped.forward([tokens[place]]))
            assert passing.cache.seen_tokens == stepped.cache.seen_tokens
        done += 1 + len(ahead)
    return passes


@pytest.mark.parametrize("name", CONFIGS)
def test_wrong_guesses_at_every_position_leave_no_trace(model: RuntimeModel, name: str) -> None:  # noqa: F811
    passing, stepped = (model.serve(CONFIGS[name]) for _ in range(2))
    for served in (passing, stepped):
        served.cache.pin(3, 5)
        start = 36
        served.forward(TOKENS[:start])
        served.cache.evict_first(start - 16, start - 12)
    assert follow(passing, stepped, TOKENS[start : start + 70], lambda number: number % 7) > 10
    assert same_states(passing, stepped)


@pytest.mark.parametrize("name", ["Qwen 3.5 with more value heads", "LFM2", "Granite 4", "Falcon-H1"])
def test_recurrent_states_follow_what_was_said(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside attention, and with several threads."""
    monkeypatch.setattr(Stepper, "threads", 2)
    config = CacheConfig(window=24)
    loaded = load_model(ModelConfig(str(written(tmp_path, name)), dtype="float32"), config, "auto", print, print)
    assert isinstance(loaded.model, RuntimeModel)
    passing, stepped = (loaded.model.serve(config) for _ in range(2))
    for served in (passing, stepped):
        served.forward(TEXT[:30])
    assert follow(passing, stepped, TEXT[30:100], lambda number: number % 7) > 10
    assert same_states(passing, stepped)
