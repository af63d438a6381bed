"""The results of comparisons as tables, charts and a sentence, the same in a terminal, a folder and a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from h2o_stream.base.registry import resolve
from h2o_stream.compare.catalog import COMPARISONS
from h2o_stream.config import RECALL_NAMES

Record = Mapping[str, Any]

MAX_CURVES = 8
"""In a chart: as many as there are colours."""

_NAMED, _LIMITS = 4, 3
"""Policies or engines, and windows or sizes, that a verdict names at most."""


@dataclass(frozen=True)
class TableData:
    """A table."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    shades: Sequence[Sequence[float | None]] = ()
    """From 0 (bad) to 1 (good), the color of each cell; None has none. Empty without colors."""


@dataclass(frozen=True)
class Curve:
    """A line of a chart. A curve without a name is not in the legend; curves of the same kind have the same colour."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    kind: str = ""


@dataclass(frozen=True)
class Chart:
    """Curves in a coordinate system.

    Attributes:
        axes: labels of x and y.
        y_range: limits of the y axis; None fits the curves.
        logarithmic: the logarithmic axes: "x", "y", "xy" or "".
    """

    name: str
    title: str
    axes: tuple[str, str]
    curves: Sequence[Curve]
    y_range: tuple[float, float] | None = None
    logarithmic: str = ""


@dataclass(frozen=True)
class Heatmap:
    """Colored cells: by title a panel for each policy, in rows from the top, from 0 (bad) to 1 (good)."""

    name: str
    title: str
    axes: tuple[str, str]
    x: Sequence[str]
    y: Sequence[str]
    panels: Mapping[str, Sequence[Sequence[float]]]


@dataclass(frozen=True)
class Page:
    """The results of a comparison. The legend explains columns that need it; the verdict says in a sentence what was
    found.
    """

    title: str
    legend: str
    tables: Sequence[TableData]
    charts: Sequence[Chart | Heatmap] = ()
    verdict: str = ""


def page_of(kind: str, run: Record, records: Sequence[Record]) -> Page:
    """The page of a comparison."""
    page: Page = resolve(COMPARISONS[kind].page)(run, records)
    return replace(page, charts=[part for chart in page.charts for part in readable(chart)])


def readable(chart: Chart | Heatmap) -> list[Chart | Heatmap]:
    """A chart as several with at most `MAX_CURVES` named curves each; the first curve, full if it is there, is in all.

    Curves without a name stay together: they show a spread.
    """
    if isinstance(chart, Heatmap) or len(chart.curves) <= MAX_CURVES or not all(curve.name for curve in chart.curves):
        return [chart]
    first, *others = chart.curves
    parts = [others[start : start + MAX_CURVES - 1] for start in range(0, len(others), MAX_CURVES - 1)]
    names = [chart.name, *(f"{chart.name}-part{number}" for number in range(2, len(parts) + 1))]
    return [replace(chart, name=name, curves=[first, *part]) for name, part in zip(names, parts, strict=True)]


def plain_page(run: Record, records: Sequence[Record]) -> Page:
    """All records as one table, for a comparison that has no page of its own."""
    header = list(dict.fromkeys(name for record in records for name in record if name != "type"))
    rows = [[or_dash(record.get(name)) for name in header] for record in records]
    return Page(str(run["command"]), "", [TableData("", header, rows)])


def label(record: Record) -> str:
    """The policy, and its seed unless it is 0."""
    return f"{record['policy']} #{record['seed']}" if record.get("seed") else str(record["policy"])


def curve_name(record: Record) -> str:
    """Policy, seed and window."""
    return f"{label(record)} {record['window'] or ''}".strip()


def with_recall(name: str, record: Record) -> str:
    """A name of the record's policy, and the mode of recall unless it is off."""
    return " with ".join(filter(None, (name, RECALL_NAMES[record.get("recall", "off")])))


def or_dash(value: Any) -> str:
    """A value, or a dash for None."""
    return "-" if value is None else str(value)


def stem(path: str) -> str:
    """The name of a file without folders and suffix."""
    return path.replace("\\", "/").rpartition("/")[2].rpartition(".")[0] or path


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


def share(values: Mapping[str, float], where: str, verb: str, what: str) -> str:
    """Shares by policy, the largest first: "At window 64, h2o keeps 71% of ... and sink 40%."."""
    if not values:
        return ""
    first, *others = [f"{name} {{}}{values[name]:.0%}" for name in best_named(values, smallest=False)]
    phrases = [f"{first.format(f'{verb} ')} {what}", *(other.format("") for other in others)]
    return f"{where}, {listing(phrases)}."


def listing(phrases: Sequence[str]) -> str:
    """Phrases with commas and "and"."""
    return " and ".join(filter(None, (", ".join(phrases[:-1]), *phrases[-1:])))


def counted(number: int, thing: str) -> str:
    """A number and what it counts, in the plural unless it is one."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


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


def best_named(values: Mapping[str, float], smallest: bool) -> list[str]:
    """The names that a verdict has, best first: the best, h2o, sink, and the worst."""
    order = sorted(values, key=lambda name: values[name], reverse=not smallest)
    wanted = [order[0], *(name for name in order if name.split()[0] in ("h2o", "sink"))][: _NAMED - 1] + order[-1:]
    return sorted(set(wanted), key=order.index)[:_NAMED]


def a_few(limits: list[Any]) -> list[Any]:
    """At most `_LIMITS` of a list, with the first and the last."""
    last = len(limits) - 1
    return [limits[round(n * last / (_LIMITS - 1))] for n in range(_LIMITS)] if len(limits) > _LIMITS else limits
