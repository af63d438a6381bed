"""The page of ``h2o-compare summarize``."""

from __future__ import annotations

from collections.abc import Sequence

from h2o_stream.ui.pages import Chart, Curve, Page, Record, TableData, or_dash

_HEADER = ("policy", "window", "ROUGE-1", "ROUGE-2", "ROUGE-L", "to full", "tokens", "tok/s")
_ROUGE = ("rouge1", "rouge2", "rougeL")


def page(run: Record, records: Sequence[Record]) -> Page:
    """ROUGE by policy and window."""
    title = f"{run['model']}, {run['requests']} requests, prompts of {run['prompt_tokens']:.0f} tokens in the mean"
    return Page(
        title,
        "ROUGE F-measures in %; to full: ROUGE-2 as a fraction of the full cache's",
        [TableData("", _HEADER, [_row(record, records) for record in records])],
        _charts(records, title),
    )


def _row(record: Record, records: Sequence[Record]) -> list[str]:
    full = next((other["rouge2"] for other in records if other["policy"] == "full"), None)
    return [
        record["policy"],
        or_dash(record["window"]),
        *("-" if record[name] is None else f"{100 * record[name]:.2f}" for name in _ROUGE),
        f"{record['rouge2'] / full:.3f}" if full and record["rouge2"] is not None else "-",
        f"{record['new_tokens'] / record['n']:.1f}",
        f"{record['tok_s']:.1f}",
    ]


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
