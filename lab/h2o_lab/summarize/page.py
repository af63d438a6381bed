"""The page of ``h2o-compare summarize``."""

from __future__ import annotations

from collections.abc import Sequence

from h2o_lab.phrases import counted, share
from h2o_stream.ui.pages import Chart, Curve, Page, Record, TableData, listing, or_dash

_HEADER = ("policy", "window", "n", "ROUGE-1", "ROUGE-2", "ROUGE-L", "to full", "tokens", "tok/s")
_ROUGE = ("rouge1", "rouge2", "rougeL")


def page(run: Record, records: Sequence[Record]) -> Page:
    """ROUGE by policy and window."""
    requests = counted(run["requests"], "request")
    title = f"{run['model']}, {requests}, prompts of {run['prompt_tokens']:.0f} tokens in the mean"
    return Page(
        title,
        "ROUGE F-measures in %; to full: ROUGE-2 as a fraction of the full cache's on the same n requests",
        [TableData("", _HEADER, [_row(record, records) for record in records])],
        _charts(records, title),
        _verdict(records),
    )


def _verdict(records: Sequence[Record]) -> str:
    """ROUGE-2 at the smallest window, as a fraction of the full cache's."""
    full = next((record["rouge2"] for record in records if record["policy"] == "full"), None)
    smallest = min((record["window"] for record in records if record["window"]), default=None)
    rates = {
        record["policy"]: record["rouge2"] / full
        for record in records
        if full and record["window"] == smallest and record["rouge2"] is not None
    }
    kept = share(rates, f"At window {smallest}", "keeps", "of the full cache's ROUGE-2")
    unused = sorted({record["window"] for record in records if record["window"] and record.get("evicting") == 0})
    windows = listing([f"{window:,}" for window in unused])
    return f"{kept} At {windows} nothing was evicted: no request exceeds that.".strip() if unused else kept


def _row(record: Record, records: Sequence[Record]) -> list[str]:
    same = [other for other in records if other["policy"] == "full" and other["n"] == record["n"]]
    full = same[0]["rouge2"] if same else None
    return [
        record["policy"],
        _window(record),
        str(record["n"]),
        *("-" if record[name] is None else f"{100 * record[name]:.2f}" for name in _ROUGE),
        f"{record['rouge2'] / full:.3f}" if full and record["rouge2"] is not None else "-",
        f"{record['new_tokens'] / record['n']:.1f}",
        f"{record['tok_s']:.1f}",
    ]


def _window(record: Record) -> str:
    """The window, or the smallest and the largest if ratios set one for each request."""
    low, high = record.get("windows") or (record["window"], record["window"])
    return or_dash(record["window"]) if low == high else f"{low} to {high}"


def _charts(records: Sequence[Record], title: str) -> list[Chart]:
    windows = sorted({record["window"] for record in records if record["window"]})
    curves = []
    for policy in dict.fromkeys(record["policy"] for record in records if record["rouge2"] is not None):
        by_window = {record["window"]: 100 * record["rouge2"] for record in records if record["policy"] == policy}
        points = {window: by_window.get(window, by_window.get(None)) for window in windows}
        curves.append(Curve(policy, list(points), [value for value in points.values() if value is not None]))
    if not (windows and curves):
        return []
    return [Chart("summarize", f"ROUGE-2 by window\n{title}", ("window, tokens", "ROUGE-2, %"), curves)]
