"""Questions about a book: the data, the parts of the book, the rates, and the command."""

import json
import re
from pathlib import Path

import pytest

from h2o_lab.book.questions import BookQuestion, parts_of, read_questions
from h2o_stream.base.resources import python_manual
from tests.commands import invoke, records
from tests.fixtures import written

BOOK = "\n\n".join(["The mill is red.", "Its miller is called\nAnna.", "The river is deep.", "It has two ferries."])
QUESTIONS = (
    BookQuestion("miller", "Who works there?", "She is", ("Anna",), "is called Anna"),
    BookQuestion("ferries", "How many boats cross the water?", "There are", ("two", "2"), "has two ferries"),
    BookQuestion("king", "Who reigns?", "It is", ("Otto",), "King Otto"),
)


def words(text: str) -> int:
    return len(text.split())


class TestQuestions:
    def test_answers_are_next_to_their_passages_and_in_no_question(self) -> None:
        """Of the manual of this Python; passages that another version lacks are left out, but there are few."""
        book, questions = python_manual(), read_questions()
        assert len({question.id for question in questions}) == 30
        ends = {question: question.end(book) for question in questions}
        assert sum(end is not None for end in ends.values()) >= 25
        for question, end in ends.items():
            assert not question.right(f"{question.question} {question.reply}"), question.id
            if end is not None:
                near = " ".join(book[max(end - 300, 0) : end + 300].split())
                assert any(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", near) for answer in question.answers)

    def test_questions_are_in_other_words(self) -> None:
        """Of the words of a question that are long enough to mean something, at most half are in its passage."""
        for question in read_questions():
            asked = set(re.findall(r"[a-z]{5,}", question.question.lower()))
            assert len(asked & set(re.findall(r"[a-z]{5,}", question.passage.lower()))) <= len(asked) / 2, question.id

    def test_passages_are_found_across_lines(self) -> None:
        miller, _, king = QUESTIONS
        assert BOOK[: miller.end(BOOK)].endswith("Anna")
        assert king.end(BOOK) is None

    @pytest.mark.parametrize(("reply", "right", "f1"), [
        ("Anna", True, 1), ("It is Anna.", True, 0.5), ("The Anna!", True, 1), ("Annabel", False, 0), ("", False, 0),
    ])  # fmt: skip
    def test_replies_are_right_by_words(self, reply: str, right: bool, f1: float) -> None:
        question = QUESTIONS[0]
        assert (question.right(reply), question.f1(reply)) == (right, pytest.approx(f1))

    def test_the_likest_answer_counts(self) -> None:
        assert QUESTIONS[1].f1("2") == QUESTIONS[1].f1("Two.") == 1


class TestParts:
    def test_parts_answer_every_question_once(self) -> None:
        first, second = parts_of(BOOK, QUESTIONS, 9, words)
        assert [[question.id for question in part.questions] for part in (first, second)] == [["miller"], ["ferries"]]
        assert [first.text, second.text] == ["\n\n".join(BOOK.split("\n\n")[:2]), "\n\n".join(BOOK.split("\n\n")[2:])]

    def test_no_length_is_the_whole_book(self) -> None:
        (part,) = parts_of(BOOK, QUESTIONS, 0, words)
        assert part.text == BOOK
        assert part.questions == QUESTIONS[:2]

    def test_a_long_paragraph_is_a_part(self) -> None:
        parts = list(parts_of(BOOK, QUESTIONS, 1, words))
        assert [part.text for part in parts] == ["Its miller is called\nAnna.", "It has two ferries."]


class TestCommand:
    @pytest.fixture
    def small_book(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """A manual of four paragraphs, and a question that it does not answer."""
        file = written(tmp_path / "questions.jsonl", map(vars, QUESTIONS))
        monkeypatch.setattr("h2o_lab.book.questions.QUESTIONS", file)
        monkeypatch.setattr("h2o_lab.book.suite.python_manual", lambda: BOOK)

    @pytest.mark.exhaustive
    @pytest.mark.usefixtures("small_book", "no_charts")
    def test_policies_and_modes_on_parts_and_on_all_of_it(self, tiny_folder: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        base = ["tasks", "--suite", "book", "-m", tiny_folder, "--lengths", "12,0", "--windows", "64"]
        base += ["--recall", "off,auto", "--out", out, "--jsonl", "-"]
        done = invoke("h2o-compare", *base, "--policies", "full,h2o")
        assert done.exit_code == 0, done.stderr
        assert "lacks their passages: king" in done.stderr
        run, *found = records(done.stdout)
        assert (run["suite"], run["questions"]) == ("book", ["miller", "ferries"])
        assert [(r["length"], r["policy"], r["recall"], r["questions"]) for r in found] == [
            (length, policy, recall, 2)
            for length in (12, 0)
            for policy, recall in (("full", "off"), ("h2o", "off"), ("h2o", "auto"))
        ]
        parts = {path.name for path in (out / "parts").iterdir()}
        assert len(parts) == 1 + 2 * 2, "both modes are asked after one reading"
        done = invoke("h2o-compare", *base, "--policies", "full,h2o,sink")
        assert done.exit_code == 0, done.stderr
        assert parts < {path.name for path in (out / "parts").iterdir()}, "results are reused"
        assert [r for r in records(done.stdout)[1:] if r["policy"] != "sink"] == found
        asked = [json.loads(line) for line in (out / "replies" / "whole-book-h2o-64.jsonl").read_text().splitlines()]
        assert [(a["recall"], a["id"]) for a in asked] == [
            (mode, id) for mode in ("off", "auto") for id in ("miller", "ferries")
        ]
        assert asked[0]["distance"] > asked[1]["distance"] > 0
        table = (out / "tasks.md").read_text()
        assert "| policy | window | 12 tokens | whole book |" in table
        assert "| h2o with recall | 64 |" in table

    @pytest.mark.exhaustive
    @pytest.mark.usefixtures("small_book")
    def test_a_full_cache_ends_at_the_context(self, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("h2o_lab.book.suite.python_manual", lambda: f"{BOOK}\n\n{'And so on. ' * 99}")
        base = ["tasks", "--suite", "book", "-m", tiny_folder, "--jsonl", "-", "--policies", "full"]
        done = invoke("h2o-compare", *base, "--lengths", "12,0")
        assert done.exit_code == 0, done.stderr
        assert "left out, as the model has 400 positions: whole book full" in done.stderr
        assert [record["length"] for record in records(done.stdout)[1:]] == [12]
        done = invoke("h2o-compare", *base, "--lengths", "0")
        assert done.exit_code == 2
        assert "lower --lengths" in done.stderr

    @pytest.mark.parametrize(("options", "words"), [
        ("--form one-turn", "--form belongs to --suite ruler, the suite is book"),
        ("--tasks vt", "--tasks belongs to --suite harness and ruler"),
        ("--shots 1", "--shots belongs to --suite harness"),
    ])  # fmt: skip
    def test_options_of_other_suites(self, options: str, words: str) -> None:
        done = invoke("h2o-compare", "tasks", "--suite", "book", *options.split())
        assert done.exit_code == 2
        assert words in done.stderr
