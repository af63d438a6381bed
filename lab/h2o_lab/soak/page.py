"""The page of ``h2o-compare soak``."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from h2o_stream.base.memory import format_bytes
from h2o_stream.ui.pages import Chart, Curve, Page, Record, TableData

_HEADER = ("tokens seen", "read", "replies", "nll", "largest score", "cache", "process")
_PASSES = ("pass", "nll", "to the first")


def page(run: Record, records: Sequence[Record]) -> Page:
    """The stream in intervals, and the loss on the same text by passes."""
    title = f"{run['model']}, {run['dtype']}: a stream of {records[-1]['seen']:,} tokens, {run['policy'][0]}"
    title += f" with a window of {run['window'][0]}" if run["window"][0] else ""
    seen = [record["seen"] for record in records]
    passes: dict[str, list[float]] = {}
    for record in records:
        for number, losses in record["nll_by_pass"].items():
            passes.setdefault(number, []).extend(losses)
    first = fmean(passes["0"])
    means = {number: fmean(losses) for number, losses in passes.items()}
    return Page(
        title,
        "read and replies: tokens/s; after every turn all slots were looked through",
        [
            TableData("", _HEADER, [_row(record) for record in records]),
            TableData(
                "the same text again and again",
                _PASSES,
                [[str(int(number) + 1), f"{nll:.4f}", f"{nll - first:+.4f}"] for number, nll in means.items()],
            ),
        ],
        [
            _chart("soak-memory", title, "process, MiB", seen, [record["rss_bytes"] / (1 << 20) for record in records]),
            _chart("soak-speed", title, "replies, tokens/s", seen, [record["reply_tok_s"] for record in records]),
            Chart(
                "soak-loss",
                f"The same text, pass after pass\n{title}",
                ("pass", "nats per token"),
                [Curve("", [int(number) + 1 for number in means], list(means.values()))],
                (0.9 * first, 1.1 * first),
            ),
        ],
        _verdict(records, list(means.values())),
    )


def _verdict(records: Sequence[Record], losses: Sequence[float]) -> str:
    begin, end = records[0], records[-1]
    grown = (end["rss_bytes"] - begin["rss_bytes"]) / (1 << 20)
    return (
        f"From {begin['seen']:,} to {end['seen']:,} tokens the process changed by {grown:+.0f} MiB, replies went from "
        f"{begin['reply_tok_s']:.3g} to {end['reply_tok_s']:.3g} tokens/s, and the loss on the same text changed by "
        f"{losses[-1] - losses[0]:+.3f} nats."
    )


def _chart(name: str, title: str, quantity: str, seen: Sequence[int], values: Sequence[float]) -> Chart:
    top = 1.2 * max(values)
    return Chart(
        name, f"{quantity.partition(',')[0]}\n{title}", ("tokens seen", quantity), [Curve("", seen, values)], (0, top)
    )


def _row(record: Record) -> list[str]:
    return [
        f"{record['seen']:,}",
        f"{record['read_tok_s']:.0f}",
        f"{record['reply_tok_s']:.1f}",
        f"{record['nll']:.4f}",
        f"{record['largest_score']:.3g}",
        format_bytes(record["cache_bytes"]),
        format_bytes(record["rss_bytes"]),
    ]
