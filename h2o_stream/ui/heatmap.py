"""Shows which words the cache still holds: the warmer the color, the more heads hold them. And why a word is gone."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from h2o_stream.cache.worths import Holding
from h2o_stream.session.retention import RetainedTurn
from h2o_stream.session.why import Explanation, Kept
from h2o_stream.ui.terminal import one_line

HEAT = ((0.1, "bright_black"), (0.3, "blue"), (0.6, "cyan"), (0.9, "yellow"), (1.0, "bold red"))
"""Upper limits of the share of heads, and the style of text held by so many."""


def heatmap(turns: Sequence[RetainedTurn], heads: str) -> Text:
    """What is left of every turn, oldest first. Gaps are shown as dots."""
    shown = Text()
    for retained in turns:
        span = retained.span
        thinking = "" if retained.thinking is None else f", {_percent(retained.thinking)} of its thinking"
        shown.append(f"turn {span.turn} · {_percent(retained.share)} kept{thinking}\n", "bold")
        previous = span.start - 1
        for piece in retained.pieces:
            if piece.index != previous + 1:
                shown.append(" … " if previous >= span.start else "… ", "dim")
            style = next((style for limit, style in HEAT if piece.share <= limit), HEAT[-1][1])
            style += " underline" if piece.recalled else ""
            shown.append(piece.text.replace("\n", "↵ ").replace("\t", " "), style)
            previous = piece.index
        if previous != span.stop - 1:
            shown.append(" …", "dim")
        shown.append("\n")
    shown.append(f"held by ... of the heads of {heads}: ", "dim")
    for limit, style in HEAT:
        shown.append(f" to {limit:.0%} ", style)
    if any(piece.recalled for retained in turns for piece in retained.pieces):
        shown.append("\nunderlined", "dim underline").append(": read again by recall", "dim")
    return shown


def explanation(place: Explanation) -> Text:
    """What became of a word at one place, in a paragraph."""
    head, fate = f"turn {place.turn} · {one_line(place.text)}\n  ", place.fate
    if isinstance(fate, Kept):
        sentence = f"{_held(fate.now, place.num_heads)}; the least that stays there is worth {fate.now.least:.3g}"
    elif fate.turn is None:
        sentence = f"gone after turn {fate.since} or before; states of earlier turns are not kept"
    elif fate.before is None:
        sentence = f"gone in turn {fate.turn}, in which it was said"
    else:
        before = _held(fate.before, place.num_heads)
        sentence = (
            f"gone in turn {fate.turn}. Before: {before}, the least that stayed {fate.before.least:.3g}; "
            f"after: the least that stayed there {fate.needed:.3g}"
        )
    return Text.assemble((head, "bold"), sentence)


def _held(holding: Holding, num_heads: int) -> str:
    """By how many heads, in which roles, and the worth."""
    roles = ", ".join(f"{role} in {count}" for role, count in holding.roles.items())
    return f"held by {len(holding.heads)} of {num_heads} heads ({roles}), worth {holding.worth:.3g}"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 or not share else "<1%"
