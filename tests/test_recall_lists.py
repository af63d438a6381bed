"""Requests for several things at once."""

from collections.abc import Iterator

import pytest

from h2o_stream.recall.speech import is_request
from h2o_stream.recall.terms import TermWeights
from tests.test_recall_decision import Chat

PLACES = ["garage", "boathouse", "wine cellar", "attic", "greenhouse", "workshop", "archive", "chapel"]
CODES = {place: f"The code of the {place} is {2031 + 137 * i}." for i, place in enumerate(PLACES)}


@pytest.fixture
def chat(related: TermWeights) -> Iterator[Chat]:
    """The codes of eight places, each in a turn."""
    chat = Chat(related)
    for code in CODES.values():
        chat.say(code)
    yield chat
    chat.index.close()


@pytest.mark.parametrize(
    "message", ["List all the codes.", "What are the eight codes?", "What are all the codes I told you?"]
)
def test_all_things_of_a_kind_are_read(chat: Chat, message: str) -> None:
    assert sorted(chat.recalled(message)) == sorted(CODES.values())


def test_the_newest_value_of_each_is_read(chat: Chat) -> None:
    chat.say("The code of the attic has changed: it is 7755 now.")
    recalled = chat.recalled("List all the codes.")
    assert "The code of the attic has changed: it is 7755 now." in recalled
    assert CODES["attic"] not in recalled
    assert len(recalled) == len(CODES)


@pytest.mark.parametrize("message", [
    "What are the codes of the {}, the {} and the {}?",
    "Tell me the codes of the {}, the {}, and the {}.",
    "I forgot the codes of the {} or the {}; the {}.",
])  # fmt: skip
def test_each_thing_that_is_named_is_read_the_first_one_last(chat: Chat, message: str) -> None:
    """The last one stands next to the message, but replies follow the order of what they read."""
    places = ["garage", "attic", "wine cellar"]
    assert chat.recalled(message.format(*places)) == [CODES[place] for place in reversed(places)]


def test_what_was_never_said_is_not_replaced(chat: Chat) -> None:
    assert chat.recalled("What are the codes of the garage, the airport and the attic?") == [
        CODES["attic"], CODES["garage"],
    ]  # fmt: skip
    assert chat.recalled("What are the codes of the airport and the harbour?") == []


def test_the_parts_share_a_word(chat: Chat) -> None:
    chat.say("My grandfather painted the sea and the harbour.")
    chat.say("We met a lion at the zoo.")
    assert chat.recalled("Write a poem about love, the lion and the sea.") == []


def test_what_was_asked_before_is_no_answer(chat: Chat) -> None:
    """Though it has a word that counts for nothing."""
    request = "Add a paragraph on what visitors of Kyoto should pack, as five lines."
    chat.say(request)
    assert chat.recalled(request) == []


def test_a_list_may_be_long(chat: Chat) -> None:
    recalled = chat.recalled("the code, " * 20_000 + "the code of the attic?")
    assert recalled
    assert set(recalled) <= set(CODES.values())


def test_earlier_requests_are_not_read(chat: Chat) -> None:
    chat.say("Tell me the codes of the garage and the attic.")
    chat.say("Please list the codes of the boathouse, as I need them.")
    assert sorted(chat.recalled("List all the codes.")) == sorted(CODES.values())


def test_sentences_around_them_are_not_read(related: TermWeights) -> None:
    chat = Chat(related)
    for code in CODES.values():
        chat.say(f"{code} It was painted blue last summer, when nobody had time for more than that.")
    assert sorted(chat.recalled("List all the codes.")) == sorted(CODES.values())
    chat.index.close()


def test_of_a_list_what_is_held_is_read_as_well(chat: Chat) -> None:
    last = chat.ask("List all the codes.")[0].passage
    candidates = chat.ask("List all the codes.", held=lambda start, stop: float(start == last.start))
    assert {candidate.verdict for candidate in candidates} == {"recalled"}
    (held,) = chat.ask("What is the code of the chapel?", held=lambda start, stop: float(start == last.start))[:1]
    assert held.verdict == "still held"


@pytest.mark.parametrize(("text", "expected"), [
    ("What is it?", True),
    ("Tell me more.", True),
    ("please, show us the way.", True),
    ("Dis-moi le code.", True),
    ("Gib mir den Schlüssel.", True),
    ("I told them.", False),
    ("Listen: it is 5.", False),
    ("The list is long.", False),
    ("Tell my boss that I am ill.", False),
])  # fmt: skip
def test_requests(text: str, expected: bool) -> None:
    assert is_request(text) == expected
