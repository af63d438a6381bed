"""The results of comparisons as tables, charts and a sentence, the same in a terminal, a folder and a report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from h2o_stream.base.registry import resolve
from h2o_stream.compare.catalog import COMPARISONS

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


class Drawing(ABC):
    """A picture of another kind, which draws itself."""

    name: str
    title: str

    @abstractmethod
    def figure(self, style: Any) -> Any:
        """A figure of matplotlib in a `plots.ChartStyle`."""


@dataclass(frozen=True)
class Page:
    """The results of a comparison. The legend explains columns that need it; the verdict says in a sentence what was
    found.
    """

    title: str
    legend: str
    tables: Sequence[TableData]
    charts: Sequence[Chart | Drawing] = ()
    verdict: str = ""


def page_of(kind: str, run: Record, records: Sequence[Record]) -> Page:
    """The page of a comparison."""
    page: Page = resolve(COMPARISONS[kind].page)(run, records)
    return replace(page, charts=[part for chart in page.charts for part in readable(chart)])


def readable(chart: Chart | Drawing) -> list[Chart | Drawing]:
    """A chart as several with at most `MAX_CURVES` named curves each; the first curve, full if it is there, is in all.

    Curves without a name stay together: they show a spread.
    """
    if not isinstance(chart, Chart) or len(chart.curves) <= MAX_CURVES or not all(curve.name for curve in chart.curves):
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


def or_dash(value: Any) -> str:
    """A value, or a dash for None."""
    return "-" if value is None else str(value)


def stem(path: str) -> str:
    """The name of a file without folders and suffix."""
    return path.replace("\\", "/").rpartition("/")[2].rpartition(".")[0] or path


def listing(phrases: Sequence[str]) -> str:
    """Phrases with commas and "and"."""
    return " and ".join(filter(None, (", ".join(phrases[:-1]), *phrases[-1:])))


def best_named(values: Mapping[str, float], smallest: bool) -> list[str]:
    """The names that a verdict has, best first: the best, h2o, sink, and the worst."""
    order = sorted(values, key=lambda name: values[name], reverse=not smallest)
    wanted = [order[0], *(name for name in order if name.split()[0] in ("h2o", "sink"))][: _NAMED - 1] + order[-1:]
    return sorted(set(wanted), key=order.index)[:_NAMED]


def a_few(limits: list[Any]) -> list[Any]:
    """At most `_LIMITS` of a list, with the first and the last."""
    last = len(limits) - 1
    return [limits[round(n * last / (_LIMITS - 1))] for n in range(_LIMITS)] if len(limits) > _LIMITS else limits
