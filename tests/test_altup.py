"""Several versions of the residual stream (Gemma 3n): however tokens come, and on however many threads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from h2o_stream import CacheConfig, attach
from h2o_stream.attachment.describe import describe
from h2o_stream.native import library, stepper
from h2o_stream.native.altup import Versions
from h2o_stream.native.description import DescriptionError
from tests.fixtures import with_exhaustive
from tests.more_families import MORE
from tests.test_native_families import model_of
from tests.test_native_prompt import streamed
from tests.test_native_step import EXACT, tokens_of
from tests.tolerance import relative_error

pytestmark = pytest.mark.skipif(library.loaded() is None, reason="there is no compiled library")
NAME = "Gemma 3n, three versions"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(stepper, "DENSE", set())
    with torch.no_grad(), attach(model_of(NAME), CacheConfig(window=16)) as cache:
        model_of(NAME)(tokens_of(1, 3), past_key_values=cache)
        assert cache.engine_note.startswith("native")
    return model_of(NAME)


@pytest.mark.parametrize(("rows", "count", "steps"), [(1, 560, 2), (8, 40, 6)])
def test_blocks_of_prompts_and_steps_of_many_streams(model: Any, rows: int, count: int, steps: int) -> None:
    """More tokens than a block, and more streams than a step multiplies one by one."""
    config, parts = CacheConfig(window=16, chunk=32), (count - steps, *[1] * (steps - 1))
    ours, kept = streamed(model, config, tokens_of(rows, count), "auto", parts=parts)
    theirs, wanted = streamed(model, config, tokens_of(rows, count), "eager", parts=parts)
    assert relative_error(ours, theirs) < EXACT
    assert kept == wanted


@pytest.mark.exhaustive
@pytest.mark.parametrize("rows", with_exhaustive([2], [1]))
def test_results_do_not_depend_on_the_number_of_threads(model: Any, rows: int) -> None:
    before, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            config = CacheConfig(window=16, chunk=16)
            results.append(streamed(model, config, tokens_of(rows, 40), "auto", parts=(30, 1, 1))[0])
    finally:
        torch.set_num_threads(before)
    assert all(result.equal(results[0]) for result in results)


def test_a_stream_that_is_undone_goes_on_as_before(model: Any) -> None:
    tokens = tokens_of(1, 60)
    with torch.no_grad(), attach(model, CacheConfig(window=16, chunk=16)) as cache:
        model(tokens[:, :30], past_key_values=cache)
        state = cache.state_dict()
        first = [model(part, past_key_values=cache).logits for part in tokens[:, 30:].split([20, *[1] * 10], 1)]
        cache.load_state_dict(state)
        again = [model(part, past_key_values=cache).logits for part in tokens[:, 30:].split([20, *[1] * 10], 1)]
    assert torch.cat(first, 1).equal(torch.cat(again, 1))


def test_a_router_without_a_norm_is_refused() -> None:
    model = copy.deepcopy(MORE[NAME]())
    model.model.layers[1].altup.router_norm = nn.Identity()
    with pytest.raises(DescriptionError, match="it has no altup_router_norm"):
        describe(model)


def test_too_many_versions_are_refused() -> None:
    versions = describe(MORE[NAME]()).versions
    assert versions is not None
    with pytest.raises(DescriptionError, match="there are 5 versions"):
        Versions(versions.first * 2, versions.last * 2, 0)
