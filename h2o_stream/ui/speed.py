"""Shows ``h2o-compare speed``: progress while it runs, a record for each figure, a table and a plot at the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from h2o_stream.compare.contenders import OURS, Contender
from h2o_stream.compare.nll import read_tokens
from h2o_stream.compare.results import make_folder, writing
from h2o_stream.compare.speed import Doing, Figure, bandwidth, needed, race
from h2o_stream.errors import DataError
from h2o_stream.models.load import load_tokenizer
from h2o_stream.session.records import Records, run_record
from h2o_stream.ui.figures import size
from h2o_stream.ui.plots import Curve, plot, require_matplotlib
from h2o_stream.ui.progress import progress_bars
from h2o_stream.ui.tables import figures_table, markdown_table
from h2o_stream.ui.terminal import Terminal

_HEADER = ("engine", "weights", "history", "prefill", "decode", "of floor", "cache", "process")


def compare_speed(
    contenders: Sequence[Contender],
    histories: Sequence[int],
    text: Path,
    out: Path | None,
    terminal: Terminal,
    records: Records,
) -> None:
    """Time contenders against each other.

    Args:
        contenders: all of one model.
        histories: tokens seen when decoding is timed.
        text: what they read.
        out: a folder for the table and the plot; None for neither.
        terminal: where progress and the table go.
        records: gets a record for the run and one for each figure.

    Raises:
        DataError: the text is too short or cannot be read, or the folder not be written.
        H2OStreamError: an engine is missing or failed.
    """
    if out is not None:
        require_matplotlib()
        make_folder(out)
    histories = sorted(set(histories))
    count = needed(histories)
    tokens = read_tokens(text, load_tokenizer(contenders[0].model, terminal.note), count)
    if len(tokens) < count:
        raise DataError(
            f"--text {text}: {len(tokens)} tokens, {count} are needed; lower --histories or give a longer text"
        )
    reads = bandwidth(contenders[0].threads)
    records.write(
        run_record(
            "h2o-compare speed",
            model=contenders[0].model.model,
            policy=[contender.cache.policy for contender in contenders],
            window=[contender.cache.window for contender in contenders],
            seed=None,
            bandwidth=round(reads),
        )
    )
    figures: list[Figure] = []
    with progress_bars(terminal) as progress:
        task = progress.add_task("")
        for event in race(contenders, histories, tokens):
            if isinstance(event, Doing):
                progress.update(task, description=event.text, completed=event.done, total=event.total)
            else:
                figures.append(event)
                records.write(_record(event))
    title = f"{contenders[0].model.model}: tokens/s; memory read at {reads / 1e9:.1f} GB/s"
    order = {contender: number for number, contender in enumerate(contenders)}
    figures.sort(key=lambda figure: (figure.history, order[figure.contender]))
    rows = [_row(figure, reads) for figure in figures]
    if out is not None:
        with writing(out):
            (out / "speed.md").write_text(markdown_table(title, _HEADER, rows), encoding="utf-8")
            _plot(figures, contenders, out / "speed.png", title)
        terminal.note(f"table and plot are in {out}")
    if not terminal.quiet:
        terminal.console.print(figures_table(title, _HEADER, rows))


def _record(figure: Figure) -> dict[str, Any]:
    own, cache = figure.contender.engine == OURS, figure.contender.cache
    return {
        "type": "speed",
        "engine": figure.contender.engine,
        "policy": cache.policy if own else "full",
        "window": cache.window if own and cache.policy != "full" else None,
        "history": figure.history,
        "prefill_tok_s": round(figure.prefill_tok_s, 2),
        "decode_tok_s": round(figure.decode_tok_s, 2),
        "cache_bytes": figure.memory.cache,
        "rss_bytes": figure.memory.process,
        "dtype": figure.ready.dtype,
        "quantize": figure.contender.model.quantize,
        "compile": own and figure.contender.compile,
        "weight_bytes": figure.ready.weight_bytes,
    }


def _row(figure: Figure, reads: float) -> list[str]:
    return [
        figure.contender.name,
        _weights(figure),
        f"{figure.history:,}",
        f"{figure.prefill_tok_s:.0f}",
        f"{figure.decode_tok_s:.1f}",
        f"{figure.decode_tok_s / figure.floor(reads):.2f}",
        "-" if figure.memory.cache is None else size(figure.memory.cache),
        size(figure.memory.process),
    ]


def _weights(figure: Figure) -> str:
    quantize = figure.contender.model.quantize
    return figure.ready.dtype if quantize == "none" or figure.contender.engine != OURS else quantize


def _plot(figures: Sequence[Figure], contenders: Sequence[Contender], path: Path, title: str) -> None:
    curves = []
    for contender in contenders:
        own = [figure for figure in figures if figure.contender == contender]
        if own:
            name = f"{contender.name} {_weights(own[0])}"
            curves.append(Curve(name, [figure.history for figure in own], [figure.decode_tok_s for figure in own]))
    plot(path, title, ("tokens seen", "decode, tokens/s"), curves, logarithmic=True)
