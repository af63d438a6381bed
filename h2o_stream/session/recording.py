"""A recording of a run: its events with their times, as JSON Lines. It can be replayed without the model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from h2o_stream.cache.counts import CacheCounts
from h2o_stream.engine.events import PrefillProgress, Token
from h2o_stream.errors import DataError
from h2o_stream.recall.passage import Candidate, Passage, Recalled
from h2o_stream.session.jsonl import JsonlWriter, build, check_type
from h2o_stream.session.turn import Timings, Turn


@dataclass(frozen=True)
class TurnStart:
    """A turn begins."""

    title: str
    prompt: str


RecordedEvent = TurnStart | Recalled | PrefillProgress | Token | Turn


class Recorder(JsonlWriter):
    """Writes events to a new file, or nowhere.

    Args:
        path: the file; None to write nothing.
        title: of the run.

    Raises:
        DataError: the file exists already, or cannot be written.
    """

    def __init__(self, path: Path | None, title: str) -> None:
        super().__init__(path, "--record", "x")
        self._started = time.monotonic()
        self._write("run", {"title": title})

    def start_turn(self, title: str, prompt: str) -> None:
        """Record that a turn begins."""
        self._write("asked", {"title": title, "prompt": prompt})

    def add_event(self, event: Recalled | PrefillProgress | Token | Turn) -> None:
        """Record an event of the current turn."""
        if self._file is None:
            return
        if isinstance(event, Token):
            counts = asdict(event.counts)
            thinking = {} if event.thinking is None else {"thinking": event.thinking}
            fields = {"id": event.id, "text": event.text, **thinking, "elapsed_s": event.elapsed_s, "counts": counts}
            self._write("token", fields)
        elif isinstance(event, PrefillProgress):
            self._write("prefill", asdict(event))
        elif isinstance(event, Recalled):
            self._write("recalled", asdict(event))
        else:
            items = asdict(event).items()
            self._write("turn", {"work" if name == "timings" else name: value for name, value in items})

    def _write(self, kind: str, record: dict[str, Any]) -> None:
        self.write({"type": kind, "at_s": round(time.monotonic() - self._started, 4), **record})


def read_recording(path: Path) -> tuple[str, Iterator[tuple[float, RecordedEvent]]]:
    """The title of a recording, and its events with their times in seconds since the start.

    Raises:
        DataError: the file cannot be read or is not a recording. The iterator raises it too.
    """
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")  # texts may hold other line separators
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--replay {path}: {getattr(error, 'strerror', None) or error}") from error
    parsed = (_parse_line(path, number, line) for number, line in enumerate(lines, 1))
    first = next(parsed, None)
    if first is None or not isinstance(first[1], str):
        raise DataError(f"--replay {path}: not a recording: its first line has no title")
    return first[1], parsed


def _parse_line(path: Path, number: int, line: str) -> tuple[float, Any]:
    try:
        fields = json.loads(line)
        return check_type(fields.pop("at_s"), float), _event(fields.pop("type"), fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"--replay {path}: line {number} is not a line of a recording") from error


def _event(kind: str, fields: dict[str, Any]) -> Any:
    if kind == "run":
        return check_type(fields["title"], str)
    if kind == "asked":
        return build(TurnStart, fields)
    if kind == "recalled":
        return Recalled(_candidates(fields["candidates"]))
    counts = build(CacheCounts, fields.pop("counts"))
    if kind == "prefill":
        return build(PrefillProgress, fields, counts=counts)
    if kind == "token":
        return build(Token, fields, seen=counts.seen, get_counts=lambda: counts)
    if kind == "turn":
        recalled = _candidates(fields.pop("recalled", []))
        return build(Turn, fields, timings=build(Timings, fields.pop("work")), counts=counts, recalled=recalled)
    raise ValueError(kind)


def _candidates(recorded: list[dict[str, Any]]) -> tuple[Candidate, ...]:
    return tuple(
        build(
            Candidate,
            fields,
            passage=build(Passage, fields.pop("passage")),
            terms=tuple(check_type(term, str) for term in fields.pop("terms")),
        )
        for fields in check_type(recorded, list)
    )
