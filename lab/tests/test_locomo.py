"""What recall finds for the questions of LoCoMo, by `h2o-compare locomo`."""

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from h2o_lab.locomo.dialogues import Question, read_dialogues, score
from h2o_stream.errors import DataError
from tests.commands import invoke, records


def locomo(tmp_path: Path) -> Path:
    said = [{"speaker": "Nora", "dia_id": "D1:1", "text": "I planted tomatoes.", "blip_caption": "a pot"}]
    said += [{"speaker": "Emil", "dia_id": "D1:2", "text": "I bought a kayak."}]
    asked = [
        {"question": "What did Nora plant?", "answer": "tomatoes", "evidence": ["D1:01"], "category": 4},
        {"question": "When did Emil buy a kayak?", "answer": 2023, "evidence": ["D1:2; D9:1"], "category": 2},
        {"question": "What did Emil plant?", "adversarial_answer": "tomatoes", "evidence": ["D1:1"], "category": 5},
    ]
    talk = {"speaker_a": "Nora", "session_1_date_time": "1:56 pm on 8 May, 2023", "session_1": said}
    file = tmp_path / "locomo10.json"
    file.write_text(json.dumps([{"sample_id": "small", "conversation": talk, "qa": asked}]))
    return file


def test_turns_and_questions_are_read(tmp_path: Path) -> None:
    (dialogue,) = read_dialogues(locomo(tmp_path))
    assert dialogue.turns == (
        "Nora, 8 May 2023: I planted tomatoes. (shares a pot)",
        "Emil, 8 May 2023: I bought a kayak.",
    )
    assert [(one.answer, sorted(one.evidence)) for one in dialogue.questions] == [
        ("tomatoes", [1]),
        ("2023", [2]),
        ("", [1]),
    ]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"qa": []}]'])
def test_another_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "file.json"
    file.write_text(text)
    if text == "{}":
        assert read_dialogues(file) == []
    else:
        with pytest.raises(DataError, match="not the file of LoCoMo"):
            read_dialogues(file)


@pytest.mark.parametrize(("category", "answer", "reply", "expected"), [
    (4, "The red kayaks", "a red, kayak!", 1.0),
    (4, "red kayak", "It is red", 0.4),
    (4, "red", "blue", 0.0),
    (3, "Likely no; she likes reading", "likely no", 1.0),
    (1, "pottery, camping", "camping, swimming", 0.5),
    (5, "", "That was Not mentioned.", 1.0),
    (5, "", "Pottery", 0.0),
])  # fmt: skip
def test_replies_are_scored_as_the_benchmark_does(category: int, answer: str, reply: str, expected: float) -> None:
    stem = lambda word: word.removesuffix("s")  # noqa: E731
    assert score(reply, Question("", answer, category, frozenset()), stem) == pytest.approx(expected)


@pytest.fixture
def stemmer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for NLTK, which takes a second to import."""
    for name in ("nltk", "nltk.stem"):
        module = ModuleType(name)
        module.__spec__, module.PorterStemmer = ModuleSpec(name, None), lambda: SimpleNamespace(stem=str)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("stemmer")
def test_the_table(tiny_folder: Path, tmp_path: Path) -> None:
    base = ["locomo", "-m", tiny_folder, "--dialogues", locomo(tmp_path), "--jsonl", "-"]
    done = invoke("h2o-compare", *base, "--search")
    assert done.exit_code == 0, done.stderr
    run, *rows = records(done.stdout)
    assert (run["recall"], run["dialogues"]) == (["auto"], ["small"])
    by_kind: dict[str, Any] = {row["category"]: row for row in rows}
    assert by_kind["answerable"]["questions"] == 2
    assert by_kind["date"]["listed"] == by_kind["answerable"]["listed"] == 1.0
    assert by_kind["unanswerable"]["listed"] is None
    answered = invoke("h2o-compare", *base, "--windows", "64")
    assert answered.exit_code == 0, answered.stderr
    assert all(0 <= row["f1"] <= 1 for row in records(answered.stdout)[1:])


def test_wrong_options(tiny_folder: Path, tmp_path: Path) -> None:
    base = ["recall", "-m", tiny_folder, "--locomo", locomo(tmp_path)]
    assert "has 1" in invoke("h2o-compare", *base, "--conversations", "2").stderr
