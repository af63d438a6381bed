"""The page of ``h2o-compare tasks --suite ruler``."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from h2o_lab.phrases import share, with_recall
from h2o_lab.ruler import needles
from h2o_stream.ui.pages import Chart, Curve, Page, Record, TableData, curve_name, label, or_dash

_NO_CONTEXT = "no context"


def page(run: Record, records: Sequence[Record]) -> Page:
    """A table for each form and length: a row for each policy, a column for each task. With depths a heatmap."""
    if run.get("depths"):
        return needles.page(run, records)
    cells = dict.fromkeys((record["form"], record["length"]) for record in records)
    tables = [
        _table(form, length, [record for record in records if (record["form"], record["length"]) == (form, length)])
        for form, length in cells
    ]
    title = f"{run['model']}, {run['dtype']}: tasks after RULER, {run['items']} contexts each"
    legend = (
        "accuracy, margin of the right answer in nats, [margin recovery: the part of the full cache's gain from the "
        "context that is kept, and its 95% interval]"
    )
    return Page(title, legend, tables, _charts(records, title), _verdict(records))


def _verdict(records: Sequence[Record]) -> str:
    """What each policy keeps of the full cache's gain, or without a full cache its accuracy."""
    field = "recovery" if any(record["recovery"] is not None for record in records) else "accuracy"
    values: dict[str, list[float]] = {}
    for record in records:
        if record[field] is not None and (field == "accuracy" or record["policy"] != "full"):
            values.setdefault(with_recall(curve_name(record), record), []).append(record[field])
    what = ("keeps", "of the full cache's gain from the context") if field == "recovery" else ("gives", "right answers")
    return share({name: fmean(found) for name, found in values.items()}, "In the mean of the tasks", *what)


def _table(form: str, length: int, records: Sequence[Record]) -> TableData:
    tasks = list(dict.fromkeys(record["task"] for record in records))
    nothing = {record["task"]: f"{record['margin_nothing']:+.2f}" for record in records}
    rows = [[_NO_CONTEXT, "-", *(nothing[task] for task in tasks), "-"]]
    for group in _runs(records):
        found = {record["task"]: _cell(record) for record in group}
        rows.append(
            [_name(group[0]), or_dash(group[0]["window"]), *(found[task] for task in tasks), _mean_recovery(group)]
        )
    return TableData(f"{form}, {length:,} tokens", ["policy", "window", *tasks, "mean recovery"], rows)


def _name(record: Record) -> str:
    return with_recall(label(record), record)


def _runs(records: Sequence[Record]) -> list[list[Record]]:
    """The records of each policy, mode of recall and window, in order."""
    runs: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        runs.setdefault((_name(record), record["window"]), []).append(record)
    return list(runs.values())


def _cell(record: Record) -> str:
    cell = f"{record['accuracy']:.0%} {record['margin']:+.2f}"
    if record["recovery"] is None or record["policy"] == "full":
        return cell
    low, high = record["recovery_interval"]
    return f"{cell} [{record['recovery']:.2f}, {low:.2f} to {high:.2f}]"


def _mean_recovery(records: Sequence[Record]) -> str:
    found = [record["recovery"] for record in records if record["recovery"] is not None]
    return f"{fmean(found):.2f}" if found else "-"


def _charts(records: Sequence[Record], title: str) -> list[Chart]:
    """Margin recovery by window, if there are several: the mean of the tasks at each form and length."""
    charts = []
    for form, length in dict.fromkeys((record["form"], record["length"]) for record in records):
        points: dict[str, dict[int, list[float]]] = {}
        for record in records:
            if (record["form"], record["length"]) == (form, length) and record["window"] and record["recovery"]:
                points.setdefault(_name(record), {}).setdefault(record["window"], []).append(record["recovery"])
        curves = [
            Curve(name, sorted(found), [fmean(found[window]) for window in sorted(found)], name)
            for name, found in points.items()
            if len(found) > 1
        ]
        if curves:
            heading = f"Margin recovery, {form}, {length:,} tokens\n{title}"
            charts.append(Chart(f"ruler-{form}-{length}", heading, ("window", "recovery"), curves, None, "x"))
    return charts
