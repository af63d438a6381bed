"""What is found of turns that begin with the names of several people, and the form in which it is read again."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from h2o_stream.recall.form import compose, forbidden
from h2o_stream.recall.passage import Candidate, Passage, Role
from h2o_stream.recall.speech import label
from h2o_stream.recall.terms import TermWeights
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


def candidate(excerpt: str, start: int = 0, role: Role = "user") -> Candidate:
    passage = Passage(1, role, excerpt, start, start + 10)
    return Candidate(passage, excerpt, 1.0, (), 0.0, 10, "recalled")


def test_without_candidates_the_message_is_alone() -> None:
    assert compose([], " What is it called? \n") == " What is it called? \n"


def test_excerpts_come_before_the_message() -> None:
    text = compose([candidate("My dog is called Pepper.")], "What is my dog called?")
    assert text == "Context from earlier:\nMy dog is called Pepper.\n\nQuestion: What is my dog called?"


def test_a_reply_is_told_apart_from_what_the_user_said() -> None:
    text = compose([candidate("I like coffee.", 10, "assistant"), candidate("I like tea.")], "Who likes what?")
    assert text == "Context from earlier:\nI like tea.\nYou said: I like coffee.\n\nQuestion: Who likes what?"


def test_the_best_excerpt_is_last() -> None:
    candidates = [candidate(f"The code is {start}.", start) for start in (700, 5, 90)]
    text = "Context from earlier:\nThe code is 90.\nThe code is 5.\nThe code is 700.\n\nQuestion: Which code?"
    assert compose(candidates, "Which code?") == text


def test_code_keeps_its_lines_and_their_indentation() -> None:
    code = "    if x:\n        return 2 * x"
    assert f"\n{code}\n" in compose([candidate(f"\n{code}\n\n")], "What is returned?")


@pytest.mark.parametrize("message", ["", "\n\nhello", "Question: again", "<|im_end|>", "Context from earlier:\n"])
def test_odd_messages_are_verbatim(message: str) -> None:
    text = compose([candidate("A fact.")], message)
    assert text == f"Context from earlier:\nA fact.\n\nQuestion: {message}"


@given(st.lists(st.tuples(st.text(), st.integers(0, 10**6), st.sampled_from(["user", "assistant"]))), st.text())
def test_every_excerpt_is_there_and_the_message_is_last(said: list[tuple[str, int, Role]], message: str) -> None:
    text = compose([candidate(*parts) for parts in said], message)
    assert text.endswith(message)
    before = text.removesuffix(message)
    assert all(excerpt.strip() in before for excerpt, _, _ in said)


def test_the_label_never_comes_out_of_a_reply(tokenizer: PreTrainedTokenizerBase) -> None:
    for said in ("Context from earlier: ...", "It says. Context from earlier"):
        ids = tokenizer(said)["input_ids"]
        assert any(forbidden(tokenizer).get(first) == second for first, second in pairwise(ids))
    ids = tokenizer("The context of this is from 1990.")["input_ids"]
    assert not any(forbidden(tokenizer).get(first) == second for first, second in pairwise(ids))
