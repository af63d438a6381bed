"""The page of ``h2o-compare throughput``."""

from __future__ import annotations

from collections.abc import Sequence

from h2o_stream.base.memory import format_bytes
from h2o_stream.ui.pages import Chart, Curve, Page, Record, TableData, a_few, best_named, listing, or_dash

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


def shape_of(record: Record) -> str:
    """Tokens of prompt and reply."""
    return f"{record['prompt']}+{record['new']}"


def times_full(records: Sequence[Record]) -> str:
    """Throughput of the largest batches in multiples of the full cache's, by shape."""
    largest = [record for record in records if record["largest"]]
    full = {shape_of(record): record["tok_s"] for record in largest if record["policy"] == "full"}
    sentences = []
    for shape in a_few(list(full)):
        speeds = {record["policy"]: record["tok_s"] for record in largest if shape_of(record) == shape}
        names = [name for name in best_named(speeds, smallest=False) if name != "full"]
        first, *others = [f"{name} {{}}{speeds[name] / full[shape]:.2g} times" for name in names] or [""]
        if first:
            phrases = [f"{first.format('generates ')} the tokens/s of a full cache in the same memory"]
            sentences.append(f"At {shape}, {listing([*phrases, *(other.format('') for other in others)])}.")
    return " ".join(sentences)
