"""The page of ``h2o-compare speed``."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from h2o_stream.base.memory import format_bytes
from h2o_stream.ui.pages import Chart, Curve, Page, Record, TableData, decoding, or_dash, weights

_HEADER = ("engine", "weights", "history", "prefill", "decode", "of floor", "cache", "process")


def page(run: Record, records: Sequence[Record]) -> Page:
    """Tokens per second by engine and history, or by task."""
    if "tasks" in run:
        return _of_tasks(run, records)
    bandwidth = median(record["bandwidth"] for record in records) if records else 0
    title = f"{run['model']}: tokens/s; memory read at {bandwidth / 1e9:.1f} GB/s"
    names = dict.fromkeys((record["name"], weights(record)) for record in records)
    curves = []
    for name, weights_name in names:
        of_engine = [record for record in records if (record["name"], weights(record)) == (name, weights_name)]
        x, y = [record["history"] for record in of_engine], [record["decode_tok_s"] for record in of_engine]
        curves.append(Curve(f"{name} {weights_name}", x, y))
    return Page(
        title,
        "of floor: decoding as a fraction of the bound set by reading weights and cache once per token",
        [TableData("", _HEADER, [_row(record) for record in records])],
        [
            Chart(
                "speed",
                f"Decoding as the history grows\n{title}",
                ("tokens seen", "decode, tokens/s"),
                curves,
                logarithmic="xy",
            )
        ],
        decoding(records),
    )


def _of_tasks(run: Record, records: Sequence[Record]) -> Page:
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
    header = ("task", "engine", "guesses", "tokens/s", "times", "a pass", "of floor")
    legend = "times: speed relative to that without guesses; of floor: the bound set by reading weights once per token"
    return Page(f"{run['model']}: replies with guesses and without", legend, [TableData("", header, rows)])


def _row(record: Record) -> list[str]:
    return [
        record["name"],
        weights(record),
        f"{record['history']:,}",
        f"{record['prefill_tok_s']:.0f}",
        f"{record['decode_tok_s']:.1f}",
        f"{record['of_floor']:.2f}",
        "-" if record["cache_bytes"] is None else format_bytes(record["cache_bytes"]),
        format_bytes(record["rss_bytes"]),
    ]
