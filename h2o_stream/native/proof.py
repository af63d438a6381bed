"""The proof that native steps compute what the model's own forward does: both take the same few tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from h2o_stream.cache.notes import LONG_S, read_note, write_note
from h2o_stream.cache.state import model_digest
from h2o_stream.cache.window import H2OCache
from h2o_stream.errors import ConfigError
from h2o_stream.native import library
from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.description import Description

_PROMPT, _STEPS = 6, 3
"""Tokens of the proof: a prompt, and those that follow one by one."""

_TOLERANCE = {MatrixKind.FLOAT32: 1e-4} | dict.fromkeys(set(MatrixKind) - {MatrixKind.FLOAT32}, 0.08)
"""Root mean square of the differences of logits, as a share of that of the logits, by how weights are held."""

_ROUNDINGS = 3
"""How many times further than a rounded embedding a native step may be off."""

_MOST_TOLERANCE = 0.5
"""Never tolerated, whatever rounding does."""

_proved: WeakKeyDictionary[Any, set[tuple[Any, ...]]] = WeakKeyDictionary()
"""What has been proved of a model: addresses of its weights, and how the cache places tokens."""


def proved(model: Any, cache: H2OCache, description: Description, step: Callable[[Tensor], Tensor | None]) -> str:
    """Why native steps differ from the model's own forward, or nothing; the cache is empty afterwards.

    What took long is remembered in the user's cache folder, for the same weights, library and versions.

    Args:
        model: of transformers; its forward is its own.
        cache: takes its tokens.
        description: of the model.
        step: a native step for tokens [1, 1], which gives logits [1, 1, V], or None where it cannot serve.
    """
    plan = cache.plan
    weights = (tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))
    here = (plan.positions, plan.kv_bits, *weights)
    if here in _proved.setdefault(model, set()):
        return ""
    versions = [version(name) for name in ("h2o-stream", "transformers", "torch")]
    key = f"{model_digest(model)} {model.dtype} {plan.positions} {plan.kv_bits} {library.identity()} {versions}"
    if read_note("proved", key) is None:
        begun = time.perf_counter()
        if trouble := _difference(model, cache, description, step):
            return trouble
        if time.perf_counter() - begun > LONG_S:
            write_note("proved", key, True)
    _proved[model].add(here)
    return ""


def tolerance_of(description: Description) -> float:
    """How far logits of a native step may be off where rounding is not multiplied, see `error_of`."""
    return max(_TOLERANCE[matrix.kind] for matrix in (*description.matrices, description.embedding))


def error_of(ours: Tensor, theirs: Tensor) -> float:
    """Root mean square of the differences, as a share of that of `theirs`."""
    ours, theirs = ours.float().flatten(), theirs.float().flatten()
    return float((ours - theirs).norm() / theirs.norm().clamp_min(torch.finfo(torch.float32).tiny))


@torch.no_grad()
def _difference(model: Any, cache: H2OCache, description: Description, step: Callable[[Tensor], Tensor | None]) -> str:
    """See `proved`.

    A difference may be rounding. Where it is large it is tried how far rounding goes in this model: random weights
    and many layers multiply it.
    """

    def logits(native: bool) -> Tensor | None:
        seeded = torch.Generator().manual_seed(0)
        tokens = torch.randint(description.embedding.rows, (1, _PROMPT + _STEPS), generator=seeded)
        cache.reset()
        found = []
        for number, part in enumerate((tokens[:, :_PROMPT], *tokens[:, _PROMPT:].split(1, 1))):
            kwargs = {"input_ids": part, "past_key_values": cache, "use_cache": True}
            cache.prepare_forward(kwargs)
            given = step(part) if native and number else model.forward(**kwargs).logits[:, -1:]
            if given is None:
                return None
            found.append(given)
        return torch.cat(found[1:])

    try:
        theirs, ours = logits(False), logits(True)
        assert theirs is not None
        if ours is None:
            return "the library cannot serve these slots"
        error, tolerance = error_of(ours, theirs), tolerance_of(description)
        if not error < tolerance:
            with _rounded(model.get_input_embeddings()):
                rounded = logits(False)
            assert rounded is not None
            tolerance = min(max(tolerance, _ROUNDINGS * error_of(rounded, theirs)), _MOST_TOLERANCE)
    except ConfigError as refusal:  # of this short prompt, or of any: the first real one will tell
        return str(refusal)
    finally:
        cache.reset()
    return "" if error < tolerance else f"its logits are off by {error:.1e} of their rms, {tolerance:.0e} is rounding"


@contextmanager
def _rounded(embedding: Any) -> Iterator[None]:
    """Let an embedding give its rows rounded up or down by chance, by as much as bfloat16 does."""
    seeded = torch.Generator().manual_seed(0)

    def rounded(module: Any, inputs: Any, rows: Tensor) -> Tensor:
        ups = torch.randint(2, rows.shape, generator=seeded) * 2 - 1
        return (rows.float() * (1 + ups * 2.0**-8)).to(rows.dtype)

    handle = embedding.register_forward_hook(rounded)
    try:
        yield
    finally:
        handle.remove()
