"""Shows sessions: all of them, what was found in them, and the last words of one that is resumed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from h2o_stream.base.memory import format_bytes
from h2o_stream.config import AUTOMATIC_BYTES
from h2o_stream.errors import DataError
from h2o_stream.session.automatic import automatic_folders
from h2o_stream.session.folders import saved_sessions
from h2o_stream.session.search import MARKS, Match, search
from h2o_stream.session.transcript import Entry
from h2o_stream.ui.terminal import Terminal, folded, one_line

NOT_KEPT = "Nothing of this chat is kept here. "

_MAX_MATCHES = 20

_TIME_LETTERS, _MAX_LETTERS = len("2026-01-01 12:00"), 40
"""Letters of a time, and most letters of first words."""

_SHOWN_TURNS, _SHOWN_LETTERS = 2, 1200
"""How many exchanges of a resumed session are shown, and how much of each text."""

_SHOWN_LINES, _SHOWN_PROMPT_LINES = 12, 3
"""Lines of a reply and of a message."""


def show_sessions(terminal: Terminal, console: Console) -> None:
    """All sessions, the one used last first: the table on this console, and how much of the disk they take."""
    folders = automatic_folders()
    automatic = {folder.name for folder, _ in folders}
    saved = [(name, transcript) for name, transcript in saved_sessions() if transcript.header]
    saved.sort(key=lambda item: item[1].entries[-1].time if item[1].entries else "", reverse=True)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("session")
    table.add_column("turns", justify="right", no_wrap=True)
    for column in ("last used", "model", "first words"):
        table.add_column(column, no_wrap=True)
    names = max([len("session"), *(cell_len(name) for name, _ in saved)])
    room = max(console.width - names - len("turns") - _TIME_LETTERS - 2 * len(table.columns), 2 * len("first words"))
    for name, transcript in saved:
        entries, header = transcript.entries, transcript.header
        last, first = (entries[-1].time, one_line(entries[0].prompt)) if entries else ("", "")
        model = one_line(f"{Path(header.model).name} {header.policy}") if header else ""
        style = "dim" if name in automatic else ""
        cells = one_line(name), str(len(entries)), _minute(last), _cut(model, room // 2), _cut(first, room // 2)
        table.add_row(*cells, style=style)
    console.print(folded(table))
    if folders:
        size = format_bytes(sum(nbytes for _, nbytes in folders))
        were = "was" if len(folders) == 1 else "were"
        terminal.note(
            f"{len(folders)} of them {were} named by h2o-chat, {size} in all; above {format_bytes(AUTOMATIC_BYTES)} "
            "the oldest go. --rename OLD NEW keeps one, --remove NAME removes one",
            style="dim",
        )


def show_matches(console: Console, words: str) -> None:
    """Where all of the words were said, in any session; raises DataError if there are none, or they were never said."""
    if not (matches := search(words, _MAX_MATCHES)):
        raise DataError(f"nothing was said about {words!r} in any session")
    table = Table("session", "turn", "when", "what was said", box=None, padding=(0, 2, 0, 0))
    for match in matches:
        table.add_row(one_line(match.session), str(match.turn), _minute(match.time), _excerpt(match))
    console.print(folded(table))


def _excerpt(match: Match) -> Text:
    text, start, end = Text(), *MARKS
    for number, part in enumerate(match.excerpt.replace(end, start).split(start)):
        text.append(part, "bold" if number % 2 else "")
    return text


def _minute(time: str) -> str:
    return one_line(time)[:_TIME_LETTERS].replace("T", " ")


def _cut(text: str, width: int) -> Text:
    cut = Text(text)
    cut.truncate(min(width, _MAX_LETTERS), overflow="ellipsis")
    return cut


def show_resumed(terminal: Terminal, name: str, entries: Sequence[Entry]) -> None:
    """Say that a session was resumed; a person sees its last exchanges, too."""
    last = " ".join(entries[-1].prompt.split())
    terminal.note(f"session {name} resumed after turn {entries[-1].turn}: {last[:60]}", style="dim")
    if terminal.interactive and not terminal.quiet:
        for entry in entries[-_SHOWN_TURNS:]:
            terminal.console.print(f"> {_beginning(entry.prompt, _SHOWN_PROMPT_LINES)}", style="dim")
            if entry.text:
                terminal.console.print(_beginning(entry.text, _SHOWN_LINES))


def _beginning(text: str, max_lines: int) -> str:
    lines = text.strip().split("\n")
    shown = "\n".join(lines[:max_lines])[:_SHOWN_LETTERS]
    return shown if len(shown) == len(text.strip()) else f"{shown.rstrip()} …"
