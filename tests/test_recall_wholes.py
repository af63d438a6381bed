"""What a message names as a whole: chapters, sections, files, the text that was given last."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from h2o_stream.recall.passage import SaidTurn
from h2o_stream.recall.wholes import find_whole
from tests.histories import TALK, Histories, said

WORDS = "It rained on the harbour, and nobody came. " * 8
NOVEL = "THE HARBOUR\n\n" + "\n\n".join(
    f"{name}\n\n{WORDS}{name} ends here." for name in ("Chapter I. The Storm", "Chapter II.", "Chapter III: Peace")
)
MANUAL = f"""# Manual

1. Duties
2. Packages

## 1. Duties
{WORDS}
### 1.1. Holidays
{WORDS}
1. Tell the others.
2. Take the keys with you.
{WORDS} Duties end here.

## 2. Packages
{WORDS}"""
PLAIN = (
    f"5.1. Motivation¶\n{WORDS}\n5.2. New packages\n{WORDS}\n5.2.1. Names\n{WORDS} Names end.\n5.3. Changes\n{WORDS}"
)
TURNS: list[SaidTurn] = [
    (1, NOVEL, "Thank you."), (2, f"manual.md:\n\n{MANUAL}", "Thank you."), (3, PLAIN, "Thank you."),
    (4, "Chapter 2?", "Chapter 9: Fish\n\n" + WORDS), (5, "Chapter IV. War\n\n" + WORDS + "A new one.", ""),
]  # fmt: skip


def found(message: str, turns: list[SaidTurn] = TURNS) -> tuple[int, str, str] | None:
    """The turn, and how the text begins and ends."""
    whole = find_whole(message, lambda: turns)
    return whole and (whole.turn, whole.text[:12], whole.text[-9:])


@pytest.mark.parametrize(("message", "turn", "begins", "ends"), [
    ("Summarize chapter 2.", 1, "Chapter II.\n", "ends here"),
    ("What happens in Chapter III?", 1, "Chapter III:", "ends here"),
    ("Who rows the boat in chapter one?", 1, "Chapter I. T", "ends here"),
    ("And the second chapter?", 1, "Chapter II.\n", "ends here"),
    ("Summarize the last chapter", 5, "Chapter IV. ", " new one."),
    ("Fasse Kapitel 2 zusammen.", 1, "Chapter II.\n", "ends here"),
    ("Summarize chapter 9", 4, "Chapter 9: F", "obody came."),
    ("Translate section 1 into French.", 2, "## 1. Duties", "end here."),
    ("Summarize the part about New packages", 3, "5.2. New pac", "Names end."),
    ("Summarize section 5.2.1", 3, "5.2.1. Names", "Names end."),
    ("Summarize manual.md", 2, "manual.md:\n\n", "obody came."),
    ("Please summarize the whole text.", 2, "manual.md:\n\n", "obody came."),
])  # fmt: skip
def test_what_is_named(message: str, turn: int, begins: str, ends: str) -> None:
    whole = find_whole(message, lambda: TURNS)
    assert whole is not None
    assert (whole.turn, whole.text[: len(begins)]) == (turn, begins)
    assert whole.text.rstrip(". ").endswith(ends.strip(". "))


@pytest.mark.parametrize("message", [
    "Who rows the boat?", "Write chapter 2 of a novel.", "Translate 'good morning' into French.",
    "Summarize the plot of Hamlet.", "What is the part I wrote about?",
    "I read chapter 2 yesterday. What should I cook?", "Explain the first part of your answer",
    "Summarize this text: " + WORDS, "",
])  # fmt: skip
def test_what_is_not(message: str) -> None:
    whole = find_whole(message, lambda: TURNS[1:4])
    assert whole is None or whole.name in message


PROSE = "The class Invoice:\nClass Invoice has a function to add cents.\nIt keeps a total."
ADD = "    def add(self, cents):\n        self.total += cents"


@pytest.mark.parametrize(("message", "code"), [
    ("Show me the class Invoice again.", f"class Invoice:\n    total = 0\n\n{ADD}"),
    ("Document the `add` function", ADD),
    ("Add a column to the table invoices", "CREATE TABLE invoices (\n    cents INT\n);"),
    ("What is the function of the liver?", None),
    ("Write a function to sort a list.", None),
    ("Summarize the story in a sentence.", None),
])  # fmt: skip
def test_code(message: str, code: str | None) -> None:
    """The newest version, the model's too."""
    old = "class Invoice:\n    pass"
    new = (
        f"Sure:\n```python\nclass Invoice:\n    total = 0\n\n{ADD}\n```\n"
        "```sql\nCREATE TABLE invoices (\n    cents INT\n);\n```\nDone."
    )
    whole = find_whole(message, lambda: [(1, old, new), (2, "Thanks", PROSE)])
    assert (whole.text if whole else None) == code


