"""Recordings of a terminal in asciinema's format (asciicast v2), which ``asciinema play`` plays too."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import RenderableType

from h2o_stream.base.json_text import parse_json
from h2o_stream.base.resources import write_text
from h2o_stream.errors import ConfigError, DataError
from h2o_stream.ui.terminal import SafeConsole, Terminal, printable

_STYLE = r"(?:[0-9]|[349][0-7]|10[0-7]|[34]8;[25](?:;[0-9]{1,3})+)"
_CONTROL = re.compile(rf"\x1b\[(?:[0-9;]*[ABCDGHJK]|\?(?:25|1049)[hl]|(?:{_STYLE}(?:;{_STYLE})*)?m)|\r")
"""The sequences that our screens send: moves of the cursor, erasing, cursor and screen on and off, colors."""

_RESTORE = "\x1b[?1049l\x1b[?25h"

_MAX_S = 1e8
"""Three years: the longest recording."""

_FRAME_S = 0.25
"""Between two frames of a recording, as each takes room in the file."""

_PAUSE_S = 0.4
"""Longer pauses are shortened to this when a recording is played: a model loads, or reads."""

_HOME = "\x1b[H"
"""A frame of a full screen begins with it."""


class _Tee:
    """A text stream that reports what is written to it."""

    def __init__(self, stream: TextIO, report: Callable[[str], None]) -> None:
        self._stream, self._report = stream, report

    def write(self, text: str) -> int:
        """Write to both."""
        self._report(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Recorder:
    """Writes events: of a frame only the lines that changed, and not every frame. After an error it writes no more."""

    def __init__(self, file: TextIO, height: int) -> None:
        self._file, self._height = file, height
        self.error: OSError | None = None
        self._started, self._drawn_at = time.monotonic(), 0.0
        self._shown: list[str] = []
        self._frame: list[str] = []

    def add(self, text: str) -> None:
        """Record what is written to the terminal."""
        lines = text.removeprefix(_HOME).split("\n")
        if text.startswith(_HOME) and len(lines) <= self._height:
            self._frame = lines
            if time.monotonic() - self._drawn_at >= _FRAME_S:
                self.flush()
            return
        self.flush()
        self._shown = []
        self._write(text.replace("\r\n", "\n").replace("\n", "\r\n"))  # as a terminal's line discipline does

    def flush(self) -> None:
        """Write the last frame, if it is not written yet."""
        if not self._frame:
            return
        before = [*self._shown, *[None] * len(self._frame)]
        changed = [
            f"\x1b[{row};1H{line}"
            for row, (line, old) in enumerate(zip(self._frame, before, strict=False), 1)
            if line != old
        ]
        self._shown, self._frame, self._drawn_at = self._frame, [], time.monotonic()
        if changed:
            self._write("".join(changed))

    def _write(self, text: str) -> None:
        at_s = round(time.monotonic() - self._started, 4)
        try:
            if self.error is None:
                self._file.write(json.dumps([at_s, "o", text], ensure_ascii=False) + "\n")
        except OSError as error:
            self.error = error


@contextmanager
def recording(path: Path | None, terminal: Terminal) -> Iterator[None]:
    """Record what is written to stdout and stderr inside the block in a new file.

    A disk that is full ends the recording, not what is recorded. As ``.svg``, only the last screen of the terminal is
    kept, see `save_picture`.

    Raises:
        ConfigError: a picture is asked for where there is no screen.
        DataError: the file exists already, or cannot be written.
    """
    if path is not None and path.suffix == ".svg":
        if not terminal.live or terminal.quiet:
            raise ConfigError(f"--record {path} draws the screen of a terminal; run it in one, without --quiet")
        terminal.picture, path = path, None
    if path is None:
        yield
        return
    try:
        file = path.open("x", encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"--record {path}: {error.strerror}") from error
    size = terminal.console.size
    header = {"version": 2, "width": size.width, "height": size.height, "timestamp": int(time.time())}
    file.write(json.dumps(header | {"idle_time_limit": _PAUSE_S}) + "\n")
    recorder = _Recorder(file, size.height)
    out, err = (cast("TextIO", _Tee(stream, recorder.add)) for stream in (sys.stdout, sys.stderr))
    try:
        with redirect_stdout(out), redirect_stderr(err):
            yield
    finally:
        recorder.flush()
        try:
            file.close()
        except OSError as error:
            recorder.error = error
        if recorder.error is not None:
            terminal.error(f"--record {path}: {recorder.error.strerror}; the recording is not complete")


def save_picture(terminal: Terminal, shown: RenderableType) -> None:
    """Save a screen as it is now as SVG, if the terminal was asked for a picture."""
    if terminal.picture is not None:
        size = terminal.console.size
        console = SafeConsole(
            record=True, file=io.StringIO(), width=size.width, height=size.height, force_terminal=True, highlight=False
        )
        console.print(shown)
        write_text(terminal.picture, console.export_svg(title=""), f"--record {terminal.picture}")


def play(path: Path, pace: float, terminal: Terminal) -> None:
    """Play back a recording. Other control sequences than those of our screens are removed. `pace` is relative to the
    original run. Without a live terminal no control sequences are written.

    Raises:
        DataError: it is not a recording.
    """
    events, show = _read(path), sys.stdout.write
    started = time.monotonic()
    try:
        for at_s, text in events:
            time.sleep(max(started + min(at_s / pace, _MAX_S) - time.monotonic(), 0.0))
            show(_shown(text, terminal.live))
            sys.stdout.flush()
    except (KeyboardInterrupt, SystemExit):
        if terminal.live:
            show(_RESTORE)
        raise


def _shown(text: str, live: bool) -> str:
    """Text with the control sequences that are ours, or with none."""
    kept = _CONTROL.findall(text) if live else []
    pieces = [printable(piece) for piece in _CONTROL.split(text)]
    if not live:
        return "".join(pieces)
    return "".join(piece + control for piece, control in zip(pieces, [*kept, ""], strict=True))


def _read(path: Path) -> list[tuple[float, str]]:
    """The events, with pauses as long as the recording allows."""
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--replay {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        header = parse_json(lines[0])
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("version") != 2 or isinstance(header["version"], bool):
        raise DataError(f"--replay {path}: not a recording in asciinema's format, version 2")
    limit = header.get("idle_time_limit")
    pause_s = float(min(limit, _MAX_S)) if isinstance(limit, int | float) and limit > 0 else _MAX_S
    events = [_parse(path, number, line) for number, line in enumerate(lines[1:], 2)]
    pauses = [min(max(now - before, 0.0), pause_s) for before, now in pairwise([0.0, *(at_s for at_s, _ in events)])]
    return [(at_s, text) for at_s, (_, text) in zip(accumulate(pauses), events, strict=True)]


def _parse(path: Path, number: int, line: str) -> tuple[float, str]:
    try:
        at_s, kind, text = parse_json(line)
        if kind != "o":  # input, marks, sizes
            text = ""
        if isinstance(at_s, bool) or not 0 <= at_s <= _MAX_S or not isinstance(text, str):
            raise ValueError(line)
        return float(at_s), text
    except (ValueError, TypeError) as error:
        raise DataError(f"--replay {path}: line {number} is not a line of a recording") from error
