"""Draws charts. The only module that uses matplotlib, which comes with the extra ``plots``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from h2o_stream.ui.pages import Chart, Drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class ChartStyle:
    """How a chart is drawn: size in inches; colors of the curves in turn, neighbors of different lightness."""

    size: tuple[float, float] = (8, 4.5)
    foreground: str = "#1a1a1a"
    background: str = "white"
    colors: tuple[str, ...] = ("#222222", "#d1495b", "#00798c", "#b7791f", "#5f4bb6", "#3c8d2f", "#888888", "#c2588f")
    title: bool = True


_LINE_STYLES = ("-", "--", ":", "-.")

_MARKERS = "osD^vPX*"
"""One for each colour, so that curves can be told apart without it."""

_MAX_MARKERS = 20
"""Curves with fewer points get a marker at each, others eight or so, staggered."""


def draw(chart: Chart | Drawing, path: Path) -> None:
    """Draw a chart into a PNG file; raises OSError if it cannot be written."""
    figure_of(chart, ChartStyle()).savefig(path, dpi=120)


def figure_of(chart: Chart | Drawing, style: ChartStyle) -> Figure:
    """A chart in a style, as matplotlib has it."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    colored = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    settings: dict[Any, Any] = {"svg.hashsalt": chart.name, **dict.fromkeys(colored, style.foreground)}
    with rc_context(settings):
        if not isinstance(chart, Chart):
            drawn: Figure = chart.figure(style)
            return drawn
        figure = Figure(figsize=style.size, layout="constrained", facecolor=style.background)
        _draw_curves(chart, style, figure)
    return figure


def _draw_curves(chart: Chart, style: ChartStyle, figure: Figure) -> None:
    axis = figure.subplots()
    axis.set_facecolor("none")
    kinds = [curve.kind or curve.name for curve in chart.curves]
    order = list(dict.fromkeys(kinds))
    for number, curve in enumerate(chart.curves):
        color, repeats = order.index(kinds[number]), kinds[:number].count(kinds[number])
        axis.plot(
            curve.x,
            curve.y,
            color=style.colors[color % len(style.colors)],
            linestyle=_LINE_STYLES[(repeats + color // len(style.colors)) % len(_LINE_STYLES)],
            linewidth=1.6,
            marker=_MARKERS[color % len(_MARKERS)],
            markevery=1 if len(curve.x) < _MAX_MARKERS else (number % 5 * 2, max(len(curve.x) // 8, 1)),
            markersize=4.5,
            label=curve.name or None,
        )
    if "x" in chart.logarithmic:
        axis.set_xscale("log")
        ticks = sorted({x for curve in chart.curves for x in curve.x})
        if len(ticks) < _MAX_MARKERS:
            axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
            axis.minorticks_off()
    if "y" in chart.logarithmic:
        axis.set_yscale("log")
    if chart.y_range is not None:
        axis.set_ylim(*chart.y_range)
    if style.title:
        axis.set_title(fill(chart.title, 100, replace_whitespace=False), fontsize=10)
    axis.set_xlabel(chart.axes[0])
    axis.set_ylabel(chart.axes[1])
    axis.grid(alpha=0.3)
    if any(curve.name for curve in chart.curves):
        columns = 2 if style.size[0] < 5 else 4
        figure.legend(loc="outside lower center", fontsize=9, ncols=columns, frameon=False)
