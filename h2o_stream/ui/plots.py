"""Charts as pictures. The only place that knows matplotlib, which comes with the extra ``plots``."""

from __future__ import annotations

from pathlib import Path

from h2o_stream.errors import H2OStreamError
from h2o_stream.ui.pages import Chart


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
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    for curve in chart.curves:
        axis.plot(curve.x, curve.y, label=curve.name or None, linewidth=1.6, marker="o" if len(curve.x) < 20 else "")
    if "x" in chart.logarithmic:
        axis.set_xscale("log")
    if "y" in chart.logarithmic:
        axis.set_yscale("log")
    if chart.y_range is not None:
        axis.set_ylim(*chart.y_range)
    axis.set_title(chart.title, fontsize=10)
    axis.set_xlabel(chart.axes[0])
    axis.set_ylabel(chart.axes[1])
    axis.grid(alpha=0.3)
    if any(curve.name for curve in chart.curves):
        axis.legend(fontsize=9)
    figure.savefig(path, dpi=120)
