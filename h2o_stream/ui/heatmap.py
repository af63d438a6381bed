"""Shows which words the cache still holds: the warmer the color, the more heads hold them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from h2o_stream.session.retention import RetainedTurn

HEAT = ((0.1, "bright_black"), (0.3, "blue"), (0.6, "cyan"), (0.9, "yellow"), (1.0, "bold red"))
"""Upper limits of the share of heads, and the style of text held by so many."""


def heatmap(passages: Sequence[RetainedTurn], heads: str) -> Text:
    """What is left of every turn, oldest first. Gaps are shown as dots.

    Args:
        passages: what the cache holds.
        heads: which heads were examined, for the legend.
    """
    shown = Text()
    for retained in passages:
        passage = retained.passage
        thinking = "" if retained.thinking is None else f", {_percent(retained.thinking)} of its thinking"
        shown.append(f"turn {passage.turn} · {_percent(retained.share)} kept{thinking}\n", "bold")
        previous = passage.start - 1
        for piece in retained.pieces:
            if piece.index != previous + 1:
                shown.append(" … " if previous >= passage.start else "… ", "dim")
            style = next((style for limit, style in HEAT if piece.share <= limit), HEAT[-1][1])
            style += " underline" if piece.recalled else ""
            shown.append(piece.text.replace("\n", "↵ ").replace("\t", " "), style)
            previous = piece.index
        if previous != passage.stop - 1:
            shown.append(" …", "dim")
        shown.append("\n")
    shown.append(f"held by ... of the heads of {heads}: ", "dim")
    for limit, style in HEAT:
        shown.append(f" to {limit:.0%} ", style)
    if any(piece.recalled for retained in passages for piece in retained.pieces):
        shown.append("\nunderlined", "dim underline").append(": read again by recall", "dim")
    return shown


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 or not share else "<1%"
