"""The page of ``h2o-compare tasks``."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from h2o_lab.book import page as book
from h2o_lab.phrases import share
from h2o_lab.ruler import page as ruler
from h2o_stream.ui.pages import Page, Record, TableData, label

_METRICS = ("acc_norm", "acc", "exact_match")
"""Metrics for the table; the first one that a task has is used."""


def page(run: Record, records: Sequence[Record]) -> Page:
    """A row for each policy, a column for each task; the other suites have their own pages."""
    if run.get("suite") == "ruler":
        return ruler.page(run, records)
    if run.get("suite") == "book":
        return book.page(run, records)
    tasks = run["tasks"]
    documents = {record["task"]: record["documents"] for record in records}
    policies = dict.fromkeys((label(record), record["window"]) for record in records)
    rows, means = [], dict[str, float]()
    for policy, window in policies:
        same = [record for record in records if (label(record), record["window"]) == (policy, window)]
        metrics = {record["task"]: next(record[name] for name in _METRICS if name in record) for record in same}
        means[f"{policy} {window or ''}".strip()] = fmean(metrics.values())
        kept = "all" if policy == "full" else str(window) if run["ratio"] is None else f"{run['ratio']:.0%}"
        rows.append(
            [policy, kept, *(f"{100 * metrics[task]:.1f}" for task in tasks), f"{100 * fmean(metrics.values()):.1f}"]
        )
    header = ["policy", "kept", *(f"{task} ({documents[task]})" for task in tasks), "mean"]
    return Page(
        f"{run['model']}, {run['dtype']}: accuracy on tasks of the lm-evaluation-harness, %",
        "kept: tokens of each context that answers can attend to; in brackets: documents",
        [TableData("", header, rows)],
        verdict=share(means, "In the mean of the tasks", "gives", "right answers"),
    )
