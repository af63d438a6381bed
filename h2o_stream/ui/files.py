"""Files that a message names: one, a folder, or a pattern; and the question after them."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from h2o_stream.base.resources import is_file, user_path
from h2o_stream.base.texts import read_text
from h2o_stream.errors import DataError

_MAX_FILES = 500
"""A folder of more is probably not the one that was meant."""

_LONGEST_NAME = 4096
"""Of a file, as the system has them: what follows a name may be megabytes."""

_NAMED = 5
"""How many files that are no text are named."""


def find_files(argument: str) -> tuple[list[Path], str]:
    """The files that a text begins with, and the question after them.

    The name is the longest prefix that is a file, a folder or a pattern of files, or else the quoted part.

    Raises:
        DataError: a folder or a pattern has no files, or too many.
    """
    quoted = re.match(r"""(["'])(.+?)\1""", argument)
    ends = [quoted.end()] if quoted else []
    ends += [len(argument), *reversed([gap.start() for gap in re.finditer(r"\s", argument[:_LONGEST_NAME])])]
    for end in ends:
        name = quoted[2] if quoted and end == quoted.end() else argument[:end]
        if files := _files(name):
            return files, argument[end:].strip()
    name, end = (quoted[2], quoted.end()) if quoted else (argument.split()[0], len(argument.split()[0]))
    return [user_path(name, f"/file {name}")], argument[end:].strip()


def _files(name: str) -> list[Path]:
    """The files of a name; none if there is nothing of this name."""
    try:
        path = Path(name).expanduser()
        if is_file(path):
            return [path]
        pattern = str(path / "**") if path.is_dir() else str(path)
        names = glob.iglob(pattern, recursive=True)  # noqa: PTH207 (Path.glob finds hidden files, too)
        files = sorted(islice(filter(is_file, map(Path, names)), _MAX_FILES + 1), key=str)
    except (OSError, RuntimeError, ValueError):
        return []
    if path.is_dir() and not files:
        raise DataError(f"/file {name}: the folder has no files")
    if len(files) > _MAX_FILES:
        raise DataError(f"/file {name} has more than {_MAX_FILES} files; at most that many are read")
    return files


def read_all(files: Sequence[Path], notify: Callable[[str], None]) -> list[tuple[str, str]]:
    """Names and texts of files. Of several, those that are empty or no text are skipped, with a line.

    Raises:
        DataError: none has text; the reason is that of the first one.
    """
    read, reasons = list[tuple[str, str]](), dict[str, DataError]()
    for path in files:
        label = f"/file {path}"
        try:
            text = read_text(path, label).strip()
            if not text:
                raise DataError(f"{label}: the file is empty")
            read.append((path.name if len(files) == 1 else str(path), text))
        except DataError as error:
            reasons[str(path)] = error
    if not read:
        raise next(iter(reasons.values()))
    if reasons:
        names = ", ".join(list(reasons)[:_NAMED]) + ", ..." * (len(reasons) > _NAMED)
        notify(f"skipped {len(reasons)} of {len(files)} files, empty or no text: {names}")
    return read
