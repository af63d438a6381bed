"""Steps of several caches at once: each stream as if it were alone, whatever the others hold and protect."""

from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from h2o_stream.config import CacheConfig
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.native import library
from h2o_stream.native.batch import BatchStepper, rules
from h2o_stream.native.stepper import Stepper
from h2o_stream.runtime.model import RuntimeModel, ServedRuntime
from h2o_stream.runtime.sources import ModelFile
from tests.family_models import GGUF, TEXT, written
from tests.fixtures import with_exhaustive
from tests.native_builds import needs_library
from tests.states import equal_states

pytestmark = needs_library


@pytest.fixture(scope="module")
def model(served_embedded: LoadedModel) -> RuntimeModel:
    """Those six layers whose heads retrieve most: matrices as large as of all thirty."""
    whole = served_embedded.model
    assert isinstance(whole, RuntimeModel)
    largest = [max(window.share for window in windows) for windows in whole.windows]
    layers = sorted(sorted(range(len(largest)), key=largest.__getitem__)[-6:])
    of = whole.description.layers, whole.windows, whole.sliding
    described, windows, sliding = ([values[layer] for layer in layers] for values in of)
    return replace(whole, description=replace(whole.description, layers=described), windows=windows, sliding=sliding)


def opened(model: RuntimeModel, number: int) -> ServedRuntime:
    """A stream of its own length, window, pins and tokens that go first."""
    served = model.serve(CacheConfig(window=(48, 64)[number % 2]))
    served.cache.pin(number, 2 * number)
    served.cache.evict_first(20, 20 + number)
    served.forward([5 + 11 * number + 7 * i for i in range(30 + 5 * number)])
    return served


@pytest.mark.every(2)
@pytest.mark.parametrize("count", [2, 9])
def test_together_as_alone(model: RuntimeModel, count: int) -> None:
    alone, together = ([opened(model, number) for number in range(count)] for _ in range(2))
    assert len({rules(served.stepper) for served in together}) == 1
    native = library.loaded()
    assert native is not None
    batch = BatchStepper(native, model.description)
    for step in range(6):
        tokens = [100 + step + 3 * number for number in range(count)]
        wanted = [served.forward([token]) for served, token in zip(alone, tokens, strict=True)]
        for served, token in zip(together, tokens, strict=True):
            served.cache.prepare(1)
            assert served.stepper.begin_step(numpy.array([token]))
        logits = batch.step([served.stepper for served in together])
        assert numpy.array_equal(logits, wanted)
    for one, other in zip(alone, together, strict=True):
        assert equal_states(one.state_dict(), other.state_dict())


SOME = ("Ministral 3", "Gemma 3", "Qwen3-Next", "Mixtral")


@pytest.mark.parametrize("name", with_exhaustive(SOME, [name for name in GGUF if name not in SOME]))
def test_each_family(name: str, tmp_path: Path) -> None:
    """Products of experts are rounded otherwise."""
    source = ModelFile(name, written(tmp_path, name), "float32")
    served, native = source.model(source.describe(print), ()), library.loaded()
    positions = "absolute" if served.refused_positions else "gap"
    streams = [served.serve(CacheConfig(window=48, positions=positions, budgets="equal")) for _ in range(4)]
    for number, stream in enumerate(streams):
        stream.forward(TEXT[number % 2 : 40 + 20 * (number % 2)])
    assert native is not None
    batch, alone, together = BatchStepper(native, served.description), streams[:2], streams[2:]
    for token in TEXT[60:64]:
        for stream in together:
            stream.cache.prepare(1)
            assert stream.stepper.begin_step(numpy.array([token]))
        wanted = numpy.array([stream.forward([token]) for stream in alone])
        found = batch.step([stream.stepper for stream in together])
        numpy.testing.assert_allclose(found, wanted, rtol=0, atol=2e-3 * abs(wanted).max())


