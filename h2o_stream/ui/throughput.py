"""Shows ``h2o-compare throughput``: progress, a record for each load, and a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

from h2o_stream.compare.nll import read_tokens
from h2o_stream.compare.results import Results, identity, writing
from h2o_stream.compare.throughput import Load, generate, loads, rows_of
from h2o_stream.config import CacheConfig, ModelConfig, Shape
from h2o_stream.errors import DataError
from h2o_stream.models.load import load as load_model
from h2o_stream.session.records import Records, run_record
from h2o_stream.ui.figures import size
from h2o_stream.ui.progress import progress_bars
from h2o_stream.ui.tables import figures_table, markdown_table
from h2o_stream.ui.terminal import Terminal

_HEADER = ("shape", "policy", "window", "batch", "cache", "tokens/s", "seconds", "of full")
_TEXT = 1 << 18
"""Tokens of a text that are used."""


def compare_throughput(
    model_config: ModelConfig,
    shapes: Sequence[Shape],
    configs: Callable[[Shape], Sequence[CacheConfig]],
    budget: int,
    rounds: int,
    compile: bool,
    text: Path,
    out: Path | None,
    terminal: Terminal,
    records: Records,
) -> None:
    """Time the largest batches that fit, and equal ones.

    Args:
        model_config: which model.
        shapes: of the requests.
        configs: the policies for a shape, ``full`` first.
        budget: bytes for the cache of a batch.
        rounds: times that each load is answered, in turn; the median counts.
        compile: let single tokens go through compiled graphs.
        text: a file that prompts are cut from.
        out: a folder for the table and finished parts; None for neither.
        terminal: where progress and the table go.
        records: gets a record for the run and one for each load.

    Raises:
        DataError: the text cannot be read or is empty, or the folder not be written.
        ConfigError: a row does not fit into the budget or the context.
    """
    results = Results(out)
    loaded = load_model(model_config, notify=terminal.note)
    tokens = read_tokens(text, loaded.tokenizer, _TEXT)
    if not tokens:
        raise DataError(f"--text {text}: the file is empty; give a text to cut prompts from")
    records.write(
        run_record(
            "h2o-compare throughput",
            model=loaded.name,
            policy=[config.policy for config in configs(shapes[0])],
            window=[config.window for config in configs(shapes[0])],
            seed=None,
            shapes=list(map(str, shapes)),
            cache_budget=budget,
        )
    )
    rows: list[list[str]] = []
    with progress_bars(terminal) as progress:
        task = progress.add_task("", total=None)
        for shape in shapes:
            planned: list[Load] = []
            for event in loads(loaded.model, shape, configs(shape), budget, tokens):
                if isinstance(event, Load):
                    planned.append(event)
                else:
                    progress.update(task, description=event.text)
            seconds: list[list[float]] = [[] for _ in planned]
            for number in range(rounds):
                for load, taken in zip(planned, seconds, strict=True):
                    what = f"{shape}: {load.config.label}, batch {load.batch}, round {number + 1} of {rounds}"
                    progress.update(task, description=what)
                    key = _key(loaded.model, load, number, text, compile)
                    if stored := results.load(key):
                        taken.append(float(stored[0]))
                        continue
                    taken.append(generate(loaded.model, load, rows_of(tokens, load), compile))
                    results.store(key, torch.tensor(taken[-1], dtype=torch.float64), {})
            medians = [median(taken) for taken in seconds]
            for load, took in zip(planned, medians, strict=True):
                record = _record(load, took, str(loaded.model.dtype).removeprefix("torch."))
                records.write(record)
                rows.append(_row(load, record, planned[0], medians[0]))
    title = f"{loaded.name}, cache of {size(budget)}: generated tokens/s of the whole batch, prompts included"
    if out is not None:
        with writing(out):
            (out / "throughput.md").write_text(markdown_table(title, _HEADER, rows), encoding="utf-8")
        terminal.note(f"the table is in {out}")
    if not terminal.quiet:
        terminal.console.print(figures_table(title, _HEADER, rows))


def _key(model: Any, load: Load, number: int, text: Path, compile: bool) -> dict[str, Any]:
    timed = {
        "compile": compile,
        "shape": str(load.shape),
        "batch": load.batch,
        "round": number,
        "threads": torch.get_num_threads(),
    }
    return {"what": "throughput", "text": str(text), **timed, **identity(model, load.config)}


def _record(load: Load, seconds: float, dtype: str) -> dict[str, Any]:
    full = load.config.policy == "full"
    return {
        "type": "throughput",
        "engine": "transformers" if full else "h2o-stream",
        "policy": load.config.policy,
        "window": None if full else load.config.window,
        **asdict(load.shape),
        "batch": load.batch,
        "largest": load.largest,
        "row_bytes": load.row_bytes,
        "cache_bytes": load.row_bytes * load.batch,
        "seconds": round(seconds, 3),
        "tok_s": round(load.batch * load.shape.new / seconds, 2),
        "dtype": dtype,
    }


def _row(load: Load, record: dict[str, Any], full: Load, full_s: float) -> list[str]:
    ratio = record["tok_s"] / (full.batch * full.shape.new / full_s)
    return [
        str(load.shape),
        load.config.label,
        "-" if record["window"] is None else str(record["window"]),
        f"{load.batch}" if load.largest else f"{load.batch} (as full)",
        size(record["cache_bytes"]),
        f"{record['tok_s']:.1f}",
        f"{record['seconds']:.1f}",
        f"{ratio:.2f}",
    ]
