"""Every family that runs natively: prompts and steps with evictions, also in bfloat16."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from h2o_stream import CacheConfig, attach
from h2o_stream.attachment.describe import describe
from h2o_stream.native import stepper
from h2o_stream.native.abi import MatrixKind
from tests.families import FAMILIES, nudged
from tests.family_models import MODELS
from tests.fixtures import thinned, with_exhaustive
from tests.more_families import MORE, OTHERS
from tests.native_builds import needs_library
from tests.native_streams import EXACT, streamed, tokens_of
from tests.tolerance import relative_error, rms

pytestmark = needs_library


@functools.cache
def model_of(name: str) -> Any:
    return nudged(DESCRIBED[name]())


DESCRIBED: dict[str, Callable[[], Any]] = {
    **{family.name: family.make for family in FAMILIES if family.native},
    **{f"{name}, file": model.make for name, model in MODELS.items()},
    **OTHERS,
    **MORE,
}


DELTA_RULE = [family.name for family in FAMILIES if "delta rule" in family.special]
"""Whose norms amplify the rounding of outputs that nearly cancel, in transformers as here."""

STREAMED = [
    *((family.name, positions) for family in FAMILIES if family.native for positions in family.positions),
    *itertools.product(MORE, ("gap", "absolute")),
    *((name, "absolute" if name.startswith("OPT") else "gap") for name in OTHERS if "StableLM" not in name),
]


@pytest.mark.every(10)
@pytest.mark.parametrize(("name", "positions", "rows"), thinned(
    ((*stream, rows) for stream in STREAMED for rows in (1, 3)),
    lambda name, positions, rows: (positions == "gap") == (rows == 1) and (rows == 1 or name in MORE),
))  # fmt: skip
def test_prompts_and_steps(name: str, positions: Any, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native library computes what the model does, with evictions, and keeps the same tokens."""
    monkeypatch.setattr(stepper, "DENSE", set())
    taken: list[tuple[str, tuple[int, ...]]] = []
    for kind in ("step", "prompt"):
        monkeypatch.setattr(stepper.Stepper, kind, recorded(getattr(stepper.Stepper, kind), kind, taken))
    model, tokens = model_of(name), tokens_of(rows, 40)
    if name in ("HunYuan MoE", "Ministral 3"):
        positions = "absolute"  # more than RoPE depends on positions
    if positions == "absolute" and "LongRoPE" in name:
        pytest.skip("its frequencies depend on the text's length, so it runs eagerly")
    config = CacheConfig("h2o", window=12, chunk=8, span=18, positions=positions)
    ours, kept = streamed(model, config, tokens, "auto", parts=(17, 1, 9, 1, 1, 1, 1, 1))
    assert taken[-9:] == [*(("prompt", 17), ("step", 1), ("prompt", 9)), *[("step", 1)] * 5, ("prompt", 8)]
    theirs, wanted = streamed(model, config, tokens, "eager", parts=(17, 1, 9, 1, 1, 1, 1, 1))
    assert relative_error(ours, theirs) < (5 * EXACT if name in DELTA_RULE else EXACT)
    assert kept == wanted


@pytest.mark.parametrize("third", with_exhaustive([0], [1, 2]))
def test_in_bfloat16(third: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native library rounds other intermediate results than transformers does."""
    monkeypatch.setattr(stepper, "DENSE", set())
    for family in [family for family in FAMILIES if family.native][third::3]:
        model, tokens = nudged(family.make()).bfloat16(), tokens_of(1, 30)
        expected, embedding = model(tokens).logits.float(), describe(model).embedding
        assert embedding.kind == MatrixKind.BFLOAT16
        with attach(model, CacheConfig("recent", window=32, positions=family.positions[0])) as cache:
            assert cache.engine_note.startswith("native"), family.name
            logits = [model(part, past_key_values=cache).logits for part in tokens.split([20, *[1] * 10], 1)]
        errors = (torch.cat(logits, 1).float() - expected).square().mean(-1).sqrt()
        assert errors.median() < 0.1 * rms(expected), family.name  # rounding sends some tokens to other experts


def recorded(method: Any, kind: str, taken: list[Any]) -> Any:
    """A method of the stepper that notes what it takes."""

    def wrapped(self: Any, ids: Any, *args: Any) -> Any:
        logits = method(self, ids, *args)
        if logits is not None:
            taken.append((kind, ids.shape[1] if ids.ndim == 2 else 1))
        return logits

    return wrapped