def test_which_slots_are_filled_is_known_after_any_change(served_embedded: LoadedModel) -> None:
    """Steps do not count the slots of a cache that was full; one that grows or is loaded has empty slots again."""
    assert isinstance(served_embedded.model, RuntimeModel)
    served = served_embedded.model.serve(CacheConfig(window=48))

    def step() -> list[int]:
        served.forward([7])
        groups = served.cache.head_groups
        assert all(group.filled >= (group.token_indices[0] >= 0).sum(-1).max() for group in groups)
        return [group.num_slots - group.filled for group in groups]

    served.forward([5 + 7 * i for i in range(45)])
    empty = [step() for _ in range(4)]
    assert max(empty[-1]) > 1, "the window has grown"
    state = served.state_dict()
    for _ in range(200):
        last = step()
    assert max(last) == 0
    served.load_state_dict(state)
    assert step() == [max(count - 1, 0) for count in empty[-1]]


def test_other_rules_are_told_apart(model: RuntimeModel) -> None:
    config = CacheConfig(window=48)
    served = [model.serve(config), model.serve(CacheConfig("sink", window=48)), model.serve(CacheConfig(kv_bits=8))]
    for each in served:
        each.forward([5, 6, 7])
    assert len({rules(each.stepper) for each in served}) == 3


def test_streams_of_other_rules_in_turn(model: RuntimeModel) -> None:
    """What steps need for few bits is there when the first of them needed none."""
    native = library.loaded()
    assert native is not None
    batch, logits = BatchStepper(native, model.description), []
    for rule in (CacheConfig(window=64), CacheConfig(window=48, kv_bits=6)):
        alone, together = model.serve(rule), model.serve(rule)
        for served in (alone, together):
            served.forward([5 + 7 * i % 4001 for i in range(100)])
        together.cache.prepare(1)
        assert together.stepper.begin_step(numpy.array([100]))
        logits += [alone.forward([100]), batch.step([together.stepper])[0].copy()]
    assert numpy.array_equal(logits[0], logits[1])
    assert numpy.array_equal(logits[2], logits[3])


@pytest.mark.every(2)
@pytest.mark.parametrize(("steps", "prompts"), [(0, (21, 1, 40)), (2, (30,)), (4, (9, 70, 3))])
def test_prompts_beside_steps_as_alone(model: RuntimeModel, steps: int, prompts: tuple[int, ...]) -> None:
    """Prompts of any lengths, also of streams that have begun; others are stepped between their layers."""
    alone, together = ([opened(model, number) for number in range(steps + len(prompts))] for _ in range(2))
    alone[-1], together[-1] = (model.serve(CacheConfig(window=64)) for _ in range(2))
    native = library.loaded()
    assert native is not None
    batch = BatchStepper(native, model.description)
    for step in range(2):
        counts = (1,) * steps + prompts
        tokens = [[100 + step + 3 * number + i for i in range(count)] for number, count in enumerate(counts)]
        for served, part in zip((*alone, *together), tokens * 2, strict=True):
            served.cache.prepare(len(part))
        wanted = [served.forward(part) for served, part in zip(alone[:steps], tokens, strict=False)]
        ids = [numpy.array([part]) for part in tokens]
        for served, part in zip(alone[steps:], ids[steps:], strict=True):
            read = served.stepper.prompt(part, keep=1)
            assert read is not None
            wanted.append(read[0, 0])
        steppers = [served.stepper for served in together]
        assert all(map(Stepper.begin_step, steppers[:steps], map(numpy.ravel, ids[:steps])))
        plans = list(map(Stepper.begin_prompt, steppers[steps:], ids[steps:]))
        reading = batch.read(steppers[steps:], tokens[steps:], plans)
        assert [next(reading) for _ in range(3)] == [None] * 3
        stepped = batch.step(steppers[:steps]).copy()
        *layers, read_now = reading
        assert len(layers) == len(model.description.layers) - 4
        assert numpy.array_equal([*stepped, *read_now], wanted)
    for one, other in zip(alone, together, strict=True):
        assert equal_states(one.state_dict(), other.state_dict())


def test_addresses_that_were_bound_anew_are_told_apart(model: RuntimeModel) -> None:
    """Also where a cache has the place in memory of one that is gone, or is bound for a longer prompt."""
    bindings: list[int] = []
    for _ in range(2):
        served = model.serve(CacheConfig(window=48, chunk=0))
        for length in (3, 40):
            served.forward(list(range(5, 5 + length)))
            bindings.append(served.stepper.binding)
        del served
    assert len(set(bindings)) == 4
