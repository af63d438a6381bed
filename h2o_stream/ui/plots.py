"""Charts as pictures. The only place that knows matplotlib, which comes with the extra ``plots``."""

from __future__ import annotations

from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from h2o_stream.errors import H2OStreamError
from h2o_stream.ui.pages import Chart

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Look:
    """How a chart is drawn.

    Attributes:
        size: width and height, inches.
        ink: of text and axes.
        paper: behind everything; "none" lets through what is there.
        colors: of the curves, in turn. Neighbours differ in lightness, too.
        title: whether it is drawn, which a page with headings does not need.
    """

    size: tuple[float, float] = (8, 4.5)
    ink: str = "#1a1a1a"
    paper: str = "white"
    colors: tuple[str, ...] = ("#222222", "#d1495b", "#00798c", "#b7791f", "#5f4bb6", "#3c8d2f", "#888888", "#c2588f")
    title: bool = True


_STYLES = ("-", "--", ":", "-.")

_FEW = 20
"""Points of a curve below which each is marked."""

_DARK = ("#f0f0f0", "#ff7b89", "#3fc5d8", "#f2b84b", "#a797ff", "#7bd36a", "#a0a0a0", "#f49ac8")

WIDE = Look(title=False, paper="none")
WIDE_DARK = Look(ink="#e8e8e8", paper="none", colors=_DARK, title=False)
NARROW = Look((4.1, 4.1), title=False, paper="none")
NARROW_DARK = Look((4.1, 4.1), "#e8e8e8", "none", _DARK, title=False)


def require_matplotlib() -> None:
    """Find out before the work whether its result can be drawn.

    Raises:
        H2OStreamError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise H2OStreamError("plots need matplotlib; pip install 'h2o-stream[plots]'") from error


def draw(chart: Chart, path: Path) -> None:
    """Draw a chart into a PNG file.

    Raises:
        OSError: the file cannot be written.
    """
    _figure(chart, Look()).savefig(path, dpi=120)


def svg(chart: Chart, look: Look) -> str:
    """A chart as a picture that needs no font and nothing else from outside."""
    written = StringIO()
    _figure(chart, look).savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    return written.getvalue()


def _figure(chart: Chart, look: Look) -> Figure:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    style: dict[Any, Any] = {"svg.hashsalt": chart.name, **dict.fromkeys(inked, look.ink)}
    with rc_context(style):
        figure = Figure(figsize=look.size, layout="constrained", facecolor=look.paper)
        axis = figure.subplots()
        axis.set_facecolor("none")
        kinds = [curve.kind or curve.name for curve in chart.curves]
        order = list(dict.fromkeys(kinds))
        for number, curve in enumerate(chart.curves):
            color, before = order.index(kinds[number]), kinds[:number].count(kinds[number])
            axis.plot(
                curve.x,
                curve.y,
                color=look.colors[color % len(look.colors)],
                linestyle=_STYLES[(before + color // len(look.colors)) % len(_STYLES)],
                linewidth=1.6,
                marker="o" if len(curve.x) < _FEW else "",
                markersize=4,
                label=curve.name or None,
            )
        if "x" in chart.logarithmic:
            axis.set_xscale("log")
            places = sorted({x for curve in chart.curves for x in curve.x})
            if len(places) < _FEW:
                axis.set_xticks(places, [f"{place:,}" for place in places])
                axis.minorticks_off()
        if "y" in chart.logarithmic:
            axis.set_yscale("log")
        if chart.y_range is not None:
            axis.set_ylim(*chart.y_range)
        if look.title:
            axis.set_title(fill(chart.title, 100, replace_whitespace=False), fontsize=10)
        axis.set_xlabel(chart.axes[0])
        axis.set_ylabel(chart.axes[1])
        axis.grid(alpha=0.3)
        if any(curve.name for curve in chart.curves):
            columns = 2 if look.size[0] < 5 else 4
            figure.legend(loc="outside lower center", fontsize=9, ncols=columns, frameon=False)
    return figure
