"""The heat strip: the words that the cache still holds, the warmer the more heads hold them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from h2o_stream.session.holdings import HeldPassage

HEAT = ((0.1, "bright_black"), (0.3, "blue"), (0.6, "cyan"), (0.9, "yellow"), (1.0, "bold red"))
"""Upper ends of the shares of heads, and how text held by so many looks."""


def strip(passages: Sequence[HeldPassage], of: str) -> Text:
    """Every turn with what is left of it, oldest first; gaps are shown as dots.

    Args:
        passages: what is held.
        of: whose heads these are, for the legend.
    """
    shown = Text()
    for held in passages:
        shown.append(f"turn {held.passage.turn} · {_percent(held.share)} kept\n", "bold")
        before = held.passage.start - 1
        for piece in held.pieces:
            if piece.index != before + 1:
                shown.append(" … " if before >= held.passage.start else "… ", "dim")
            shown.append(_flat(piece.text), _style(piece.share))
            before = piece.index
        if before != held.passage.stop - 1:
            shown.append(" …", "dim")
        shown.append("\n")
    shown.append(f"held by ... of the heads of {of}: ", "dim")
    for limit, style in HEAT:
        shown.append(f" to {limit:.0%} ", style)
    return shown


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 or not share else "<1%"


def _style(share: float) -> str:
    return next((style for limit, style in HEAT if share <= limit), HEAT[-1][1])


def _flat(text: str) -> str:
    """On one line; a line break is a space and its sign."""
    return text.replace("\n", "↵ ").replace("\t", " ")
