"""The text of PDFs and of documents of Word, by libraries that the extra ``documents`` installs."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO

from h2o_stream.errors import DataError, install_command

_PDF, _ZIP = DOCUMENT_STARTS = (b"%PDF-", b"PK\3\4")
"""The first bytes of documents."""

_WORD = "word/document.xml"
"""A file of the archive that a document of Word is."""


def document_text(data: bytes, label: str) -> str | None:
    """The text of a document; None for a file that is none of these. Messages begin with the label.

    Raises:
        DataError: its library is missing, or it cannot be read or has no text.
    """
    kind, package, read = "", "", _pdf
    if data.startswith(_PDF):
        kind, package = "a PDF", "pypdf"
    elif data.startswith(_ZIP) and _has_text_of_word(data):
        kind, package, read = "a document of Word", "python-docx", _docx
    else:
        return None
    return _read(read, data, f"{label} is {kind}", package)


def _read(read: Callable[[bytes], str], data: bytes, what: str, package: str) -> str:
    try:
        text = read(data)
    except ImportError as error:
        raise DataError(f"{what}, and {package} reads it: {install_command(package)}") from error
    except Exception as error:
        raise DataError(f"{what} that cannot be read: {str(error) or type(error).__name__}") from error
    if not text.strip():
        raise DataError(f"{what} without text; scanned pages need OCR first")
    return text


def _has_text_of_word(data: bytes) -> bool:
    try:
        return _WORD in zipfile.ZipFile(BytesIO(data)).namelist()
    except zipfile.BadZipFile:
        return False


def _pdf(data: bytes) -> str:
    from pypdf import PdfReader

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it warns about whatever it can read nevertheless
    return "\n\n".join(page.extract_text() for page in PdfReader(BytesIO(data)).pages)


def _docx(data: bytes) -> str:
    from docx import Document

    return "\n\n".join(filter(None, _blocks(Document(BytesIO(data)).iter_inner_content())))


def _blocks(content: object) -> Iterator[str]:
    """The texts of paragraphs and tables, in their order."""
    for block in content:  # type: ignore[attr-defined]
        if hasattr(block, "rows"):
            yield "\n".join(" | ".join(cell.text.strip() for cell in row.cells) for row in block.rows)
        else:
            yield block.text.strip()
