"""Streams through native code and through torch, to compare: logits, tokens kept, and what native code takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_stream import CacheConfig, attach
from h2o_stream.cache.audit import check_slots
from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.cache.policies import make_policy
from h2o_stream.native import stepper
from h2o_stream.native.slots import POLICIES
from tests.families import RULES, Family
from tests.tolerance import relative_error

EXACT = 1e-4
"""Largest float32 difference relative to the RMS of the logits."""

NATIVE = {name: rule for name, rule in RULES.items() if make_policy(CacheConfig(name).plan()).rule in POLICIES}
"""The policies that the library implements."""


def exact(family: Family) -> float:
    """`EXACT`, or more where a norm amplifies the rounding of outputs that nearly cancel, in transformers as here."""
    return 5 * EXACT if "delta rule" in family.special else EXACT


def tokens_of(rows: int, count: int) -> Tensor:
    return torch.randint(3, 64, (rows, count), generator=torch.Generator().manual_seed(rows))


def one_by_one(count: int, prompt: int = 30) -> tuple[int, ...]:
    """The parts of so many tokens: a prompt, then single ones; without the last."""
    return (prompt, *[1] * (count - prompt - 1))


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """The shapes of the prompts that run natively."""
    shapes: list[tuple[int, int]] = []

    def recorded(self: Any, ids: Any, keep: int = 0, prompt: Any = stepper.Stepper.prompt) -> Any:
        logits = prompt(self, ids, keep)
        if logits is not None:
            shapes.append(ids.shape)
        return logits

    monkeypatch.setattr(stepper.Stepper, "prompt", recorded)
    return shapes


@pytest.fixture
def dense_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models in float32 take the native route, too, which compares exactly."""
    monkeypatch.setattr(stepper, "DENSE", set())


def streamed(
    model: Any,
    config: CacheConfig,
    tokens: Tensor,
    engine: Any,
    *,
    parts: Sequence[int] = (17, 1),
    begin: Callable[[H2OCache], None] = lambda cache: None,
    mask: Tensor | None = None,
) -> tuple[Tensor, list[Any]]:
    """Logits [B, Q, V] of a stream in parts, the rest being the last one, and what each layer keeps.

    `begin` gets the cache after the first part, whose logits are left out if it is padded.
    """
    with torch.no_grad(), attach(model, config, engine=engine) as cache:
        assert cache.engine_note.startswith("native" if engine == "auto" else "eager"), cache.engine_note
        logits = []
        for number, part in enumerate(tokens.split([*parts, tokens.shape[1] - sum(parts)], 1)):
            logits.append(model(part, attention_mask=None if number else mask, past_key_values=cache).logits)
            if number == 0:
                begin(cache)
            for group in cache.head_groups:
                check_slots(group, f"slots after part {number}")
        kept = [cache.kept(layer).tolist() for layer in range(len(cache.layers))]
        return torch.cat(logits[0 if mask is None else 1 :], 1), kept


def assert_same(
    model: Any, config: CacheConfig, tokens: Tensor, taken: list[Any] | None = None, largest: float = EXACT, **how: Any
) -> list[Any]:
    """Both engines give the same logits and keep the same tokens, which are returned.

    With `taken`, the native one has taken the last part as a prompt.
    """
    ours, kept = streamed(model, config, tokens, "auto", **how)
    assert not taken or taken[-1] == (len(tokens), tokens.shape[1] - sum(how.get("parts", (17, 1))))
    theirs, wanted = streamed(model, config, tokens, "eager", **how)
    assert relative_error(ours, theirs) < largest
    assert kept == wanted
    return kept
