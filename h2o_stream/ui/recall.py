"""Shows what recall finds: a line for each passage that is read again, and a table with the reasons."""

from __future__ import annotations

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from h2o_stream.recall.passage import Candidate, Recalled
from h2o_stream.ui.terminal import Terminal, one_line

SPEAKERS = {"user": "you", "assistant": "model"}


def recalled_line(candidate: Candidate, width: int) -> str:
    """The line about a passage that is read again, in at most `width` columns."""
    line = Text(f"recalled from turn {candidate.passage.turn}: {one_line(candidate.excerpt)}")
    line.truncate(width, overflow="ellipsis")
    return line.plain


def recalled_lines(event: Recalled, width: int) -> list[str]:
    """A line for each passage that is read again."""
    return [recalled_line(candidate, width) for candidate in event.candidates]


def note_recalled(terminal: Terminal, event: Recalled) -> None:
    """Print these lines dim, unless quiet."""
    for line in recalled_lines(event, terminal.console.width - 1):
        terminal.note(line, style="dim")


def candidates_table(candidates: Iterable[Candidate]) -> Table:
    """The passages that were found for a message, and why they are read again or not."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in ("turn", "score", "held"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("said", no_wrap=True)
    table.add_column("found by", overflow="fold", ratio=1)
    table.add_column("passage", overflow="fold", ratio=3)
    for candidate in candidates:
        table.add_row(
            str(candidate.passage.turn),
            f"{candidate.score:.2f}",
            f"{candidate.held:.0%}",
            candidate.verdict,
            SPEAKERS[candidate.passage.role],
            ", ".join(map(one_line, candidate.terms)) or "other words",
            one_line(candidate.excerpt),
            style="" if candidate.verdict == "recalled" else "dim",
        )
    return table
