"""How the memory behind the window is described."""

from __future__ import annotations

from h2o_stream.base.memory import format_bytes
from h2o_stream.session.memory import MemoryReport

_MAX_TURNS = 3
"""Maximum number of turns that are named."""


def memory_lines(report: MemoryReport) -> list[str]:
    """What it holds, and what the last token found in it."""
    forgotten = f"; the oldest {report.forgotten:,} are forgotten" if report.forgotten else ""
    lines = [
        f"memory: {report.tokens:,} tokens of {report.heads} heads, {format_bytes(report.nbytes)} on disk of at most "
        f"{format_bytes(report.limit_bytes)}{forgotten}"
    ]
    if report.turns:
        turns = ", ".join(f"turn {turn} ({count})" for turn, count in report.turns[:_MAX_TURNS])
        lines.append(f"found again, by how many of {report.queries} query heads: {turns}")
    return lines
