"""Guesses change nothing but time: replies, states and random draws are those without them."""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy
import pytest

from h2o_stream.config import CacheConfig, ModelConfig, SamplingConfig, SpeculateMode
from h2o_stream.engine.engine import Engine
from h2o_stream.engine.events import Token
from h2o_stream.engine.grammar import Grammar
from h2o_stream.engine.speculation import Speculation, followers
from h2o_stream.loading.loading import load_model
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.native.stepper import Stepper
from h2o_stream.runtime.model import RuntimeModel, ServedRuntime
from h2o_stream.serve.grammars import Grammars
from tests.family_models import TEXT, written
from tests.native_builds import needs_library
from tests.states import equal_states
from tests.test_native_batch import model  # noqa: F401 - a fixture

pytestmark = needs_library

SCHEMA = {"type": "object", "properties": {"name": {"enum": ["Ann", "Bo"]}}, "required": ["name"]}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses are made whenever there are any, however long they take."""
    lengths = count()
    monkeypatch.setattr(Speculation, "_count", lambda _, most: min(most, 1 + next(lengths) % 7))


@pytest.fixture
def opened(model: RuntimeModel, served_embedded: LoadedModel) -> Iterator[Callable[..., Engine]]:  # noqa: F811
    engines = list[Engine]()

    def open_engine(mode: SpeculateMode, sampling: SamplingConfig, kv_bits: int = 16) -> Engine:
        config = CacheConfig(window=64, kv_bits=kv_bits)
        engines.append(Engine(model, served_embedded.tokenizer, config, sampling, speculate=mode))
        list(engines[-1].prefill([5 + 7 * i % 61 for i in range(150)]))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("temperature", "said", "kv_bits"), [(0.0, 9, 16), (0.4, 60, 16), (0.4, 9, 8), (0.0, 60, 4)])
def test_replies_are_the_same(opened: Callable[..., Engine], temperature: float, said: int, kv_bits: int) -> None:
    """Also of one that is abandoned before its end."""
    sampling = SamplingConfig(temperature, seed=5, max_tokens=60, dry_multiplier=0.0)
    engines = [opened(mode, sampling, kv_bits) for mode in ("auto", "off")]
    replies = [list(islice(engine.decode(), said)) for engine in engines]
    held = [[group.token_indices.copy() for group in engine.cache.head_groups] for engine in engines]  # type: ignore[union-attr]
    assert all(map(numpy.array_equal, *held)), "no guess is left"
    for engine in engines:
        list(engine.prefill([8, 9]))
    tokens = [[event.id for event in reply if isinstance(event, Token)] for reply in replies]
    assert tokens[0] == tokens[1]
    assert equal_states(*(engine.state_dict() for engine in engines))
    passes = [engine.speculation.passes for engine in engines]
    assert passes[1] == len(tokens[1])
    assert passes[0] < passes[1]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("ending", ["stop strings", "max_tokens"])
def test_a_reply_ends_inside_a_pass(opened: Callable[..., Engine], ending: str) -> None:
    """At every place of it: the same events as without guesses, and the same conversation after it."""
    guessing, stepping = (opened(mode, SamplingConfig(0.0, seed=5, max_tokens=24)) for mode in ("auto", "off"))
    pieces = [event.text for event in stepping.decode() if isinstance(event, Token) and event.text]
    list(guessing.decode())
    stops = [(("".join(pieces[at : at + 2]),), 24) for at in range(1, 20, 3)]
    for strings, most in stops if ending == "stop strings" else [((), most) for most in range(1, 9)]:
        replies = list[list[Any]]()
        for engine in (guessing, stepping):
            list(engine.prefill([8, 9]))
            events = engine.decode(strings, max_tokens=most)
            replies.append([(type(event), event.text, getattr(event, "id", event)) for event in events])
        assert replies[0] == replies[1]
        assert equal_states(guessing.state_dict(), stepping.state_dict())
    assert guessing.speculation.passes < stepping.speculation.passes


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("aside", [False, True])
def test_what_a_grammar_leaves_is_guessed(
    opened: Callable[..., Engine], served_embedded: LoadedModel, aside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of the server's, in a process of its own."""
    monkeypatch.setattr("h2o_stream.serve.grammar_client._FORESEE_S", 60.0)
    engines = [opened(mode, SamplingConfig(0.0, seed=5, max_tokens=40)) for mode in ("auto", "off")]
    values = served_embedded.tokenizer, engines[0].end_tokens, engines[0].served.vocabulary
    grammars = Grammars(*values, kept=2)
    for engine in engines:
        engine.grammar = asyncio.run(grammars.make(SCHEMA, None)) if aside else Grammar(*values, SCHEMA)
    texts = ["".join(event.text for event in engine.decode()) for engine in engines]
    assert texts[0] == texts[1]
    assert texts[0].startswith("{")
    assert equal_states(*(engine.state_dict() for engine in engines))
    passes = [engine.speculation.passes for engine in engines]
    assert passes[0] <= 0.4 * passes[1]
    grammars.close()


def test_what_followed_the_longest_sequence_is_guessed_the_newest_first() -> None:
    def guessed(*tokens: int) -> list[list[tuple[int, int]]]:
        return [[*map(tuple, found)] for found in followers(numpy.array(tokens, numpy.int32))]

    first, second = guessed(1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3)[0], guessed(1, 2, 7, 1, 2, 8, 1, 2)
    assert first == [(9, 3), (1, 4), (2, 5), (4, 6), (8, 7), (1, 8), (2, 9)]
    assert [found[0][0] for found in second] == [8, 7]
    assert guessed(1, 2, 3, 4, 1) == []
    assert guessed(1) == []
    assert guessed(3, 3, 3) == [[(3, 2)]]


def test_guesses_that_do_not_pay_are_not_made() -> None:
    tokens = numpy.array([1, 2, 3, 4, 1, 2], numpy.int32)

    class Model:
        guesses: Any = ()
        pass_s = None

        def step(self, _: int, guess: Callable[[], Any]) -> tuple[None, int]:
            self.guesses = guess()
            return None, 1 + len(self.guesses)

    for cost, right, wanted in ((1.0, 0.9, 2), (19.0, 0.9, 0), (1.0, 0.0, 0)):
        speculation, served = Speculation("auto"), Model()
        speculation._step_s, speculation._cost_factor, speculation._right = 1.0, cost, [right] * 8
        speculation.step(served, tokens, 2)  # type: ignore[arg-type]
        assert len(served.guesses) == wanted
    off = Speculation("off")
    off._step_s = 1.0
    off.step(served, tokens, 2)  # type: ignore[arg-type]
    assert not served.guesses


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
    assert equal_states(passing.state_dict(), stepped.state_dict())


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
    assert equal_states(passing.state_dict(), stepped.state_dict())
