"""Guesses change nothing but time: replies, states and random draws are those without them."""

import asyncio
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import numpy
import pytest

from h2o_stream.config import CacheConfig, SamplingConfig, SpeculateMode
from h2o_stream.engine.engine import Engine
from h2o_stream.engine.events import Token
from h2o_stream.engine.grammar import Grammar
from h2o_stream.engine.speculation import Speculation, followers
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.native import library
from h2o_stream.runtime.model import RuntimeModel
from h2o_stream.serve.grammars import Grammars
from tests.test_native_batch import model  # noqa: F401 - a fixture

pytestmark = pytest.mark.skipif(library.loaded() is None, reason="there is no compiled library")

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


def same_states(one: Engine, other: Engine) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(numpy.array_equal(first[name], second[name]) for name in first)


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
    assert same_states(*engines)
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
        assert same_states(guessing, stepping)
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
    grammars = Grammars(*values)
    for engine in engines:
        engine.grammar = asyncio.run(grammars.make(SCHEMA, None)) if aside else Grammar(*values, SCHEMA)
    texts = ["".join(event.text for event in engine.decode()) for engine in engines]
    assert texts[0] == texts[1]
    assert texts[0].startswith("{")
    assert same_states(*engines)
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
