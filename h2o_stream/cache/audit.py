"""Checks the invariants of slots, on arrays: finds bookkeeping that cannot be right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy

from h2o_stream.cache.slots import Slots
from h2o_stream.cache.state import Array
from h2o_stream.errors import H2OStreamError


def audit(groups: Sequence[Slots]) -> float:
    """The largest score of the layers that follow the plan (`evicting_groups`), under a policy that sums scores.

    Raises:
        H2OStreamError: something is wrong, saying what and where.
    """
    largest = 0.0
    for number, group in enumerate(groups):
        num_sinks = group.plan.sinks
        check_slots(group, name := f"slots {number}")
        index, scores, seen = _entries(group, "index", "scores", "seen")
        scores, sinks = scores[index >= 0], (index >= 0) & (index < num_sinks)
        _must(group, name, (scores >= 0).all(), "a score is negative or no number")
        expected = seen[..., 0].clip(max=num_sinks)
        _must(group, name, (sinks.sum(-1) == expected).all(), "a sink is not held")
        largest = max(largest, float(scores.max()))
    return largest


def check_slots(group: Slots, name: str) -> None:
    """Raise H2OStreamError if something is wrong, under any policy, in a group with this name for messages."""
    index, rank, scores, free, seen = _entries(group, "index", "rank", "scores", "free", "seen")
    index, rank, slots, lengths = (
        index.astype(numpy.int64),
        rank.astype(numpy.int64),
        group.num_slots,
        group.tokens.lengths,
    )
    is_token, limits = index >= 0, numpy.array([*map(group.schedule.held, lengths)])[:, None]

    def must(holds: Any, what: str) -> None:
        _must(group, name, holds, what)

    on_device = tuple(seen.ravel().tolist())
    must(on_device == lengths, f"{list(lengths)} tokens were counted here, {list(on_device)} on the device")
    counts = is_token.sum(-1)
    must((counts == limits).all(), f"{counts.tolist()} tokens are held, {limits[:, 0].tolist()} should be")
    newest_first = (-index).argsort(-1)
    ordered, ranks = (numpy.take_along_axis(array, newest_first, -1) for array in (index, rank))
    must(((numpy.diff(ordered) < 0) | (ordered[..., 1:] < 0)).all(), "a token is held twice")
    must((ordered[..., :1] == seen - 1).all() and (index >= -1).all(), "the newest token is not held")
    must((ranks == numpy.arange(slots))[ordered >= 0].all(), "ranks are not the order of the tokens")
    must(((rank >= limits[..., None]) & (rank <= 2 * slots))[~is_token].all(), "an empty slot has the rank of a token")
    must(((free >= group.exact) & (free < slots)).all(), "the free slot is none of them")
    must((numpy.take_along_axis(index, free, -1) < 0).all(), "the free slot holds a token")
    must(numpy.isfinite(scores[is_token]).all(), "a score is negative or no number")
    must((scores[~is_token] == -numpy.inf).all(), "an empty slot has a score")
    if "long_term_scores" in group.tensors():
        (long_term_scores,) = _entries(group, "long_term_scores")
        must(numpy.isfinite(long_term_scores[is_token]).all(), "a long-term score is no number")
    last = int(numpy.flatnonzero(is_token.any((0, 1))).max(initial=-1))
    filled = group.filled > last or group.exact > 0
    must(group.filled <= slots and filled, "a slot that is in use counts as empty")


def _entries(group: Slots, *names: str) -> Iterator[Array]:
    """Bookkeeping of a group by name: views of what is on the CPU."""
    tensors = group.tensors()
    for name in names:
        array = tensors[name]
        yield numpy.asarray(array.cpu() if hasattr(array, "cpu") else array)


def _must(group: Slots, name: str, holds: Any, what: str) -> None:
    if not holds:
        raise H2OStreamError(f"after {max(group.tokens.lengths):,} tokens, {name}: {what}")
