"""The page of ``h2o-compare speculation``."""

from __future__ import annotations

from collections.abc import Sequence

from h2o_stream.ui.pages import Page, Record, TableData, or_dash

_HEADER = ("task", "engine", "guesses", "tokens/s", "times", "a pass", "of floor")


def page(run: Record, records: Sequence[Record]) -> Page:
    """What guesses gain, by task and engine."""
    plain = {(x["task"], x["engine"]): x["decode_tok_s"] for x in records if x["speculate"] == "off"}
    rows = [
        [
            record["task"],
            record["engine"],
            record["speculate"],
            f"{record['decode_tok_s']:.1f}",
            f"{record['decode_tok_s'] / plain[record['task'], record['engine']]:.2f}",
            or_dash(record["tokens_per_pass"]),
            or_dash(record["of_floor"]),
        ]
        for record in records
    ]
    legend = "times: speed relative to that without guesses; of floor: the bound set by reading weights once per token"
    return Page(f"{run['model']}: replies with guesses and without", legend, [TableData("", _HEADER, rows)])
