"""Questions in MT-Bench's format."""

from itertools import islice
from pathlib import Path

import pytest

from h2o_stream.base import resources
from h2o_stream.errors import DataError
from h2o_stream.session import questions
from h2o_stream.session.questions import load_questions, read_questions
from tests.in_turn import in_turn

GOOD = '{"question_id": 1, "category": "c", "turns": ["a", "b"]}'


def test_mt_bench_comes_from_its_wheel() -> None:
    found = load_questions(None)
    assert found.source == "MT-Bench"
    assert len(found.questions) == 80
    assert found.turns == 160
    assert {len(question.turns) for question in found.questions} == {2}


def test_our_own_questions_are_the_fallback_with_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "wheel_file", lambda *_: None)
    found = load_questions(None)
    assert "not installed" in found.source
    assert found.turns >= 16
    assert all(len(question.turns) >= 2 for question in found.questions)


def test_a_missing_wheel_is_not_found() -> None:
    assert resources.wheel_file("no-such-project", ".jsonl") is None


def test_loop(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(GOOD + "\n\n" + GOOD.replace("1", '"x"') + "\n")
    found = load_questions(file)
    assert [(q.id, t) for q, t in found.prompts(loop=False)] == [(1, "a"), (1, "b"), ("x", "a"), ("x", "b")]
    assert [t for _, t in islice(found.prompts(loop=True), 9)] == ["a", "b"] * 4 + ["a"]


@in_turn("line, what", [
    ("{", "not JSON"), ("[1]", "got list"), ("null", "got NoneType"),
    ("{}", "question_id and category and turns missing"),
    ('{"question_id": 1, "category": "c"}', "turns missing"),
    ('{"question_id": 1, "category": "c", "turns": []}', "turns must be"),
    ('{"question_id": 1, "category": "c", "turns": "a"}', "turns must be"),
    ('{"question_id": 1, "category": "c", "turns": ["a", " "]}', "turns must be"),
    ('{"question_id": true, "category": "c", "turns": ["a"]}', "question_id must be"),
    ('{"question_id": [1], "category": "c", "turns": ["a"]}', "question_id must be"),
    ("[" * 100_000, "not JSON"), ('{"question_id": 1', "not JSON"), ("\x00", "not JSON"),
])  # fmt: skip
def test_bad_lines_name_file_line_and_reason(tmp_path: Path, line: str, what: str) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(f"{GOOD}\n\n{line}\n")
    with pytest.raises(DataError) as error:
        read_questions(file)
    assert str(error.value).startswith(f"{file}:3: ")
    assert what in str(error.value)
    assert "\n" not in str(error.value)


def test_not_utf8(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_bytes(GOOD.encode() + b'\n{"x": "\xff"}\n')
    with pytest.raises(DataError, match=":2: not UTF-8 at byte 7"):
        read_questions(file)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_empty_files(tmp_path: Path, content: str) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text(content)
    with pytest.raises(DataError, match="no question"):
        read_questions(file)


def test_folders_and_missing_files(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(DataError, match="--questions"):
            read_questions(path)
