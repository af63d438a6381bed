"""Exports transcripts: as Markdown for people, as JSON for other programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from h2o_stream.errors import ConfigError, file_errors
from h2o_stream.session.transcript import Entry, Header


def export(path: Path, header: Header, entries: Sequence[Entry], thinking: bool = False) -> None:
    """Write a transcript to a new file, in the format of its extension. Thinking is left out unless asked for.

    Raises:
        ConfigError: the extension is neither ``.md`` nor ``.json``.
        DataError: the file exists already, or cannot be written.
    """
    formats = {".md": _markdown, ".json": _json}
    if path.suffix not in formats:
        raise ConfigError(f"{path}: the file name must end in .md or .json")
    if not thinking:
        entries = [replace(entry, thinking="") for entry in entries]
    with file_errors(path), path.open("x", encoding="utf-8") as file:
        file.write(formats[path.suffix](header, entries))


def _markdown(header: Header, entries: Sequence[Entry]) -> str:
    lines = [f"# {header.model}, {header.policy}, window {header.window or 'unlimited'}", ""]
    if header.system:
        lines += [*(f"> {line}" for line in header.system.splitlines()), ""]
    for entry in entries:
        lines += ["**You**" + ("" if entry.kind == "said" else f" ({entry.kind})"), "", entry.prompt, ""]
        if entry.thinking:
            lines += ["**Model** (thinking)", "", *(f"> {line}" for line in entry.thinking.splitlines()), ""]
        if entry.text:
            lines += ["**Model**", "", entry.text, ""]
    return "\n".join(lines)


def _json(header: Header, entries: Sequence[Entry]) -> str:
    """The header, and the messages in the form that chat templates take."""
    messages = [{"role": "system", "content": header.system}] if header.system else []
    for entry in entries:
        messages.append({"role": "user", "content": entry.prompt})
        thinking = {"reasoning_content": entry.thinking} if entry.thinking else {}
        if entry.text or thinking:
            messages.append({"role": "assistant", "content": entry.text, **thinking})
    return json.dumps(asdict(header) | {"messages": messages}, ensure_ascii=False, indent=2) + "\n"
