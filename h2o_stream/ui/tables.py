"""Tables at the end of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from h2o_stream.session.sessions import saved_sessions
from h2o_stream.ui.figures import size, speed
from h2o_stream.ui.pages import Figures, Page
from h2o_stream.ui.terminal import Terminal, one_line

if TYPE_CHECKING:
    from h2o_stream.models.packed_models import CachedFolder
    from h2o_stream.models.stores import StoredModel
    from h2o_stream.session.report import RunReport


def print_report(terminal: Terminal, report: RunReport, title: str) -> None:
    """Speed by tokens seen, and the run in three lines, on stderr."""
    if terminal.quiet:
        return
    table = Table(title=one_line(title), title_justify="left")
    for column in ("tokens seen", "prompt tokens", "prefill", "reply tokens", "decode"):
        table.add_column(column, justify="right", no_wrap=True)
    for start, end, part in report.by_length():
        table.add_row(
            f"{start:,} - {min(end, report.seen):,}",
            f"{part.prompt_tokens:,}",
            speed(part.prefill_tok_s),
            f"{part.new_tokens:,}",
            speed(part.decode_tok_s),
        )
    terminal.console.print(table)
    finishes = ", ".join(f"{reason} {count}" for reason, count in report.finishes.most_common()) or "no turn"
    terminal.note(f"{report.turns} turns ({finishes}), {report.seen:,} tokens seen, {report.evicted:,} evicted")
    terminal.note(f"cache {size(report.cache_bytes)}, peak memory of the process {size(report.peak_rss_bytes)}")
    if report.beyond_context:
        terminal.note("part of this was beyond the model's context: expect nonsense there", style="yellow")


def figures_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of many figures, narrow enough that none is cut; a first column of names is set to the left."""
    table = Table(title=one_line(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in header:
        table.add_column(one_line(column), justify="left" if column == "policy" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(one_line, row))
    return table


def markdown_page(page: Page) -> str:
    """A page's title and tables as Markdown."""
    legend = f" ({page.legend})" if page.legend else ""
    return "\n".join([f"{page.title}{legend}\n", *map(_markdown, page.tables)])


def _markdown(table: Figures) -> str:
    lines = [table.header, ["---:"] * len(table.header), *table.rows]
    title = f"{table.title}\n\n" if table.title else ""
    return title + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def sessions_table() -> Table:
    """Every session, the one that was used last first."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    saved = [(one_line(name), transcript) for name, transcript in saved_sessions()]
    saved.sort(key=lambda item: str(item[1].entries[-1].time) if item[1].entries else "", reverse=True)
    widths = {"session": max([7, *(len(name) for name, _ in saved)]), "turns": 5, "last used": 16}
    for column in ("session", "turns", "last used", "model", "first words"):
        table.add_column(
            column, justify="right" if column == "turns" else "left", min_width=widths.get(column), no_wrap=True
        )
    for name, transcript in saved:
        entries, header = transcript.entries, transcript.header
        last, first = (one_line(entries[-1].time), one_line(entries[0].prompt)) if entries else ("", "")
        model = one_line(f"{Path(str(header.model)).name} {header.policy}") if header else ""
        table.add_row(name, str(len(entries)), last[:16].replace("T", " "), model, first[:40])
    return table


def models_table(models: Sequence[StoredModel], kept: Sequence[CachedFolder]) -> Table:
    """What --model can name on this machine, and what --forget removes."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("model", "size", ""):
        table.add_column(column, justify="right" if column == "size" else "left", overflow="fold")
    rows = [(model.name, model.nbytes, model.source) for model in models]
    rows += [(folder.names[0], folder.nbytes, f"{folder.content}; --forget removes it") for folder in kept]
    for name, nbytes, place in rows:
        table.add_row(one_line(name), size(nbytes), one_line(place))
    return table
