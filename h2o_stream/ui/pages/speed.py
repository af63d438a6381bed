"""The page of ``h2o-compare speed``."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from h2o_stream.base.memory import format_bytes
from h2o_stream.ui.pages import Chart, Curve, Page, Record, TableData, decoding, weights

_HEADER = ("engine", "weights", "history", "prefill", "decode", "of floor", "cache", "process")


def page(run: Record, records: Sequence[Record]) -> Page:
    """Tokens per second by engine and history."""
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
