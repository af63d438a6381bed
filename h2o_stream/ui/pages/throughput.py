"""The page of ``h2o-compare throughput``."""

from __future__ import annotations

from collections.abc import Sequence

from h2o_stream.ui.format import format_bytes
from h2o_stream.ui.pages import Chart, Curve, Page, Record, TableData, or_dash, shape_of, times_full

_HEADER = ("shape", "policy", "window", "batch", "cache", "tokens/s", "seconds", "of full")


def page(run: Record, records: Sequence[Record]) -> Page:
    """Tokens per second of whole batches, by shape and policy."""
    full = {shape_of(record): record["tok_s"] for record in records if record["policy"] == "full"}
    budget = format_bytes(run["cache_budget"])
    title = f"{run['model']}, cache of {budget}: generated tokens/s of the batch, prompts included"
    curves = []
    for policy in dict.fromkeys(record["policy"] for record in records):
        largest = [record for record in records if record["policy"] == policy and record["largest"]]
        curves.append(Curve(policy, [record["new"] for record in largest], [record["tok_s"] for record in largest]))
    return Page(
        title,
        "batch: as many rows as fit, or as many as fit with a full cache",
        [TableData("", _HEADER, [_row(record, full.get(shape_of(record))) for record in records])],
        [Chart("throughput", f"Largest batches\n{title}", ("tokens generated", "tokens/s"), curves, logarithmic="x")],
        times_full(records),
    )


def _row(record: Record, full: float | None) -> list[str]:
    return [
        shape_of(record),
        record["policy"],
        or_dash(record["window"]),
        f"{record['batch']}" if record["largest"] else f"{record['batch']} (as full)",
        format_bytes(record["cache_bytes"]),
        f"{record['tok_s']:.1f}",
        f"{record['seconds']:.1f}",
        f"{record['tok_s'] / full:.2f}" if full else "-",
    ]
