"""Files that a message names: documents, folders, patterns."""

import io
import itertools
import sys
from io import BytesIO
from pathlib import Path

import pytest
from docx import Document

from h2o_stream.base.texts import piped_lines, piped_text, read_text
from h2o_stream.errors import DataError
from h2o_stream.ui.files import find_files, read_all


def pdf(text: str) -> bytes:
    """A PDF of one page."""
    stream = f"BT /F1 12 Tf 10 50 Td ({text}) Tj ET"
    objects = (
        "<</Type/Catalog/Pages 2 0 R>>",
        "<</Type/Pages/Kids[3 0 R]/Count 1>>",
        "<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 100]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",
        f"<</Length {len(stream)}>>stream\n{stream}\nendstream",
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    )
    written, places = "%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(f"{len(written):010} 00000 n \n")
        written += f"{number} 0 obj{content}endobj\n"
    table = (
        f"xref\n0 6\n0000000000 65535 f \n{''.join(places)}trailer<</Size 6/Root 1 0 R>>\nstartxref\n{len(written)}\n"
    )
    return f"{written}{table}%%EOF".encode()


def word() -> bytes:
    document, file = Document(), BytesIO()
    document.add_paragraph("The ship is called Aurora.")
    row = document.add_table(1, 2).rows[0]
    row.cells[0].text, row.cells[1].text = "Oslo", "Monday"
    document.save(file)
    return file.getvalue()


def test_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.docx"
    path.write_bytes(word())
    assert read_text(path, "/file") == "The ship is called Aurora.\n\nOslo | Monday"
    assert piped_text(io.BytesIO(pdf("The keeper is Ada.")), "standard input") == "The keeper is Ada."
    with pytest.raises(DataError, match="--prompt asks about it"):
        list(piped_lines(BytesIO(word()), "standard input"))
    with pytest.raises(DataError, match="a PDF without text"):
        piped_text(io.BytesIO(pdf("")), "standard input")


def test_what_reads_them_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(DataError, match=r"is a PDF, and pypdf reads it: \S+ -m pip install .*pypdf"):
        piped_text(io.BytesIO(pdf("text")), "standard input")


def test_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my texts" / "deep").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "my texts/c.txt", "my texts/deep/d.txt", "my texts/.hidden"):
        (tmp_path / name).write_text(name)
    (tmp_path / "my texts" / "e.png").write_bytes(b"\x89PNG")
    assert find_files("*.txt What is it?") == ([Path("a.txt"), Path("b.txt")], "What is it?")
    files, question = find_files("my texts Which?")
    notes = list[str]()
    assert read_all(files, notes.append) == [(name, name) for name in ("my texts/c.txt", "my texts/deep/d.txt")]
    assert question == "Which?"
    assert notes == ["skipped 1 of 3 files, empty or no text: my texts/e.png"]
    assert find_files('"my texts/c.txt" Why *?') == ([Path("my texts/c.txt")], "Why *?")
    assert find_files("a.txt") == ([Path("a.txt")], "")
    looked_at = list[Path]()
    monkeypatch.setattr("h2o_stream.ui.files.is_file", lambda path: looked_at.append(path) or path.is_file())
    pasted = "word and another " * 50_000
    assert find_files(f"a.txt {pasted}") == ([Path("a.txt")], pasted.strip())
    assert len(looked_at) < 1000, "not every part of a text is the name of a file"
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="the folder has no files"):
        find_files("empty")
    monkeypatch.setattr("h2o_stream.ui.files._MAX_FILES", 1)
    with pytest.raises(DataError, match=r"/file \*.txt has more than 1 files"):
        find_files("*.txt")
    monkeypatch.setattr(
        "h2o_stream.ui.files.glob.iglob", lambda *_, **__: map(str, itertools.repeat(tmp_path / "a.txt"))
    )
    with pytest.raises(DataError, match="more than 1 files"):
        find_files(str(tmp_path))
