"""Tables for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from h2o_stream.base.memory import format_bytes, peak_bytes
from h2o_stream.ui.format import format_speed, shade
from h2o_stream.ui.pages import Page, TableData
from h2o_stream.ui.terminal import Terminal, folded, one_line
from h2o_stream.ui.timeline import draw_timeline

if TYPE_CHECKING:
    from h2o_stream.models.other_tools import StoredModel
    from h2o_stream.models.packed_cache import CachedFolder
    from h2o_stream.session.report import RunReport


_ENDS = {
    "stop": "ended",
    "length": "cut at --max-tokens",
    "interrupted": "interrupted",
    "context": "ended at the context",
    "oom": "ended for lack of memory",
}
"""Why replies ended, in words."""


def print_report(terminal: Terminal, report: RunReport, title: str, context: int | None = None) -> None:
    """Print the speed by tokens seen, the course of speed and memory, and a summary in three lines."""
    if terminal.quiet:
        return
    table = Table(title=one_line(title), title_justify="left")
    for column in ("tokens seen", "prompt tokens", "prefill", "reply tokens", "decode"):
        table.add_column(column, justify="right", no_wrap=True)
    for start, end, timings in report.by_length():
        table.add_row(
            f"{start:,} - {min(end, report.seen):,}",
            f"{timings.prompt_tokens:,}",
            format_speed(timings.prefill_tok_s),
            f"{timings.new_tokens:,}",
            format_speed(timings.decode_tok_s),
        )
    terminal.console.print(table)
    for line in draw_timeline(report.timeline, min(terminal.console.width, 100), 3, context):
        terminal.console.print(line)
    ends = ", ".join(f"{count} {_ENDS[reason]}" for reason, count in report.finishes.most_common())
    turns = "1 turn" if report.turns == 1 else f"{report.turns:,} turns"
    terminal.note(f"{turns} ({ends or 'none ended'}); {report.seen:,} tokens seen, {report.evicted:,} evicted")
    terminal.note(f"cache {format_bytes(report.cache_bytes)}, peak memory of the process {format_bytes(peak_bytes())}")
    if report.beyond_context:
        terminal.note("part of this run was beyond the model's context; expect poor output there", style="yellow")


def data_table(data: TableData, width: int) -> Table:
    """A compact table of numbers. A column of policy names is left-aligned, and cells have their shades.

    If it does not fit `width`, columns move together and their names are broken between words. If that is not enough,
    names of policies are broken: a cut number would be worthless.
    """
    header, rows = [one_line(column) for column in data.header], data.rows
    shaded = 2 if data.shades else 0
    cells = [[cell_len(one_line(row[place])) + shaded for row in rows] for place in range(len(header))]
    needed = sum(max([cell_len(name), *column]) + 2 for name, column in zip(header, cells, strict=True))
    narrow = needed > width
    table = Table(
        title=one_line(data.title),
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 0 if narrow else 1, 0, 0),
        show_edge=False,
    )
    for name in header:
        policy = name == "policy"
        table.add_column(
            name.replace(" ", "\n") if narrow else name,
            justify="left" if policy else "right",
            no_wrap=not (narrow and policy),
            overflow="fold",
        )
    for number, row in enumerate(rows):
        shades = data.shades[number] if data.shades else [None] * len(row)
        table.add_row(*(_cell(text, value) for text, value in zip(row, shades, strict=True)))
    return table


def _cell(text: str, value: float | None) -> str | Text:
    """A cell, black on its shade if it has one."""
    if value is None:
        return one_line(text)
    red, green, blue = shade(value)
    return Text(f" {one_line(text)} ", style=f"black on rgb({red},{green},{blue})")


def markdown_page(page: Page) -> str:
    """A page's title and tables as Markdown."""
    legend = f" ({page.legend})" if page.legend else ""
    return "\n".join(
        [f"{page.title}{legend}\n", *map(_markdown, page.tables), *([f"{page.verdict}\n"] if page.verdict else [])]
    )


def _markdown(table: TableData) -> str:
    lines = [table.header, ["---:"] * len(table.header), *table.rows]
    title = f"{table.title}\n\n" if table.title else ""
    return title + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def models_table(models: Sequence[StoredModel], kept: Sequence[CachedFolder]) -> Table:
    """Models that --model can name on this machine, and folders that --forget removes."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("model", "size", ""):
        table.add_column(column, justify="right" if column == "size" else "left")
    rows = [(model.name, model.nbytes, model.source) for model in models]
    rows += [(folder.names[0], folder.nbytes, f"{folder.content}; --forget removes it") for folder in kept]
    for name, nbytes, place in rows:
        table.add_row(one_line(name), format_bytes(nbytes), one_line(place))
    return folded(table)
