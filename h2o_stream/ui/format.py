"""Formats numbers for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from h2o_stream.base.memory import format_bytes
from h2o_stream.cache.counts import CacheCounts
from h2o_stream.config import BENCH
from h2o_stream.session.turn import Timings, Turn

if TYPE_CHECKING:
    from h2o_stream.engine.engine import Engine


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


SOURCES = {
    "given": "given",
    "generation_config": "the model's own",
    "model": "for this model",
    "default": "default",
}
"""Where a sampling setting comes from, in words."""

_SHORT = {
    "temperature": "temp", "top_p": "top-p", "top_k": "top-k", "min_p": "min-p", "repetition_penalty": "penalty",
    "dry_multiplier": "dry", "dry_allowed_length": "dry length",
    "frequency_penalty": "frequency penalty", "presence_penalty": "presence penalty",
}  # fmt: skip


def sampling_values(engine: Engine) -> dict[str, float | str]:
    """The sampling settings in use."""
    sampling = engine.sampling
    bench = {"temperature": BENCH} if sampling.temperature == BENCH else {}
    penalties = {"frequency_penalty": sampling.frequency_penalty, "presence_penalty": sampling.presence_penalty}
    return {**engine.sampler.settings, **bench, **penalties}


def sampling_line(engine: Engine) -> str:
    """How tokens are sampled: temp 0.7 · top-p 0.95 · penalty 1.1. What has no effect is left out."""
    values = sampling_values(engine)
    neutral: dict[str, float | str] = {"top_p": 1, "repetition_penalty": 1}
    if values["temperature"] == 0:
        neutral |= {name: values[name] for name in ("top_p", "top_k", "min_p")}
    if values["dry_multiplier"] == 0:
        neutral["dry_allowed_length"] = values["dry_allowed_length"]
    shown = {name: value for name, value in values.items() if value != neutral.get(name, 0) or name == "temperature"}
    return " · ".join(f"{_SHORT[name]} {value}" for name, value in shown.items())


@dataclass(frozen=True)
class SlotUse:
    """What slots are used for: its name, and how it is drawn. Shades differ, so that colors are not needed."""

    name: str
    color: str
    shade: str


SLOT_USES = {
    "sinks": SlotUse("sinks", "cyan", "█"),
    "pinned": SlotUse("pinned", "blue", "▓"),
    "heavy": SlotUse("heavy", "red", "▒"),
    "recent": SlotUse("recent", "green", "░"),
    "free": SlotUse("empty", "bright_black", "·"),
}
"""By the name of the field of `CacheCounts`."""


def slot_bar(counts: CacheCounts, width: int) -> list[tuple[str, str]]:
    """The slots of a window as a bar: pairs of a color and a run of shades. Empty without a window.

    Every use that has a slot gets at least one column.
    """
    if not counts.window:
        return []
    uses = [(use, getattr(counts, name)) for name, use in SLOT_USES.items()]
    blocks = [max(round(width * count / counts.window), min(count, 1)) for _, count in uses]
    blocks[blocks.index(max(blocks))] += width - sum(blocks)
    return [(use.color, use.shade * length) for (use, _), length in zip(uses, blocks, strict=True) if length > 0]


def context_bar(counts: CacheCounts, context: int | None, width: int) -> list[tuple[str, str]]:
    """The bar of a cache without a window: it grows against the model's context, and is red beyond it."""
    total = max(context or 0, counts.seen, 1)
    filled = round(width * counts.cached / total)
    inside = filled if context is None or counts.seen <= context else round(width * context / total)
    runs = (("green", "▒" * inside), ("red", "█" * (filled - inside)), ("bright_black", "·" * (width - filled)))
    return [(color, run) for color, run in runs if run]


def legend(counts: CacheCounts, context: int | None = None) -> list[tuple[str, str]]:
    """What the shades of a bar mean, with the number of tokens, as pairs of a color and a text."""
    if counts.window:
        uses = [(use, getattr(counts, name)) for name, use in SLOT_USES.items()]
        return [(use.color, f"{use.shade} {use.name} {count:,}") for use, count in uses]
    if context is None:
        return [("green", f"▒ kept {counts.cached:,}")]
    over = counts.seen - context
    if over > 0:
        return [("green", f"▒ kept {min(counts.cached, context):,} in context"), ("red", f"█ {over:,} beyond")]
    return [("green", f"▒ kept {counts.cached:,} of {context:,} in context"), ("bright_black", f"· {-over:,} left")]


def passes_note(timings: Timings) -> str:
    """How many tokens a pass through the model gave, if some were guessed."""
    return f" ({timings.tokens_per_pass:.1f} a pass)" if timings.tokens_per_pass >= 1.05 else ""


def status_line(counts: CacheCounts, timings: Timings, rss_bytes: int) -> str:
    """The text beside the bar of slots."""
    window = f" · window {counts.window_note}" if counts.grown else ""
    return (
        f"seen {counts.seen:,} evicted {counts.evicted:,}{window} · "
        f"{format_speed(timings.decode_tok_s)}{passes_note(timings)} · "
        f"cache {format_bytes(counts.nbytes)} · process {format_bytes(rss_bytes)}"
    )


def kept_text(counts: CacheCounts) -> str:
    """How many tokens are held, of how many: kept 300 of 256 + 410."""
    return f"kept {counts.cached:,}" + (f" of {counts.window_text}" if counts.window else "")


def turn_line(turn: Turn) -> str:
    """What a turn took, in less than 80 characters."""
    timings, counts = turn.timings, turn.counts
    return (
        f"{timings.prompt_tokens} + {timings.new_tokens} tokens, "
        f"{timings.prefill_tok_s:.0f} + {timings.decode_tok_s:.1f} tok/s{passes_note(timings)}, "
        f"{kept_text(counts)}, evicted {counts.evicted:,}, {turn.finish}"
    ) + (", beyond the model's context" if turn.beyond_context else "")


_SHADES = ((217, 95, 95), (242, 212, 92), (99, 180, 104))
"""Red, yellow and green, light enough for black text."""


def shade(value: float) -> tuple[int, int, int]:
    """The color of a value from 0 (bad, red) to 1 (good, green)."""
    place = min(max(value, 0.0), 1.0) * (len(_SHADES) - 1)
    number = min(int(place), len(_SHADES) - 2)
    part = place - number
    red, green, blue = (round(a + part * (b - a)) for a, b in zip(_SHADES[number], _SHADES[number + 1], strict=True))
    return red, green, blue
