"""What is found of turns that begin with the names of several people, and how LoCoMo measures it."""

import json
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from h2o_stream.compare.recall.locomo import Question, read_dialogues, score
from h2o_stream.errors import DataError
from h2o_stream.recall.dialogue import label
from h2o_stream.recall.terms import TermWeights
from tests.commands import invoke, records
from tests.test_recall_decision import Chat

TURNS = [
    "Nora, 3 May 2023: Hi Emil! I planted tomatoes on my balcony yesterday.",
    "Emil, 3 May 2023: Lovely! I spent the morning in the dentist's chair. It was awful.",
    "Nora, 3 May 2023: Poor you. How did your piano recital go?",
    "Emil, 3 May 2023: Terrific, they clapped for ten minutes.",
    "Nora, 9 June 2023: My sister gave me a silver necklace, it comes from Iceland.",
    "Emil, 9 June 2023: I like your necklace! I bought a kayak at the harbour.",
    "Nora, 9 June 2023: What colour is it?",
    "Emil, 9 June 2023: It is bright orange, and the paddle is black.",
]


@pytest.fixture
def chat(related: TermWeights) -> Iterator[Chat]:
    chat = Chat(related)
    for turn in TURNS:
        chat.say(turn, "")
    yield chat
    chat.index.close()


@pytest.mark.parametrize(("text", "expected"), [
    ("Nora, 3 May 2023: Hi!", "Nora, 3 May 2023: "), ("Emil: Hi!", "Emil: "), ("[3 May] Nora: Hi!", "[3 May] Nora: "),
    ("Nora Berg: Hi!", "Nora Berg: "), ("Hi, here is the list: eggs.", ""), ("At 7:30 we met.", ""), ("", ""),
])  # fmt: skip
def test_labels(text: str, expected: str) -> None:
    assert label(text) == expected


@pytest.mark.parametrize(("question", "turn"), [
    ("What did Nora plant on her balcony?", 1),
    ("Where does Nora's necklace come from?", 5),
    ("What did Emil buy at the harbour?", 6),
    ("How did Emil's piano recital go?", 4),
])  # fmt: skip
def test_what_a_person_says_of_themselves_is_read(chat: Chat, question: str, turn: int) -> None:
    first = chat.ask(question)[0]
    assert (first.passage.turn, first.verdict) == (turn, "recalled")
    assert first.excerpt.startswith(label(TURNS[turn - 1])), "with the name and the day"


@pytest.mark.parametrize("question", [
    "What did Emil plant on his balcony?", "Where does Emil's necklace come from?", "What did Nora buy at the harbour?",
])  # fmt: skip
def test_what_the_other_one_says_is_no_answer(chat: Chat, question: str) -> None:
    assert not chat.recalled(question)


def test_further_turns_of_the_dialogue_ask_nothing(chat: Chat) -> None:
    assert not chat.recalled("Nora, 9 July 2023: Emil, how is the kayak that you bought at the harbour?")


def test_what_the_user_tells_is_found_beside_a_dialogue(chat: Chat) -> None:
    chat.say("My favourite cheese is halloumi.")
    chat.say("Nora's birthday is on the 17th of May.")
    assert chat.recalled("What is my favourite cheese?") == ["My favourite cheese is halloumi."]
    assert "Nora's birthday is on the 17th of May." in chat.recalled("When is Nora's birthday?")


def test_a_word_before_a_colon_is_no_speaker(related: TermWeights) -> None:
    chat = Chat(related)
    chat.say("Note: the spare key is under the birdbath.")
    chat.say("The note on the fridge says that the milk has gone off.")
    assert chat.recalled("What does the note on the fridge say?")[0].startswith("The note on the fridge")


def test_a_doubt_is_told(chat: Chat) -> None:
    assert chat.ask("What did Nora plant on her balcony?")[0].sure
    chat.say("My favourite cheese is halloumi.")
    chat.say("My aunt Rosalind works as a beekeeper.")
    assert chat.ask("What is my favourite cheese?")[0].sure
    assert not chat.ask("What is my favourite cheese of a Sunday afternoon?")[0].sure


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


class TestLocomo:
    def test_turns_and_questions_are_read(self, tmp_path: Path) -> None:
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
    def test_another_file(self, tmp_path: Path, text: str) -> None:
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
    def test_replies_are_scored_as_the_benchmark_does(
        self, category: int, answer: str, reply: str, expected: float
    ) -> None:
        stem = lambda word: word.removesuffix("s")  # noqa: E731
        assert score(reply, Question("", answer, category, frozenset()), stem) == pytest.approx(expected)

    @pytest.fixture
    def stemmer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stands in for NLTK, which takes a second to import."""
        for name in ("nltk", "nltk.stem"):
            module = ModuleType(name)
            module.__spec__, module.PorterStemmer = ModuleSpec(name, None), lambda: SimpleNamespace(stem=str)
            monkeypatch.setitem(sys.modules, name, module)

    @pytest.mark.usefixtures("stemmer")
    def test_the_table(self, tiny_folder: Path, tmp_path: Path) -> None:
        base = ["recall", "-m", tiny_folder, "--locomo", locomo(tmp_path), "--jsonl", "-"]
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

    def test_wrong_options(self, tiny_folder: Path, tmp_path: Path) -> None:
        base, file = ["recall", "-m", tiny_folder], locomo(tmp_path)
        assert "--text and --locomo" in invoke("h2o-compare", *base).stderr
        assert "--text and --locomo" in invoke("h2o-compare", *base, "--locomo", file, "--text", file).stderr
        assert "has 1" in invoke("h2o-compare", *base, "--locomo", file, "--conversations", "2").stderr
