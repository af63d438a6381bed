"""Heatmaps: colored cells in rows and columns, in a panel for each policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING

from h2o_stream.ui.format import shade
from h2o_stream.ui.pages import Drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from h2o_stream.ui.plots import ChartStyle


@dataclass(frozen=True)
class Heatmap(Drawing):
    """Colored cells: by title a panel for each policy, in rows from the top, from 0 (bad) to 1 (good)."""

    name: str
    title: str
    axes: tuple[str, str]
    x: Sequence[str]
    y: Sequence[str]
    panels: Mapping[str, Sequence[Sequence[float]]]

    def figure(self, style: ChartStyle) -> Figure:
        """The panels side by side or, in a narrow style, one above the other."""
        from matplotlib.figure import Figure

        count, width = len(self.panels), style.size[0]
        columns = 1 if width < 5 else min(count, 3)
        rows = -(-count // columns)
        height = rows * (1.1 + 0.32 * len(self.y)) + 0.6
        figure = Figure(figsize=(width, height), layout="constrained", facecolor=style.background)
        panels = figure.subplots(rows, columns, squeeze=False).flat
        for axis, (name, cells) in zip(panels, self.panels.items(), strict=False):
            axis.imshow([[[part / 255 for part in shade(value)] for value in row] for row in cells], aspect="auto")
            axis.set_title(name, fontsize=10)
            axis.set_xticks(range(len(self.x)), self.x, fontsize=8)
            axis.set_yticks(range(len(self.y)), self.y, fontsize=8)
            axis.set_xlabel(self.axes[0])
            axis.set_ylabel(self.axes[1])
            for y, row in enumerate(cells):
                for x, value in enumerate(row):
                    axis.text(x, y, f"{value:.0%}", ha="center", va="center", fontsize=8, color="black")
        for axis in panels:
            axis.remove()
        if style.title:
            figure.suptitle(fill(self.title, 100, replace_whitespace=False), fontsize=10)
        return figure
