"""Formats numbers for people."""

from __future__ import annotations

from h2o_stream.cache.counts import CacheCounts
from h2o_stream.session.turn import Turn


def format_bytes(nbytes: int) -> str:
    """Bytes with a binary unit: 11.7 MiB."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def format_speed(tokens_per_second: float) -> str:
    """Tokens per second, or a dash if there are none yet."""
    return f"{tokens_per_second:,.1f} tok/s" if tokens_per_second else "- tok/s"


def format_share(done_bytes: int, total_bytes: int) -> str:
    """Two byte counts in one unit: 4.2/15.0 GiB."""
    total, unit = format_bytes(total_bytes).split()
    done = done_bytes / total_bytes * float(total) if total_bytes else 0.0
    return f"{done:.{1 if '.' in total else 0}f}/{total} {unit}"


def format_duration(seconds: float) -> str:
    """An estimated time, rounded: 38 s, 4 min, 2.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


SLOT_COLORS = {"sinks": "cyan", "pinned": "blue", "heavy": "red", "recent": "green", "free": "bright_black"}
"""What slots are used for, and the color of each use."""


def slot_bar(counts: CacheCounts, width: int) -> list[tuple[str, str]]:
    """The slots of a window as a bar: pairs of a color and a run of blocks. Empty without a window.

    Every use that has a slot gets at least one block.
    """
    if not counts.window:
        return []
    uses = [(color, getattr(counts, name)) for name, color in SLOT_COLORS.items()]
    blocks = [max(round(width * count / counts.window), min(count, 1)) for _, count in uses]
    blocks[blocks.index(max(blocks))] += width - sum(blocks)
    return [
        (color, ("·" if color == "bright_black" else "█") * length)
        for (color, _), length in zip(uses, blocks, strict=True)
        if length > 0
    ]


def status_line(counts: CacheCounts, decode_tok_s: float, rss_bytes: int) -> str:
    """The text beside the bar of slots."""
    return (
        f"seen {counts.seen:,} evicted {counts.evicted:,} · {format_speed(decode_tok_s)} · "
        f"cache {format_bytes(counts.nbytes)} of {format_bytes(rss_bytes)}"
    )


def turn_line(turn: Turn) -> str:
    """What a turn took, in less than 80 characters."""
    timings, counts = turn.timings, turn.counts
    limit = f" of {counts.window:,}" if counts.window else ""
    return (
        f"{timings.prompt_tokens} + {timings.new_tokens} tokens, "
        f"{timings.prefill_tok_s:.0f} + {timings.decode_tok_s:.1f} tok/s, "
        f"kept {counts.cached:,}{limit}, evicted {counts.evicted:,}, {turn.finish}"
    ) + (", beyond the model's context" if turn.beyond_context else "")
