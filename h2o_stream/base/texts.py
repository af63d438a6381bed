"""Texts of users, from files and pipes: in which encoding they are, and what is no text at all."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from h2o_stream.base.documents import DOCUMENT_STARTS, document_text
from h2o_stream.errors import DataError, file_errors

_MAX_DAMAGED, _MAX_DAMAGED_SHARE = 8, 0.25
"""How many characters of a piped text may be damaged, or control characters: a few, or a share."""

_MARKS = {b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
"""Byte order marks of encodings other than UTF-8; the longer ones first."""

_MIN_ZEROS = 0.4
"""Share of characters with a byte of zero from which on a text without a mark is taken for UTF-16."""

_CONTROLS = frozenset("\t\n\v\f\r\b\x1b\x1c\x1d\x1e\x1f\x85")
"""Control characters that texts and terminals have."""

ARCHIVES: Mapping[bytes, str] = {
    b"\x1f\x8b": "a gzip archive", b"BZh": "a bzip2 archive", b"\xfd7zXZ": "an xz archive",
    b"\x28\xb5\x2f\xfd": "a zstd archive", b"7z\xbc\xaf\x27": "a 7z archive", b"Rar!\x1a": "a rar archive",
}  # fmt: skip
"""By the first bytes."""

_CONVERT = "save it as text, or convert it, with pandoc for example"
_UNPACK = "unpack it first"
_OFFICE: Mapping[bytes, str] = {
    b"xl/": "a workbook of Excel", b"ppt/": "slides of PowerPoint",
    b"opendocument": "a document of LibreOffice", b"epub": "a book in EPUB",
    b"[Content_Types].xml": "a document of Office",
}  # fmt: skip
_STARTS: Mapping[bytes, str] = {
    b"{\\rtf": f"a document in RTF; {_CONVERT}",
    b"\xd0\xcf\x11\xe0": f"an old document of Office; {_CONVERT}",
    **{start: f"{kind}; {_UNPACK}" for start, kind in ARCHIVES.items()},
    **dict.fromkeys((b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"II*\0", b"MM\0*"), "an image, sound or film"),
    **dict.fromkeys((b"ID3", b"OggS", b"fLaC", b"\0\0\0\x18ftyp", b"\0\0\0\x20ftyp"), "a sound or a film"),
    **dict.fromkeys((b"\x7fELF", b"MZ\x90\0", b"\xcf\xfa\xed\xfe"), "a program"),
    b"SQLite format 3": "a database",
    b"GGUF": "a model; give it with --model",
}
"""By the first bytes."""

_TAR, _TAR_PLACE = b"ustar", 257
_HEAD = 4096

_MAX_BYTES, _PART_BYTES = 1 << 29, 1 << 20


def read_text(path: Path, label: str) -> str:
    """Read a text file or a document; raises DataError that begins with the label: option or command, and name."""
    with file_errors(label), path.open("rb") as file:
        return _decode(_all(file, label), label, strict=True)


def piped_text(stream: BinaryIO, label: str) -> str:
    """Text from a pipe, or of a document; single bytes that are not UTF-8 are replaced. Messages begin with the label.

    Raises:
        DataError: it is no text; a model would answer noise for hours.
    """
    return _decode(_all(stream, label), label, strict=False)


def _all(stream: BinaryIO, label: str) -> bytes:
    """What is left of a stream, which may have no end."""
    parts, size = list[bytes](), 0
    while part := stream.read(_PART_BYTES):
        parts.append(part)
        size += len(part)
        if size > _MAX_BYTES:
            raise DataError(f"{label} has more than {_MAX_BYTES} bytes")
    return b"".join(parts)


def piped_lines(stream: BinaryIO, label: str) -> Iterator[str]:
    """The lines of a pipe as they come, as `piped_text`, in the encoding of the first one."""
    first = stream.readline()
    if first.startswith(DOCUMENT_STARTS) and document_text(first + _all(stream, label), label) is not None:
        raise DataError(f"{label} is a document, not messages; --prompt asks about it")
    if b"\0" in first or first.startswith(tuple(_MARKS)):  # a line of UTF-16 does not end where its bytes have a \n
        yield from _decode(first + _all(stream, label), label, strict=False).splitlines()
        return
    if first:
        yield _decode(first, f"line 1 of {label}", strict=False)
    for number, line in enumerate(stream, 2):
        yield _readable(line.decode("utf-8", "replace"), f"line {number} of {label}")


def _decode(data: bytes, label: str, strict: bool) -> str:
    if (text := document_text(data, label)) is not None:
        return text
    if what := _describe(data[:_HEAD]):
        raise DataError(f"{label} is {what}, not text" if ";" not in what else f"{label} is {what}")
    encoding = _encoding(data)
    try:
        text = data.decode("utf-8-sig" if encoding == "utf-8" else encoding)
    except UnicodeDecodeError as error:
        if strict or encoding != "utf-8":
            raise DataError(f"{label}: not {encoding.upper()} at byte {error.start}") from error
        text = data.decode("utf-8-sig", "replace")
    return _readable(text, label)


def _readable(text: str, label: str) -> str:
    """The text, unless too much of it is damaged or no text."""
    damaged = text.count("\ufffd")
    controls = sum(unicodedata.category(letter) == "Cc" and letter not in _CONTROLS for letter in text)
    if damaged + controls > max(_MAX_DAMAGED, _MAX_DAMAGED_SHARE * len(text)):
        what = f"{damaged} of {len(text)} characters are not UTF-8" if damaged else f"{controls} are control characters"
        raise DataError(f"{label}: {what}; pipe text, see iconv")
    return text


def _encoding(data: bytes) -> str:
    """Name of the encoding of a text: by its mark, or by the zeros that letters of UTF-16 have; else UTF-8."""
    if encoding := next((name for mark, name in _MARKS.items() if data.startswith(mark)), None):
        return encoding
    pairs = data[: _HEAD - _HEAD % 2]
    pairs = pairs[: len(pairs) // 2 * 2]
    if len(data) % 2 or not pairs:
        return "utf-8"
    low, high = pairs[::2].count(0), pairs[1::2].count(0)
    if min(low, high) or max(low, high) < _MIN_ZEROS * len(pairs) / 2:
        return "utf-8"
    return "utf-16-le" if high else "utf-16-be"


def _describe(head: bytes) -> str | None:
    """What a file is that is no text, and what to do; None if it may be text."""
    if head.startswith(b"PK\x03\x04"):
        office = next((what for mark, what in _OFFICE.items() if mark in head), None)
        return f"{office}; {_CONVERT}" if office else f"a zip archive; {_UNPACK}"
    if head[_TAR_PLACE:].startswith(_TAR):
        return f"a tar archive; {_UNPACK}"
    return next((what for magic, what in _STARTS.items() if head.startswith(magic)), None)
