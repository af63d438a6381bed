"""What the answers to the questions of a task have in common: accuracy, margins, and what a policy keeps of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy
from numpy.typing import NDArray

from h2o_stream.compare.nll import ratio_interval

_Answers = Sequence[Mapping[str, Any]]
"""`Answer`s as dicts, with ``item``."""


def rates(answers: _Answers, nothing: _Answers, full: _Answers | None) -> dict[str, Any]:
    """The rates of a policy on a task.

    Margin recovery is (m - n) / (f - n), where m, f and n are the mean margins of the policy, of the full cache, and of
    a cache that never saw the context. Intervals are bootstraps over items, whose questions belong together.

    Args:
        answers: under the policy.
        nothing: answers to the same questions without the context.
        full: answers to the same questions with the full cache; None if it was not asked.

    Returns:
        ``accuracy``: mean score. ``margin``: mean in nats; ``margins``: by question. ``margin_nothing`` and
        ``margin_full``. ``recovery``, None without a full cache or if its margin is not above that of nothing, and
        ``recovery_interval``, its 95% interval. ``to_full``: mean difference of the margins and its 95% interval, None
        for the full cache.
    """
    ours, floor = _by_item(answers), _by_item(nothing)
    rated: dict[str, Any] = {
        "accuracy": fmean(answer["score"] for answer in answers),
        "margin": float(ours.mean()),
        "margins": [fmean(margins) for margins in zip(*_margins(answers), strict=True)],
        "margin_nothing": float(floor.mean()),
        "margin_full": None,
        "recovery": None,
        "recovery_interval": None,
        "to_full": None,
    }
    if full is None:
        return rated
    most = _by_item(full)
    rated["margin_full"] = float(most.mean())
    if rated["margin_full"] > rated["margin_nothing"]:
        recovery = ratio_interval(ours - floor, most - floor)
        rated |= {"recovery": recovery.mean, "recovery_interval": [recovery.low, recovery.high]}
    if answers is not full:
        rated["to_full"] = ratio_interval(ours - most, numpy.ones_like(most))._asdict()
    return rated


def _by_item(answers: _Answers) -> NDArray[numpy.float64]:
    """[items], the mean margin of each item's questions."""
    return numpy.array([fmean(margins) for margins in _margins(answers)])


def _margins(answers: _Answers) -> Iterable[list[float]]:
    """The margins of each item's questions."""
    items: dict[int, list[float]] = {}
    for answer in answers:
        items.setdefault(answer["item"], []).append(answer["margin"])
    return items.values()
