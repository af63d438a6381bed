"""Shows ``h2o-compare recall``: a table of margins by policy and distance, and records."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress
from torch import Tensor

from h2o_stream.compare.nll import read_tokens
from h2o_stream.compare.recall import Plan, ask, check_context, plan_questions
from h2o_stream.compare.results import Results, identity, writing
from h2o_stream.config import CacheConfig, ModelConfig
from h2o_stream.models.load import load
from h2o_stream.session.records import Records, run_record
from h2o_stream.ui.progress import progress_bars
from h2o_stream.ui.tables import figures_table, markdown_table
from h2o_stream.ui.terminal import Terminal

_LEGEND = "mean margin of the right word in nats, and how often it is the likeliest"
_LONGEST = 1 << 16
"""Tokens of a text that are looked at."""


def compare_recall(
    model_config: ModelConfig,
    configs: Sequence[CacheConfig],
    text: Path,
    facts: int,
    distances: Sequence[int],
    out: Path | None,
    terminal: Terminal,
    records: Records,
) -> None:
    """Every policy on the same stream and questions; only those count that the full cache answers.

    Args:
        model_config: which model.
        configs: ``full`` first, then the policies, windows and seeds.
        text: a file of plain text, in which the facts are planted.
        facts: how many.
        distances: tokens between a fact and its question.
        out: a folder for the table and finished parts; None for neither.
        terminal: where progress and the table go.
        records: gets a record for the run and one per policy and distance.

    Raises:
        DataError: the text cannot be read or is too short, or the folder not be written.
        ConfigError: the stream does not fit the model's context.
    """
    results = Results(out)
    loaded = load(model_config, notify=terminal.note)
    plan = plan_questions(loaded.tokenizer, read_tokens(text, loaded.tokenizer, _LONGEST), facts, distances)
    check_context(loaded.model, plan)
    records.write(
        run_record(
            "h2o-compare recall",
            model=loaded.name,
            policy=[config.policy for config in configs],
            window=[config.window for config in configs],
            tokens=len(plan.tokens),
            facts=facts,
            distances=list(distances),
            seed=[config.seed for config in configs],
        )
    )
    digest = hashlib.sha256(str(plan).encode()).hexdigest()
    margins: list[Tensor] = []
    with progress_bars(terminal) as progress:
        for config in configs:
            key = {"what": "recall", "questions": digest, **identity(loaded.model, config)}
            margins.append(_measured(loaded.model, config, plan, results, key, progress))
    passed = margins[0] > 0
    rows = []
    for config, own in zip(configs, margins, strict=True):
        cells = [_cell(own[:, i][passed[:, i]]) for i in range(len(distances))]
        rows.append([config.label, "-" if config.policy == "full" else str(config.window), *map(_shown, cells)])
        for distance, (margin, recalled), asked in zip(distances, cells, passed.sum(0).tolist(), strict=True):
            records.write(
                {
                    "type": "recall",
                    "text": str(text),
                    "policy": config.policy,
                    "window": None if config.policy == "full" else config.window,
                    "seed": config.seed,
                    "distance": distance,
                    "facts": asked,
                    "margin": margin,
                    "recalled": recalled,
                }
            )
    title = f"{loaded.name}, {len(plan.tokens):,} tokens of {text.name}: {_LEGEND}"
    header = [
        "policy",
        "window",
        *(f"{distance:,} ({n})" for distance, n in zip(distances, passed.sum(0), strict=True)),
    ]
    if out is not None:
        with writing(out):
            page = markdown_table(f"{title}; (facts) by distance", header, rows)
            (out / "recall.md").write_text(page, encoding="utf-8")
        terminal.note(f"the table is in {out}")
    if not terminal.quiet:
        terminal.console.print(f"{title}; in brackets: facts the full cache can tell", markup=False, highlight=False)
        terminal.console.print(figures_table("tokens between the fact and the question", header, rows))


def _measured(
    model: Any, config: CacheConfig, plan: Plan, results: Results, key: dict[str, Any], progress: Progress
) -> Tensor:
    """The margins of one policy, from the folder if they are there."""
    task = progress.add_task(f"{config.label} {config.window}", total=len(plan.tokens))
    if stored := results.load(key):
        progress.update(task, completed=len(plan.tokens))
        return stored[0]
    for event in ask(model, config, plan):
        if isinstance(event, Tensor):
            results.store(key, event, {})
            return event
        progress.update(task, completed=event.done)
    raise AssertionError("a stream of questions ends with its margins")


def _cell(margins: Tensor) -> tuple[float | None, float | None]:
    if not len(margins):
        return None, None
    return float(margins.mean()), float((margins > 0).float().mean())


def _shown(cell: tuple[float | None, float | None]) -> str:
    margin, recalled = cell
    return "-" if margin is None or recalled is None else f"{margin:+.2f} {recalled:4.0%}"
