"""The page of ``h2o-compare heavy-hitters``."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from h2o_stream.ui.pages import Chart, Curve, Page, Record, TableData, stem


def page(run: Record, records: Sequence[Record]) -> Page:
    """Sparsity, power law, and the attention that each policy keeps, by layer."""
    title = f"{run['model']}, {run['tokens']:,} tokens of {stem(run['text'])}, window {run['window']}"
    names = list(records[0]["mass"]) if records else []
    rows = [*(_row(str(layer["layer"]), [layer], names) for layer in records), _row("mean", records, names)]
    header = ["layer", "sparsity", "slope", "top 10%", *names]
    return Page(f"{title}; shares in %", "", [TableData("", header, rows)], _charts(records, names, title))


def _row(name: str, layers: Sequence[Record], names: Sequence[str]) -> list[str]:
    """The means over one layer or more."""
    return [
        name,
        f"{100 * fmean(layer['sparsity'] for layer in layers):.1f}",
        f"{fmean(layer['exponent'] for layer in layers):.2f}",
        f"{100 * fmean(layer['top_share'] for layer in layers):.1f}",
        *(f"{100 * fmean(layer['mass'][policy] for layer in layers):.1f}" for policy in names),
    ]


def _charts(layers: Sequence[Record], names: Sequence[str], title: str) -> list[Chart]:
    numbers = [layer["layer"] for layer in layers]
    selected = layers[:: max((len(layers) - 1) // 4, 1)]
    return [
        Chart(
            "sparsity",
            f"Attention below 1% of a query's largest\n{title}",
            ("layer", "fraction of the tokens seen"),
            [Curve("", numbers, [layer["sparsity"] for layer in layers])],
            (0, 1),
        ),
        Chart(
            "power-law",
            f"Attention received, tokens in order\n{title}",
            ("rank of the token", "sum of attention"),
            [Curve(f"layer {layer['layer']}", layer["ranks"], layer["scores"]) for layer in selected],
            logarithmic="xy",
        ),
        Chart(
            "mass",
            f"Attention that falls on what is held\n{title}",
            ("layer", "fraction of all attention"),
            [Curve(name, numbers, [layer["mass"][name] for layer in layers]) for name in names],
            (0, 1),
        ),
    ]
