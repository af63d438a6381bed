"""Draws decode speed and cache memory over the tokens seen, a few rows high, with the trained context as a mark."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from h2o_stream.base.memory import format_bytes
from h2o_stream.session.report import Timeline

BLOCKS = " ▁▂▃▄▅▆▇█"

_LABEL = 11
"""Columns left of a line."""

_NEAR = 4
"""The context is on the axis once this fraction of it was seen."""

_MARGIN = 1.15
"""The axis ends beyond the context, so that what comes after it has room."""


def draw_timelines(timelines: Sequence[Timeline], width: int, rows: int, context: int | None) -> list[list[Text]]:
    """The lines of some runs, drawn to the same scales so that they can be compared by eye.

    Each of the two lines has so many rows. The context that the model was trained for is marked on the axis.
    """
    seen = max(timeline.seen for timeline in timelines)
    near = context is not None and seen * _NEAR >= context
    end = max(seen, int(context * _MARGIN) + 1 if near and context else 0, 1)
    count = max(width - _LABEL, 8)
    mark = context * count // end if near and context else None
    parts = [timeline.columns(end, count) for timeline in timelines]
    speeds = [[entry.decode_tok_s if entry else 0.0 for entry in part] for part in parts]
    memory = [_joined([entry.cache_bytes if entry else 0 for entry in part]) for part in parts]
    fastest, largest = (max((max(values) for values in side), default=0.0) for side in (speeds, memory))
    return [
        [
            *_line(speed, rows, fastest, f"{fastest:.0f} tok/s" if fastest else "- tok/s", "green", mark),
            *_line(bytes_held, rows, largest, format_bytes(int(largest)), "magenta", mark),
            *_axis(count, timeline.seen, context, mark),
        ]
        for timeline, speed, bytes_held in zip(timelines, speeds, memory, strict=True)
    ]


def draw_timeline(timeline: Timeline, width: int, rows: int, context: int | None) -> list[Text]:
    """The lines of one run, see `draw_timelines`."""
    return draw_timelines([timeline], width, rows, context)[0]


def bars(values: Sequence[float], rows: int, top: float) -> list[str]:
    """Columns of blocks, the upper row first. Every value above 0 shows."""
    steps = [min(max(round(8 * rows * value / top), 1), 8 * rows) if value and top else 0 for value in values]
    return ["".join(BLOCKS[min(max(step - 8 * row, 0), 8)] for step in steps) for row in reversed(range(rows))]


def _line(values: list[float], rows: int, top: float, label: str, style: str, mark: int | None) -> list[Text]:
    lines = []
    for row, drawn in enumerate(bars(values, rows, top)):
        line = Text(f"{label if row == 0 else '':>{_LABEL - 2}} ", "dim", no_wrap=True)
        line.append("│", "dim")
        if mark is None:
            line.append(drawn, style)
        else:
            line.append(drawn[:mark], style)
            line.append("┊" if drawn[mark] == " " else drawn[mark], "yellow")
            line.append(drawn[mark + 1 :], style)
        lines.append(line)
    return lines


def _axis(count: int, seen: int, context: int | None, mark: int | None) -> list[Text]:
    """What the columns mean: tokens seen so far, and the context."""
    label = f"{seen:,} tokens seen"
    indent = " " * (_LABEL - 2) + "0└"
    if mark is None or context is None:
        later = f"{label} · context {context:,} later" if context else label
        shown = later if len(later) <= count else label
        return [Text.assemble((indent, "dim"), (shown.rjust(count, "─")[-count:], "dim"))]
    name = f"context {context:,}"
    start = max(min(mark - len(name), count - len(name) - 1), 0)
    axis = f"{label}".ljust(start, "─")[:start] if len(label) < start else "─" * start
    rest = "─" * (count - start - len(name) - 1)
    line = Text.assemble((f"{indent}{axis}", "dim"), (f"{name}┘", "yellow"), (rest, "dim"))
    line.truncate(len(indent) + count)
    return [line]


def _joined(values: list[int]) -> list[float]:
    """Straight lines between measurements, and the first one before them. Nothing follows the last."""
    measured = [number for number, value in enumerate(values) if value]
    joined = [0.0] * len(values)
    for start, end in zip([-1, *measured], measured, strict=False):
        low, high = values[start if start >= 0 else end], values[end]
        for number in range(start + 1, end + 1):
            joined[number] = high + (low - high) * (end - number) / (end - start)
    return joined
