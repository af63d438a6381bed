"""The page of ``h2o-compare tasks --suite book``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from h2o_lab.phrases import share, with_recall
from h2o_stream.ui.pages import Page, Record, TableData, curve_name, label, or_dash


def page(run: Record, records: Sequence[Record]) -> Page:
    """A row for each policy and mode of recall, a column for each length."""
    lengths = list(dict.fromkeys(record["length"] for record in records))
    rows: dict[tuple[str, ...], dict[int, Record]] = {}
    for record in records:
        rows.setdefault((with_recall(label(record), record), or_dash(record["window"])), {})[record["length"]] = record
    nothing = records[0]["nothing"]
    cells = [["no book", "-", *(_cell(nothing) for _ in lengths)]]
    cells += [[*names, *(_cell(found.get(length)) for length in lengths)] for names, found in rows.items()]
    header = [f"{length:,} tokens" if length else "whole book" for length in lengths]
    longest = lengths[-1]
    shares = {with_recall(curve_name(r), r): r["accuracy"] for r in records if r["length"] == longest}
    return Page(
        f"{run['model']}, {run['dtype']}: {nothing['questions']} questions about the manual of Python, in other words",
        "right replies, F1 of their words, and what the answer's log-probability gains over no book in nats, after the "
        "part of so many tokens that has the answer was read once",
        [TableData("", ["policy", "window", *header], cells)],
        verdict=share(shares, f"After {'' if longest else 'the '}{header[-1]}", "gives", "right replies"),
    )


def _cell(rates: Mapping[str, Any] | None) -> str:
    return "-" if rates is None else f"{rates['accuracy']:.0%} {rates['f1']:.2f} {rates['gain']:+.2f}"
