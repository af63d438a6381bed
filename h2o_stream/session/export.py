"""Transcripts for people, in Markdown, and for other programs, in JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from h2o_stream.errors import ConfigError, DataError
from h2o_stream.session.transcript import Entry, Header


def export(path: Path, header: Header, entries: Sequence[Entry]) -> None:
    """Write a transcript as Markdown, or as JSON if the file's name ends so; never over another file.

    Raises:
        ConfigError: the name ends neither way.
        DataError: the file is there already, or cannot be written.
    """
    writers = {".md": _markdown, ".json": _json}
    if path.suffix not in writers:
        raise ConfigError(f"{path} ends neither in .md nor in .json; name the file so that it says what it is to be")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(writers[path.suffix](header, entries))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _markdown(header: Header, entries: Sequence[Entry]) -> str:
    """For people."""
    lines = [f"# {header.model}, {header.policy}, window {header.window or 'unlimited'}", ""]
    if header.system:
        lines += [*(f"> {line}" for line in header.system.splitlines()), ""]
    for entry in entries:
        lines += ["**You**" + ("" if entry.kind == "said" else f" ({entry.kind})"), "", entry.prompt, ""]
        if entry.text:
            lines += ["**Model**", "", entry.text, ""]
    return "\n".join(lines)


def _json(header: Header, entries: Sequence[Entry]) -> str:
    """For programs: the header and the messages, as chat templates take them."""
    messages = [{"role": "system", "content": header.system}] if header.system else []
    for entry in entries:
        messages.append({"role": "user", "content": entry.prompt})
        if entry.text:
            messages.append({"role": "assistant", "content": entry.text})
    return json.dumps(asdict(header) | {"messages": messages}, ensure_ascii=False, indent=2) + "\n"
