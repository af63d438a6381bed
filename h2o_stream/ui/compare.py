"""Shows ``h2o-compare nll``: progress while it runs, records as parts are finished, a table and plots at the end."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from h2o_stream.compare.bootstrap import Interval, paired_difference
from h2o_stream.compare.nll import NllResult, read_tokens, stream_nll, within_context
from h2o_stream.compare.results import Results, identity, writing
from h2o_stream.config import CacheConfig, ModelConfig
from h2o_stream.models.load import load
from h2o_stream.session.records import Records, run_record
from h2o_stream.ui.plots import Curve, plot, require_matplotlib
from h2o_stream.ui.progress import progress_bars
from h2o_stream.ui.tables import figures_table, markdown_table
from h2o_stream.ui.terminal import Terminal

_HEADER = ("policy", "window", "nll", "last half", "to full", "95%", "gap", "tok/s")
_LEGEND = "to full: difference on the same tokens; gap: as a part of sink's"
_POINTS = 400


@dataclass(frozen=True)
class _Cell:
    """One policy on one text."""

    text: Path
    config: CacheConfig
    result: NllResult
    to_full: Interval | None

    @property
    def window(self) -> int | None:
        return None if self.config.policy == "full" else self.config.window

    def record(self) -> dict[str, Any]:
        interval = self.to_full._asdict() if self.to_full else None
        return {
            "type": "nll",
            "text": str(self.text),
            "policy": self.config.policy,
            "window": self.window,
            "tokens": len(self.result.losses),
            "nll": self.result.nll,
            "nll_last_half": self.result.nll_last_half,
            "tok_s": round(self.result.tok_s, 2),
            "seed": self.config.seed,
            "to_full": interval,
        }


def compare_nll(
    model_config: ModelConfig,
    configs: Sequence[CacheConfig],
    texts: Sequence[Path],
    tokens: int,
    out: Path | None,
    terminal: Terminal,
    records: Records,
) -> None:
    """Every policy on every text, on identical tokens.

    Args:
        model_config: which model.
        configs: the policies, windows and seeds; ``full`` first, so that the others can be compared with it.
        texts: files of plain text.
        tokens: predicted per text, or as many as it has.
        out: a folder for the table, the plots and finished parts; None for none of them.
        terminal: where progress and the table go.
        records: gets a record for the run and one per result.

    Raises:
        DataError: a text cannot be read, or the folder not be written.
    """
    if out is not None:
        require_matplotlib()
    results = Results(out)
    loaded = load(model_config, notify=terminal.note)
    streams = {path: read_tokens(path, loaded.tokenizer, tokens) for path in texts}
    records.write(
        run_record(
            "h2o-compare nll",
            model=loaded.name,
            policy=[config.policy for config in configs],
            window=[config.window for config in configs],
            tokens=tokens,
            seed=[config.seed for config in configs],
        )
    )
    cells: list[_Cell] = []
    with progress_bars(terminal) as progress:
        for path, stream in streams.items():
            full: NllResult | None = None
            for config in configs:
                fed = within_context(loaded.model, config, stream)
                digest = hashlib.sha256(str(list(fed)).encode()).hexdigest()
                key = {"what": "nll", "tokens": digest, **identity(loaded.model, config)}
                label = f"{path.name} {config.policy} {config.window if config.policy != 'full' else ''}"
                result = _measured(loaded.model, config, fed, results, key, progress, label)
                full = result if config.policy == "full" else full
                to_full = None if full is None or full is result else paired_difference(result.losses, full.losses)
                cells.append(_Cell(path, config, result, to_full))
                records.write(cells[-1].record())
    title = f"{loaded.name}: nats per token, lower is better"
    by_text = {path: [cell for cell in cells if cell.text == path] for path in texts}
    if out is not None:
        pages = [
            markdown_table(f"{title}, {_span(part)}", _HEADER, [_row(cell, part) for cell in part])
            for part in by_text.values()
        ]
        with writing(out):
            (out / "nll.md").write_text("\n".join(pages), encoding="utf-8")
            for path, part in by_text.items():
                _plot(part, out / f"nll-{path.stem}.png", title)
        terminal.note(f"table and plots are in {out}")
    if terminal.quiet:
        return
    terminal.console.print(f"{title} ({_LEGEND})", markup=False, highlight=False)
    for part in by_text.values():
        terminal.console.print(figures_table(_span(part), _HEADER, [_row(cell, part) for cell in part]))


def _span(cells: Sequence[_Cell]) -> str:
    return f"{cells[0].text.name}, {max(len(cell.result.losses) for cell in cells):,} tokens"


def _measured(
    model: Any,
    config: CacheConfig,
    fed: Sequence[int],
    results: Results,
    key: dict[str, Any],
    progress: Progress,
    label: str,
) -> NllResult:
    """The result of one part, from the folder if it is finished there."""
    task = progress.add_task(label, total=len(fed) - 1)
    if stored := results.load(key):
        progress.update(task, completed=len(fed) - 1)
        return NllResult(stored[0], stored[1]["tok_s"])
    for event in stream_nll(model, config, fed):
        if isinstance(event, NllResult):
            results.store(key, event.losses, {"tok_s": event.tok_s})
            return event
        progress.update(task, completed=event.done)
    raise AssertionError("a stream ends with its result")


def _row(cell: _Cell, cells: Sequence[_Cell]) -> list[str]:
    result, difference, interval, share = cell.result, "-", "-", "-"
    if cell.to_full is not None:
        difference = f"{cell.to_full.mean:+.4f}"
        interval = f"{cell.to_full.low:+.3f} to {cell.to_full.high:+.3f}"
        share = _share(cell, cells)
    return [
        cell.config.label,
        str(cell.window or "-"),
        f"{result.nll:.4f}",
        f"{result.nll_last_half:.4f}",
        difference,
        interval,
        share,
        f"{result.tok_s:.0f}",
    ]


def _share(cell: _Cell, cells: Sequence[_Cell]) -> str:
    """This policy's distance to the full cache, as a part of that of `sink` with the same window."""
    for other in cells:
        if (other.config.policy, other.window) == ("sink", cell.window):
            assert cell.to_full is not None
            if other.to_full is not None and other.to_full.mean > 0:
                return f"{cell.to_full.mean / other.to_full.mean:.2f}"
    return "-"


def _plot(cells: Sequence[_Cell], path: Path, title: str) -> None:
    """The rolling mean of the loss by position, one curve a policy."""
    longest = max(len(cell.result.losses) for cell in cells)
    width = min(max(longest // 16, 64), longest)
    curves = []
    for cell in cells:
        losses = cell.result.losses.double()
        if len(losses) >= width:
            sums = torch.cat((torch.zeros(1, dtype=torch.float64), losses.cumsum(0)))
            means = (sums[width:] - sums[:-width]) / width
            stride = max(len(means) // _POINTS, 1)
            label = f"{cell.config.label} {cell.window or ''}".strip()
            curves.append(Curve(label, range(width, len(losses) + 1)[::stride], means[::stride].tolist()))
    plot(path, f"{title}\n{cells[0].text.name}, mean of {width} tokens", ("tokens seen", "nats per token"), curves)
