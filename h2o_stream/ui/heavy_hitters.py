"""Shows what `compare.heavy_hitters` measured: a table, records, and plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from h2o_stream.compare.heavy_hitters import BEST, TOP, LayerAttention, observe
from h2o_stream.compare.nll import read_tokens
from h2o_stream.compare.results import make_folder, writing
from h2o_stream.config import CacheConfig, ModelConfig
from h2o_stream.models.load import load
from h2o_stream.session.records import Records, run_record
from h2o_stream.ui.plots import Curve, plot
from h2o_stream.ui.progress import progress_bars
from h2o_stream.ui.tables import figures_table, markdown_table
from h2o_stream.ui.terminal import Terminal


def show_heavy_hitters(
    model_config: ModelConfig,
    configs: Sequence[CacheConfig],
    text: Path,
    tokens: int,
    chunk: int,
    out: Path,
    terminal: Terminal,
    records: Records,
) -> None:
    """Measure, print a table, and write ``heavy-hitters.md`` and three plots into a folder.

    Args:
        model_config: which model.
        configs: the policies, all of one window.
        text: a file of plain text.
        tokens: how many of it are read.
        chunk: tokens between two evictions.
        out: the folder, made if it is not there.
        terminal: where progress and the table go.
        records: gets a record for the run and one per layer.

    Raises:
        DataError: the text cannot be read, or the folder not be written.
        ConfigError: see `observe`.
    """
    make_folder(out)
    loaded = load(model_config, notify=terminal.note)
    stream = read_tokens(text, loaded.tokenizer, tokens - 1)
    window = configs[0].window
    records.write(
        run_record(
            "h2o-compare heavy-hitters",
            model=loaded.name,
            policy=[config.policy for config in configs],
            window=window,
            tokens=len(stream),
            seed=None,
        )
    )
    layers: list[LayerAttention] = []
    with progress_bars(terminal) as progress:
        tasks: dict[str, int] = {}
        for event in observe(loaded.model, stream, configs, chunk):
            if isinstance(event, list):
                layers = event
                continue
            if event.name not in tasks:
                tasks[event.name] = progress.add_task(event.name, total=event.total)
            progress.update(tasks[event.name], completed=event.done)  # type: ignore[arg-type]
    for layer in layers:
        records.write(_record(layer, text, window))
    title = f"{loaded.name}, {len(stream):,} tokens of {text.name}, window {window}"
    names = [*(config.policy for config in configs), BEST]
    rows = [*(_row(str(layer.layer), [layer], names) for layer in layers), _row("mean", layers, names)]
    with writing(out):
        (out / "heavy-hitters.md").write_text(
            markdown_table(f"{title}; parts in %", _header(names), rows), encoding="utf-8"
        )
        _plots(layers, names, title, out)
    if not terminal.quiet:
        terminal.console.print(figures_table(f"{title}; parts in %", _header(names), rows))
    terminal.note(f"table and plots are in {out}")


def _record(layer: LayerAttention, text: Path, window: int) -> dict[str, object]:
    return {
        "type": "heavy-hitters",
        "text": str(text),
        "window": window,
        "layer": layer.layer,
        "sparsity": layer.sparsity,
        "exponent": layer.exponent,
        "top_share": layer.top_share,
        "mass": layer.mass,
    }


def _header(names: Sequence[str]) -> list[str]:
    return ["layer", "sparsity", "slope", f"top {TOP:.0%}", *names]


def _row(name: str, layers: Sequence[LayerAttention], names: Sequence[str]) -> list[str]:
    """The means over one layer or more."""
    return [
        name,
        f"{100 * fmean(layer.sparsity for layer in layers):.1f}",
        f"{fmean(layer.exponent for layer in layers):.2f}",
        f"{100 * fmean(layer.top_share for layer in layers):.1f}",
        *(f"{100 * fmean(layer.mass[policy] for layer in layers):.1f}" for policy in names),
    ]


def _plots(layers: Sequence[LayerAttention], names: Sequence[str], title: str, out: Path) -> None:
    numbers = [layer.layer for layer in layers]
    plot(
        out / "sparsity.png",
        f"Attention below 1% of a query's largest\n{title}",
        ("layer", "part of the tokens seen"),
        [Curve("", numbers, [layer.sparsity for layer in layers])],
        y_range=(0, 1),
    )
    shown = layers[:: max((len(layers) - 1) // 4, 1)]
    plot(
        out / "power-law.png",
        f"Attention received, tokens in order\n{title}",
        ("rank of the token", "sum of attention"),
        [Curve(f"layer {x.layer}", range(1, len(x.scores) + 1), x.scores.tolist()) for x in shown],
        logarithmic=True,
    )
    plot(
        out / "mass.png",
        f"Attention that falls on what is held\n{title}",
        ("layer", "part of all attention"),
        [Curve(name, numbers, [layer.mass[name] for layer in layers]) for name in names],
        y_range=(0, 1),
    )