def test_all_that_was_said() -> None:
    whole = find_whole("Summarize our conversation", lambda: [(1, "Hi", "Hello"), (2, "Bye", "See you")])
    assert whole is not None
    assert (whole.turn, whole.text) == (2, "User: Hi\n\nAssistant: Hello\n\nUser: Bye\n\nAssistant: See you")


def test_what_was_never_given() -> None:
    whole = find_whole("Summarize chapter 12", lambda: TURNS)
    assert whole is not None
    assert (whole.name, whole.turn, whole.text) == ("chapter 12", 0, "")


def test_transcripts_are_not_read_for_other_messages() -> None:
    assert find_whole("What is the code of the cellar?", [].pop) is None


NESTED = "def add\n  1\n  def add\n    22\n    def add(x)\n      333\n    4\n}\n\ndef add\n\n def mul\n"


def test_the_longest_definition() -> None:
    """Also of those inside of each other; blank lines around it are no part."""
    for before, after in (("", ""), ("def add\n\n", "\n"), ("x\n  def add\n   1", "\ny"), ("}\n", "def add\n 1\n")):
        whole = find_whole("Explain the function add.", lambda text=f"{before}\n{NESTED}{after}": [(1, text, "Yes.")])
        assert whole is not None
        assert whole.text == NESTED.partition("\n\n")[0]


@pytest.mark.parametrize("asked", ["Explain the function add.", "Summarize the introduction.", "Summarize chapter 1."])
@pytest.mark.parametrize("line", ["def add\n", "def add\n x\n", "# Introduction\nx\n", "Chapter 1\n\n"])
def test_a_text_of_nothing_else(asked: str, line: str) -> None:
    """Time does not grow with the square of the lines that could be meant: a few megabytes took an hour."""
    text, began = line * (2**18 // len(line)), time.process_time()
    find_whole(asked, lambda: [(1, text, "Yes.")])
    assert time.process_time() - began < 3


class Counted(Sequence[SaidTurn]):
    """Counts how many turns are read."""

    def __init__(self, turns: Sequence[SaidTurn]) -> None:
        self.turns, self.seen = turns, 0

    def __len__(self) -> int:
        return len(self.turns)

    def __getitem__(self, index: Any) -> Any:
        self.seen += 1
        return self.turns[index]


@pytest.mark.usefixtures("own_home")
def test_a_long_conversation_is_not_read_for_a_whole(make_history: Histories, monkeypatch: pytest.MonkeyPatch) -> None:
    history, seen = make_history(), []
    recall = history.conversation.recall
    recall.mode = "auto"
    said(history, "class Sea:\n    def wave(self):\n        return 'a wave'\n", *TALK)
    turns = list(recall.source())
    for length in (2_000, 100_000):
        many = Counted([*turns, *((number, "More?", "No.") for number in range(len(turns) + 1, length))])
        monkeypatch.setattr(recall, "source", lambda many=many: many)
        monkeypatch.setattr(recall, "_in_sync", True)
        whole = recall.find("Show me the class Sea again.").whole
        assert whole is not None
        assert (whole.turn, whole.text.partition("\n")[0]) == (1, "class Sea:")
        seen.append(many.seen)
    assert seen[1] < seen[0] + 50
