"""The page of ``h2o-compare nll``."""

from __future__ import annotations

from collections.abc import Sequence

from h2o_stream.ui.pages import Chart, Curve, Page, Record, TableData, curve_name, label, or_dash, stem

_HEADER = ("policy", "window", "MiB", "nll", "last half", "to full", "95%", "gap", "tok/s")


def page(run: Record, records: Sequence[Record]) -> Page:
    """A table and a chart for each text."""
    title = f"{run['model']}: nats per token, lower is better"
    tables, charts = [], []
    for text in run["texts"]:
        of_text = [record for record in records if record["text"] == text]
        heading = f"{stem(text)}, {max(record['tokens'] for record in of_text):,} tokens"
        tables.append(TableData(heading, _HEADER, [_row(record, of_text) for record in of_text]))
        charts.append(_chart(text, of_text, title))
    return Page(title, "to full: difference on the same tokens; gap: as a fraction of sink's", tables, charts)


def _row(record: Record, records: Sequence[Record]) -> list[str]:
    difference, interval = "-", "-"
    if to_full := record["to_full"]:
        difference = f"{to_full['mean']:+.4f}"
        interval = f"{to_full['low']:+.3f} to {to_full['high']:+.3f}"
    return [
        label(record),
        or_dash(record["window"]),
        f"{record['cache_bytes'] / 2**20:.2f}",
        f"{record['nll']:.4f}",
        f"{record['nll_last_half']:.4f}",
        difference,
        interval,
        _gap(record, records),
        f"{record['tok_s']:.0f}",
    ]


def _gap(record: Record, records: Sequence[Record]) -> str:
    """The loss added by this policy, as a fraction of that added by `sink` with the same window or size."""
    for other in records:
        if other["policy"] == "sink" and _limit(other) == _limit(record) and other["to_full"]:
            sink_loss = other["to_full"]["mean"]
            return f"{record['to_full']['mean'] / sink_loss:.2f}" if sink_loss > 0 else "-"
    return "-"


def _limit(record: Record) -> tuple[int | None, int | None]:
    """What the cache was limited to: its size, or else its window."""
    return record["cache_size"], None if record["cache_size"] else record["window"]


def _chart(text: str, records: Sequence[Record], title: str) -> Chart:
    curves = [
        Curve(curve_name(record), record["rolling"]["seen"], record["rolling"]["nll"], label(record))
        for record in records
    ]
    width = max(record["rolling"]["width"] for record in records)
    heading = f"Loss as the text goes on\n{title}; {stem(text)}, mean of {width:,} tokens"
    return Chart(f"nll-{stem(text)}", heading, ("tokens seen", "nats per token"), curves)
