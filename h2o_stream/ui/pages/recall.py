"""The page of ``h2o-compare recall``."""

from __future__ import annotations

from collections.abc import Sequence

from h2o_stream.ui.pages import Chart, Curve, Page, Record, TableData, curve_name, label, or_dash, stem


def page(run: Record, records: Sequence[Record]) -> Page:
    """Margins by policy and distance."""
    distances = run["distances"]
    width = len(distances)
    policies = [records[start : start + width] for start in range(0, len(records), width)]
    header = [
        "policy",
        "window",
        *(f"{record['distance']:,} ({record['facts']})" for record in (policies[0] if policies else ())),
    ]
    rows = [[label(group[0]), or_dash(group[0]["window"]), *map(_cell, group)] for group in policies]
    curves = [
        Curve(
            curve_name(group[0]),
            [record["distance"] for record in group if record["recalled"] is not None],
            [record["recalled"] for record in group if record["recalled"] is not None],
            label(group[0]),
        )
        for group in policies
    ]
    title = f"{run['model']}, {run['tokens']:,} tokens of {stem(run['text'])}: facts planted and asked for later"
    return Page(
        title,
        "mean margin of the right word in nats, and how often it is the likeliest; in brackets: facts that the full "
        "cache can tell, others do not count",
        [TableData("tokens between the fact and the question", header, rows)],
        [
            Chart(
                "recall",
                f"Recalled, by distance\n{title}",
                ("tokens since the fact", "recalled"),
                curves,
                (-0.02, 1.02),
                "x",
            )
        ],
    )


def _cell(record: Record) -> str:
    return "-" if record["margin"] is None else f"{record['margin']:+.2f} {record['recalled']:4.0%}"
