"""The page of ``h2o-compare tasks --suite ruler --depths``: a needle in a haystack, by length and depth."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from h2o_lab.phrases import share
from h2o_lab.ruler.heatmap import Heatmap
from h2o_stream.ui.pages import Page, Record, TableData, curve_name


def page(run: Record, records: Sequence[Record]) -> Page:
    """A table of colored cells for each policy, and a picture of all of them."""
    lengths, depths = sorted(set(run["lengths"])), sorted(set(run["depths"]))
    found = {(curve_name(record), record["depth"], record["length"]): record["accuracy"] for record in records}
    names = list(dict.fromkeys(curve_name(record) for record in records))
    cells = {name: [[found[name, depth, length] for length in lengths] for depth in depths] for name in names}
    title = f"{run['model']}, {run['dtype']}: a number hidden in a text, {run['items']} contexts for each cell"
    columns = [f"{length:,}" for length in lengths]
    rows = [f"{depth}%" for depth in depths]
    tables = [
        TableData(
            name,
            ["depth", *(f"{column} tokens" for column in columns)],
            [[row, *(f"{value:.0%}" for value in values)] for row, values in zip(rows, cells[name], strict=True)],
            [[None, *values] for values in cells[name]],
        )
        for name in names
    ]
    means = {name: fmean(value for values in cells[name] for value in values) for name in names}
    picture = Heatmap(
        "needles", f"Right answers by length and depth\n{title}", ("tokens", "depth"), columns, rows, cells
    )
    return Page(
        title,
        "right answers; depth: 0% is the beginning",
        tables,
        [picture],
        share(means, "In the mean", "finds", "of the needles"),
    )
