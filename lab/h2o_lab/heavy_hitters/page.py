"""The page of ``h2o-compare heavy-hitters``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from h2o_stream.ui.pages import Chart, Curve, Page, Record, TableData, listing, stem

_REMOVAL = ("removed", "of the tokens", "nll", "to all", "95%")

_WORDS = ("frequency", "cooccurrence", "per_token")

_SUMMARIES: dict[str, Callable[[Sequence[float]], float]] = {"mean": fmean, "lowest": min, "highest": max}


def page(run: Record, records: Sequence[Record]) -> Page:
    """Sparsity, power law, the attention that each policy keeps and how it goes with words, by layer; removals."""
    title = f"{run['model']}, {run['tokens']:,} tokens of {stem(run['text'])}, window {run['window']}"
    layers = [record for record in records if record["type"] == "heavy-hitters"]
    removals = [record for record in records if record["type"] != "heavy-hitters"]
    names = list(layers[0]["mass"])
    rows = [*(_row(str(layer["layer"]), [layer], names) for layer in layers), _row("mean", layers, names)]
    tables = [TableData("", ["layer", "sparsity", "slope", "top 10%", *names], rows), _word_table(layers)]
    if removals:
        tables.append(TableData("loss without a part of the tokens", _REMOVAL, list(map(_removal_row, removals))))
    legend = "shares in %; slope: of the power law"
    charts = [*_charts(layers, names, title), _word_chart(layers, title), *_removal_charts(removals, title)]
    return Page(title, legend, tables, charts, _verdict(layers, removals))


def _row(name: str, layers: Sequence[Record], names: Sequence[str]) -> list[str]:
    """The means over one layer or more."""
    return [
        name,
        f"{100 * fmean(layer['sparsity'] for layer in layers):.1f}",
        f"{fmean(layer['exponent'] for layer in layers):.2f}",
        f"{100 * fmean(layer['top_share'] for layer in layers):.1f}",
        *(f"{100 * fmean(layer['mass'][policy] for layer in layers):.1f}" for policy in names),
    ]


def _word_table(layers: Sequence[Record]) -> TableData:
    """Rank correlations in the mean, the least and the most of the layers."""
    found = [[layer["words"][name] for layer in layers] for name in _WORDS]
    header = ["layers", "sum, frequency", "sum, words near", "per token, words near"]
    rows = [[name, *(f"{of(values):+.2f}" for values in found)] for name, of in _SUMMARIES.items()]
    return TableData("attention that a word receives, rank correlations", header, rows)


def _removal_row(record: Record) -> list[str]:
    change = record["to_full"]
    difference = ["-", "-"]
    if record["percent"]:
        difference = [f"{change['mean']:+.3f}", f"{change['low']:+.3f} to {change['high']:+.3f}"]
    return [record["removed"], f"{record['percent']}%", f"{record['nll']:.4f}", *difference]


def _verdict(layers: Sequence[Record], removals: Sequence[Record]) -> str:
    sparse = fmean(layer["sparsity"] for layer in layers)
    top = fmean(layer["top_share"] for layer in layers)
    verdict = (
        f"{sparse:.0%} of the tokens get less than 1% of a query's largest attention, "
        f"and a tenth of them gets {top:.0%} of all attention"
    )
    percent = max((record["percent"] for record in removals), default=0)
    added = {record["removed"]: record["to_full"]["mean"] for record in removals if record["percent"] == percent}
    if percent:
        losses = listing([f"{mean:+.2g} ({removed})" for removed, mean in added.items()])
        verdict += f". Without {percent}% of the tokens, the loss in nats changes by {losses}"
    return f"{verdict}."


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


def _word_chart(layers: Sequence[Record], title: str) -> Chart:
    selected = layers[:: max((len(layers) - 1) // 4, 1)]
    curves = [
        Curve(f"layer {layer['layer']}", list(range(1, len(groups) + 1)), groups)
        for layer in selected
        for groups in [layer["words"]["by_cooccurrence"]]
    ]
    axes = ("words by the number of words near them, in tenths", "attention per token, 1 is even")
    return Chart("words", f"Attention by co-occurrence\n{title}", axes, curves, logarithmic="y")


def _removal_charts(removals: Sequence[Record], title: str) -> list[Chart]:
    ways = dict.fromkeys(record["removed"] for record in removals if record["percent"])
    curves = [
        Curve(way, [record["percent"] for record in found], [record["nll"] for record in found])
        for way in ways
        for found in [[record for record in removals if record["removed"] in ("nothing", way)]]
    ]
    axes = ("removed tokens, %", "nats per token")
    return [Chart("removal", f"Loss without heavy hitters\n{title}", axes, curves)] if curves else []
