"""The page of ``h2o-compare nll``."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from h2o_stream.ui.pages import (
    Chart,
    Curve,
    Page,
    Record,
    TableData,
    a_few,
    best_named,
    curve_name,
    label,
    listing,
    or_dash,
    stem,
)

_HEADER = ("policy", "window", "MiB", "nll", "last half", "to full", "95%", "gap", "tok/s")


def page(run: Record, records: Sequence[Record]) -> Page:
    """A table and a chart for each text."""
    title = f"{run['model']}: nats per token, lower is better"
    title += "; evicted tokens are masked, and stay in memory" if run.get("masked") else ""
    tables, charts = [], []
    for text in dict.fromkeys(record["text"] for record in records):
        of_text = [record for record in records if record["text"] == text]
        heading = f"{stem(text)}, {max(record['tokens'] for record in of_text):,} tokens"
        tables.append(TableData(heading, _HEADER, [_row(record, of_text) for record in of_text]))
        charts += _charts(text, of_text, title)
    return Page(
        title, "to full: difference on the same tokens; gap: as a fraction of sink's", tables, charts, loss(records)
    )


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


def _charts(text: str, records: Sequence[Record], title: str) -> list[Chart]:
    """The loss by window or size, if there are several, and a chart for each, with the full cache in it."""
    limits = list(dict.fromkeys(_limit(record) for record in records if record["policy"] != "full")) or [(None, None)]
    charts = _by_limit(text, records, title) if len(limits) > 1 else []
    for limit in limits:
        shown = [record for record in records if record["policy"] == "full" or _limit(record) == limit]
        curves = [Curve(curve_name(record), record["rolling"]["seen"], record["rolling"]["nll"]) for record in shown]
        width = max(record["rolling"]["width"] for record in shown)
        heading = f"Loss as the text goes on\n{title}; {stem(text)}, mean of {width:,} tokens"
        name = f"nll-{stem(text)}" + (f"-{_limit_name(limit)}" if len(limits) > 1 else "")
        charts.append(Chart(name, heading, ("tokens seen", "nats per token"), curves))
    return charts


def _limit_name(limit: tuple[int | None, int | None]) -> str:
    size, window = limit
    return f"{size / 2**20:.3g}MiB" if size else f"window{window}"


def _by_limit(text: str, records: Sequence[Record], title: str) -> list[Chart]:
    """The mean loss of each policy by window, or by size; a full cache is a level line."""
    sized = any(record["cache_size"] for record in records)

    def place(record: Record) -> float:
        number: float = record["cache_size"] / 2**20 if sized else record["window"]
        return number

    places = sorted({place(record) for record in records if record["policy"] != "full"})
    curves = []
    for name in dict.fromkeys(map(label, records)):
        shown = [record for record in records if label(record) == name]
        points = [(x, shown[0]) for x in places] if shown[0]["policy"] == "full" else [(place(r), r) for r in shown]
        points.sort(key=lambda point: point[0])
        curves.append(Curve(name, [x for x, _ in points], [record["nll"] for _, record in points]))
    heading = f"Loss by {'size' if sized else 'window'}\n{title}; {stem(text)}"
    axes = ("cache, MiB" if sized else "window, tokens", "nats per token")
    return [Chart(f"nll-{stem(text)}-by-{'size' if sized else 'window'}", heading, axes, curves, logarithmic="x")]


def loss(records: Sequence[Record]) -> str:
    """What each policy loses against a full cache at every window or size, a mean over texts and seeds."""
    added: dict[tuple[int, str], dict[str, list[float]]] = {}
    for record in records:
        if record["to_full"]:
            size = record["cache_size"]
            limit = (size, f"{size / 2**20:.3g} MiB") if size else (record["window"], f"window {record['window']}")
            added.setdefault(limit, {}).setdefault(record["policy"], []).append(record["to_full"]["mean"])
    sentences = []
    for _, limit in a_few(sorted(added)):
        means = {policy: fmean(losses) for policy, losses in added[_, limit].items()}
        best, *others = [_loss(name, means[name]) for name in best_named(means, smallest=True)]
        sentences.append(f"At {limit}, {listing([f'{best} nats per token against the full cache', *others])}.")
    return " ".join(sentences)


def _loss(name: str, mean: float) -> str:
    return f"{name} {'loses' if mean >= 0 else 'gains'} {abs(mean):.2g}"
