"""Shows comparisons: progress while they run, a table and records at the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from h2o_stream.compare.nll import read_tokens, stream_nll, within_context
from h2o_stream.config import CacheConfig, ModelConfig
from h2o_stream.models.load import load
from h2o_stream.session.records import Records, run_record
from h2o_stream.ui.progress import progress_bars
from h2o_stream.ui.terminal import Terminal


def compare_nll(
    model_config: ModelConfig,
    configs: Sequence[CacheConfig],
    texts: Sequence[Path],
    tokens: int,
    terminal: Terminal,
    records: Records,
) -> None:
    """Every policy on every text, on identical tokens.

    Args:
        model_config: which model.
        configs: the policies and windows.
        texts: files of plain text.
        tokens: predicted per text, or as many as it has.
        terminal: where progress and the table go.
        records: gets a record for the run and one per result.
    """
    loaded = load(model_config, notify=terminal.note)
    streams = {path: read_tokens(path, loaded.tokenizer, tokens) for path in texts}
    records.write(
        run_record(
            "h2o-compare nll",
            model=loaded.name,
            policy=[config.policy for config in configs],
            window=[config.window for config in configs],
            tokens=tokens,
            seed=None,
        )
    )
    table = Table(title=f"{loaded.name}: nats per token, lower is better", title_justify="left")
    for column in ("text", "policy", "window", "tokens", "nll", "last half", "tok/s"):
        table.add_column(column, justify="left" if column in ("text", "policy") else "right", no_wrap=True)
    with progress_bars(terminal) as progress:
        for path, stream in streams.items():
            for config in configs:
                fed = within_context(loaded.model, config, stream)
                window = None if config.policy == "full" else config.window
                task = progress.add_task(f"{path.name} {config.policy} {window or ''}", total=len(fed) - 1)
                for result in stream_nll(loaded.model, config, fed):
                    progress.update(task, completed=result.done)
                records.write(
                    {
                        "type": "nll",
                        "text": str(path),
                        "policy": config.policy,
                        "window": window,
                        "tokens": result.done,
                        "nll": result.nll,
                        "nll_last_half": result.nll_last_half,
                        "tok_s": round(result.tok_s, 2),
                    }
                )
                figures = (
                    f"{result.done:,}",
                    f"{result.nll:.4f}",
                    f"{result.nll_last_half:.4f}",
                    f"{result.tok_s:.0f}",
                )
                table.add_row(path.name, config.policy, str(window or "-"), *figures)
    if not terminal.quiet:
        terminal.console.print(table)
