"""Numbers as people read them."""

from __future__ import annotations

from h2o_stream.cache.counts import CacheCounts
from h2o_stream.session.turn import Turn


def size(nbytes: int) -> str:
    """Bytes with a binary unit: 11.7 MiB."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def speed(tokens_per_second: float) -> str:
    """Tokens per second, or a dash before there are any."""
    return f"{tokens_per_second:,.1f} tok/s" if tokens_per_second else "- tok/s"


def occupancy(counts: CacheCounts) -> str:
    """Kept and evicted in a few words."""
    of = f" of {counts.window:,}" if counts.window else ""
    return f"kept {counts.cached:,}{of}, evicted {counts.evicted:,}"


BARS = (("sinks", "cyan"), ("pinned", "blue"), ("heavy", "red"), ("recent", "green"), ("free", "bright_black"))
"""What slots are used for, and the colour of each."""


def bar(counts: CacheCounts, width: int) -> list[tuple[str, str]]:
    """The slots of a window as one bar: colours of `BARS` and as many blocks each; nothing without a window.

    Every use that has a slot has a block.
    """
    if not counts.window:
        return []
    uses = [(style, getattr(counts, name)) for name, style in BARS]
    blocks = [max(round(width * count / counts.window), min(count, 1)) for _, count in uses]
    blocks[blocks.index(max(blocks))] += width - sum(blocks)
    return [
        (style, ("·" if style == "bright_black" else "█") * many)
        for (style, _), many in zip(uses, blocks, strict=True)
        if many > 0
    ]


def status(counts: CacheCounts, rate: str, rss_bytes: int) -> str:
    """The figures beside the bar."""
    return (
        f"seen {counts.seen:,} evicted {counts.evicted:,} · {rate} · cache {size(counts.nbytes)} of {size(rss_bytes)}"
    )


def turn_line(turn: Turn) -> str:
    """What a turn took, in a line of less than 80 characters."""
    work = turn.work
    return (
        f"{work.prompt_tokens} + {work.new_tokens} tokens, {work.prefill_tok_s:.0f} + {work.decode_tok_s:.1f} tok/s, "
        f"{occupancy(turn.counts)}, {turn.finish}" + (", beyond the model's context" if turn.beyond_context else "")
    )


def share(done_bytes: int, total_bytes: int) -> str:
    """Bytes of bytes in one unit: 4.2/15.0 GiB."""
    total, unit = size(total_bytes).split()
    part = done_bytes / total_bytes * float(total) if total_bytes else 0.0
    return f"{part:.{1 if '.' in total else 0}f}/{total} {unit}"


def time_left(seconds: float) -> str:
    """A guess at a time, no more exact than it is: 38 s, 4 min."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
