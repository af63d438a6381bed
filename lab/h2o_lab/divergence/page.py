"""The page of ``h2o-compare divergence``."""

from __future__ import annotations

from collections.abc import Sequence

from h2o_stream.ui.pages import Page, Record, TableData, listing

_HEADER = ("engine", "dtype", "mean KL", "p99", "first token", "same first choice")


def page(run: Record, records: Sequence[Record]) -> Page:
    """A table of the engines."""
    title = f"{run['model']}: divergence from the model in float32, {records[0]['tokens']:,} tokens one by one"
    legend = "KL divergence in nats; first token: after one token; same first choice: of the likeliest token"
    return Page(title, legend, [TableData("", _HEADER, [_row(record) for record in records])], [], _verdict(records))


def _row(record: Record) -> list[str]:
    figures = [f"{record[name]:.2g}" for name in ("kl", "kl_p99", "kl_first")]
    return [record["engine"], record["dtype"], *figures, f"{record['same_first_choice']:.1%}"]


def _verdict(records: Sequence[Record]) -> str:
    means = listing([f"{record['kl']:.2g} with {record['engine']}" for record in records])
    return f"The mean KL divergence from float32 in nats is {means}."
