"""The form in which excerpts are read again, in front of the user's message."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from h2o_stream.recall.form import compose, forbidden
from h2o_stream.recall.passage import Candidate, Passage, Role


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
