"""The tables and charts of each comparison, made from its records: for the terminal, a folder and a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

Record = Mapping[str, Any]

KINDS = ("nll", "recall", "summarize", "tasks", "speed", "throughput", "soak", "heavy-hitters")
"""Comparisons that have a page, in the order of a report."""


@dataclass(frozen=True)
class TableData:
    """A table."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Curve:
    """A line of a chart. Without a name it is not in the legend. Curves of the same kind share a color."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    kind: str = ""


@dataclass(frozen=True)
class Chart:
    """A chart of one or more curves.

    Attributes:
        name: of its file, without extension.
        title: shown above it.
        axes: names of x and y.
        curves: one or more.
        y_range: of the y axis; None to fit the curves.
        logarithmic: the logarithmic axes, of "x" and "y".
    """

    name: str
    title: str
    axes: tuple[str, str]
    curves: Sequence[Curve]
    y_range: tuple[float, float] | None = None
    logarithmic: str = ""


@dataclass(frozen=True)
class Page:
    """What a comparison shows.

    Attributes:
        title: what was measured.
        legend: explains columns that need it.
        tables: one or more.
        charts: any number.
    """

    title: str
    legend: str
    tables: Sequence[TableData]
    charts: Sequence[Chart] = ()


def page_of(kind: str, run: Record, records: Sequence[Record]) -> Page:
    """The page of a comparison.

    Args:
        kind: one of `KINDS`.
        run: its run record.
        records: its other records.
    """
    module = import_module(f"h2o_stream.ui.pages.{kind.replace('-', '_')}")
    page: Page = module.page(run, records)
    return page


def label(record: Record) -> str:
    """The policy, and the seed unless it is 0."""
    return f"{record['policy']} #{record['seed']}" if record.get("seed") else str(record["policy"])


def curve_name(record: Record) -> str:
    """Policy, seed and window."""
    return f"{label(record)} {record['window'] or ''}".strip()


def or_dash(value: Any) -> str:
    """A value, or a dash if it is missing."""
    return "-" if value is None else str(value)


def stem(path: str) -> str:
    """The file name of a text, without folders and extension."""
    return path.replace("\\", "/").rpartition("/")[2].rpartition(".")[0] or path
