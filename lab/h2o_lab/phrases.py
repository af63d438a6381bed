"""Phrases that the laboratory's pages have in common."""

from __future__ import annotations

from collections.abc import Mapping

from h2o_stream.ui.pages import Record, best_named, listing

RECALL_NAMES: Mapping[str, str] = {"auto": "recall", "wide": "wide recall", "off": ""}
"""The modes of recall for people."""


def with_recall(name: str, record: Record) -> str:
    """A name of the record's policy, and the mode of recall unless it is off."""
    return " with ".join(filter(None, (name, RECALL_NAMES[record.get("recall", "off")])))


def share(values: Mapping[str, float], where: str, verb: str, what: str) -> str:
    """Shares by policy, the largest first: "At window 64, h2o keeps 71% of ... and sink 40%."."""
    if not values:
        return ""
    first, *others = [f"{name} {{}}{values[name]:.0%}" for name in best_named(values, smallest=False)]
    phrases = [f"{first.format(f'{verb} ')} {what}", *(other.format("") for other in others)]
    return f"{where}, {listing(phrases)}."


def counted(number: int, thing: str) -> str:
    """A number and what it counts, in the plural unless it is one."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
