"""Line plots as PNG files. The only place that knows matplotlib, which comes with the extra ``plots``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from h2o_stream.errors import H2OStreamError


@dataclass(frozen=True)
class Curve:
    """A line of a plot; a curve without a name is left out of the legend."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def require_matplotlib() -> None:
    """Find out before the work whether its result can be drawn.

    Raises:
        H2OStreamError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise H2OStreamError("plots need matplotlib; pip install 'h2o-stream[plots]'") from error


def plot(
    path: Path,
    title: str,
    axes: tuple[str, str],
    curves: Sequence[Curve],
    y_range: tuple[float, float] | None = None,
    logarithmic: bool = False,
) -> None:
    """Draw curves into a PNG file.

    Args:
        path: of the file.
        title: above the plot.
        axes: names of x and y.
        curves: one or more.
        y_range: of the y axis; None is what the curves need.
        logarithmic: both axes.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    for curve in curves:
        axis.plot(curve.x, curve.y, label=curve.name or None, linewidth=1.6)
    if logarithmic:
        axis.set_xscale("log")
        axis.set_yscale("log")
    if y_range is not None:
        axis.set_ylim(*y_range)
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(axes[0])
    axis.set_ylabel(axes[1])
    axis.grid(alpha=0.3)
    if any(curve.name for curve in curves):
        axis.legend(fontsize=9)
    figure.savefig(path, dpi=120)
