"""How often replies were right, by kind of question and distance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from h2o_stream.compare.recall.facts import KINDS

_Answer = Mapping[str, Any]
"""The fields of an `Answer`, and its ``distance``."""


def rates_by_distance(answers: Sequence[_Answer], distances: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The rates of each kind at each distance that was asked at.

    Besides those of `_rates`: ``distance``; ``tokens``, the mean of the true distances; ``relative``, the right replies
    as a share of those at the shortest distance to the same questions, None if there were none.
    """
    shortest = min(distances, default=0)
    for kind in KINDS:
        near = _select(answers, kind, shortest)
        for distance in dict.fromkeys(distances):
            asked = _select(answers, kind, distance)
            if asked:
                rates = _rates(asked, _select(answers, "same", distance))
                yield {"kind": kind, "distance": distance, **rates, "relative": _ratio(asked, near)}


def chat_rates(answers: Sequence[_Answer], turns: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rates of each kind at the end of a chat.

    Besides those of `_rates`: ``turns``, the turns of talk about other things; ``turns_recalling``, the share of them
    before which passages were read again; ``first_turns_recalling``, the same of first turns, which refer to nothing.
    """
    of_turns = {
        "turns": len(turns),
        "turns_recalling": _share(turns, "recalling"),
        "first_turns_recalling": _share([turn for turn in turns if turn["first"]], "recalling"),
    }
    for kind in KINDS:
        if asked := [answer for answer in answers if answer["kind"] == kind]:
            yield {
                "kind": kind,
                **_rates(asked, [answer for answer in answers if answer["kind"] == "same"]),
                **of_turns,
            }


def _rates(asked: Sequence[_Answer], same: Sequence[_Answer]) -> dict[str, Any]:
    """What replies to questions of one kind have in common.

    Returns:
        ``tokens``: mean of `Answer.tokens`. ``questions``: their number. ``accuracy``, ``wrong`` and ``recalling``:
        shares of `Answer.right`, `wrong` and `recalling`. ``margin``: its mean in nats, None if nothing has one.
        ``recalled``: share of margins above 0. ``of_same``: right replies as a share of those to the same facts asked
        for in the same words, None if there were none.
    """
    margins = [answer["margin"] for answer in asked if answer["margin"] is not None]
    return {
        "tokens": round(fmean(answer["tokens"] for answer in asked), 1),
        "questions": len(asked),
        "accuracy": _share(asked, "right"),
        "wrong": _share(asked, "wrong"),
        "margin": fmean(margins) if margins else None,
        "recalled": fmean(margin > 0 for margin in margins) if margins else None,
        "recalling": _share(asked, "recalling"),
        "of_same": _ratio(asked, same),
    }


def _select(answers: Sequence[_Answer], kind: str, distance: int | None = None) -> list[_Answer]:
    return [answer for answer in answers if answer["kind"] == kind and answer.get("distance") == distance]


def _share(items: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return fmean(item[name] for item in items) if items else None


def _ratio(asked: Sequence[_Answer], reference: Sequence[_Answer]) -> float | None:
    """Right replies as a share of those in the reference, of what is in both."""
    common = {answer["id"] for answer in asked} & {answer["id"] for answer in reference}
    right, right_in_reference = (
        sum(answer["right"] for answer in answers if answer["id"] in common) for answers in (asked, reference)
    )
    return right / right_in_reference if right_in_reference else None
