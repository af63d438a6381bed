"""The page of ``h2o-compare speed``."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from h2o_stream.base.memory import format_bytes
from h2o_stream.ui.pages import Chart, Curve, Page, Record, TableData, listing

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


def decoding(records: Sequence[Record]) -> str:
    """How fast ours decodes at the longest history that all engines reached, beside the others."""
    ours = [record for record in records if record["engine"] == "h2o-stream" and record["policy"] == "h2o"]
    common = set.intersection(*(_histories(records, name) for name in {record["name"] for record in records}))
    if not (ours and common):
        return ""
    history = max(common)
    fastest: dict[str, Record] = {}
    for record in sorted(records, key=lambda record: float(record["decode_tok_s"])):
        if record["history"] == history:
            fastest[record["name"]] = record
    name = ours[0]["name"]
    speeds, our_weights = {other: record["decode_tok_s"] for other, record in fastest.items()}, weights(fastest[name])
    ratios = [
        f"{speeds[name] / speeds[other]:.2g} times {other}'s"
        + ("" if weights(record) == our_weights else f" ({weights(record)})")
        for other, record in fastest.items()
        if other != name and speeds[other]
    ]
    compared = f", {listing(ratios)}" if ratios else ""
    return f"After {history:,} tokens, {name} decodes {speeds[name]:.3g} tokens/s{compared}."


def weights(record: Record) -> str:
    """In what form an engine holds the weights."""
    ours = record["engine"] == "h2o-stream" and record["quantize"] != "none"
    return str(record["quantize"] if ours else record["dtype"])


def _histories(records: Sequence[Record], name: str) -> set[int]:
    return {record["history"] for record in records if record["name"] == name}
