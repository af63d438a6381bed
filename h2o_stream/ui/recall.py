"""Shows what recall finds: a line for each passage that is read again, and a table with the reasons."""

from __future__ import annotations

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from h2o_stream.recall.passage import Candidate, Gone, Recalled
from h2o_stream.recall.wholes import MAX_WHOLE
from h2o_stream.ui.terminal import Terminal, one_line

_WHY: dict[Gone, str] = {
    "never given": "was not found in what was said: no heading names it; paste it, or read it with /file",
    "off": "is no longer in the cache as a whole; /recall auto lets it be read again",
    "too long": f"is no longer in the cache as a whole, and too long to be read again ({MAX_WHOLE:,} tokens at most); "
    "name a part of it",
}

_MAX_EXCERPT = 500
"""Columns of a passage in the table; pieces of a chapter are longer."""

SPEAKERS = {"user": "you", "assistant": "model"}


def recalled_line(candidate: Candidate, width: int) -> str:
    """The line about a passage that is read again, in at most `width` columns."""
    doubt = "" if candidate.sure else ", which may not say it"
    return _cut(f"recalled from turn {candidate.passage.turn}{doubt}: {one_line(candidate.excerpt)}", width)


def recalled_lines(event: Recalled, width: int) -> list[str]:
    """A line for each passage that is read again, or about what is asked for as a whole."""
    whole = event.whole
    passages = [recalled_line(candidate, width) for candidate in event.candidates]
    if whole is None:
        return passages
    if event.gone:
        return [f"{one_line(whole.name)} {_WHY[event.gone]}", *passages]
    tokens, count = sum(piece.tokens for piece in event.candidates), len(event.candidates)
    size = f"{tokens:,} tokens of turn {whole.turn}" if whole.start else f"{tokens:,} tokens up to turn {whole.turn}"
    size += f" in {count} pieces" * (count > 1)
    return [_cut(f"reading {one_line(whole.name)} again, {size}: the cache no longer has it", width)]


def _cut(line: str, width: int) -> str:
    text = Text(line)
    text.truncate(width, overflow="ellipsis")
    return text.plain


def note_recalled(terminal: Terminal, event: Recalled) -> None:
    """Print these lines dim; that something is gone, even if quiet."""
    lines = recalled_lines(event, terminal.console.width - 1)
    if event.gone:
        terminal.error(lines.pop(0))
    for line in lines:
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
            _cut(one_line(candidate.excerpt), _MAX_EXCERPT),
            style="" if candidate.verdict == "recalled" else "dim",
        )
    return table
