"""Streaming Markdown: finished lines do not change, neither in the text nor on the screen."""

import io
import math
import re
from collections import Counter

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from h2o_stream.ui.reply import MarkdownBlocks, MarkdownReply, close_marks
from h2o_stream.ui.terminal import Frames
from tests.fixtures import with_exhaustive

TEXT = """# A title

A paragraph with **bold words** and `code` that is long enough to be wrapped
over two lines of a narrow terminal.

- one
- two

1. first
2. second

```python
def hello():

    print("hello")
```
And the end.
"""


def cut(text: str, size: int) -> list[str]:
    blocks = MarkdownBlocks()
    found = [block for start in range(0, len(text), size) for block in blocks.push(text[start : start + size])]
    return found + blocks.close()


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_blocks(size: int) -> None:
    blocks = cut(TEXT, size)
    assert [block.split("\n")[0] for block in blocks] == [
        "# A title", "A paragraph with **bold words** and `code` that is long enough to be wrapped", "- one",
        "1. first", "```python", "And the end.",
    ]  # fmt: skip
    assert blocks[4].endswith('    print("hello")\n```\n')


@given(st.text(alphabet="ab`~*#- \n", max_size=80), st.integers(1, 9))
def test_no_word_is_lost(text: str, size: int) -> None:
    assert "".join(cut(text, size)).split() == text.split()


def test_code_in_code_stays_open() -> None:
    assert cut("````\n```\n\n```\n````\nend", 3) == ["````\n```\n\n```\n````\n", "end"]


def shown(text: str, width: int) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=width, height=50)
    with MarkdownReply(lambda width: Text(), console) as reply:
        reply._live.stop()
        reply.push(text)
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", console.file.getvalue())


PIECES = (
    "List<String>", "<div>", "</div>", "<title>", "a<b and c>d", "[1]: http://x.yz", "[^1]: note", "[the docs](http://ab.cd)",
    "![picture](p.png)", "<http://ef.gh>", "snake_case", "`<b>`", "*", "**", "\n", "\n\n", " ", "\n- ", "\n# ", "\n> ",
    "\n\n| one | `x<y>` |\n|---|---|\n| longest_name_of_a_function | 日本語の長い説明文がここに入ります |\n\n",
)  # fmt: skip
"""Of replies, as models write them."""


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.sampled_from([20, 80]))
def test_every_letter_is_shown(text: str, width: int) -> None:
    """Regression: tags (List<String>), addresses, and what was too long in a table were missing in the chat."""
    assert Counter(filter(str.isalpha, shown(text, width))) == Counter(filter(str.isalpha, text))


def test_lines_end_where_the_reply_ends_them() -> None:
    """Regression: the lines of a poem were joined."""
    lines = shown("Roses are red,\nviolets are blue.", 80).split("\n")
    assert [line.strip() for line in lines if line.strip()] == ["Roses are red,", "violets are blue."]


@pytest.mark.parametrize(
    ("block", "shown"),
    [("a **b", "a **b**"), ("a **b**", "a **b**"), ("a `b", "a `b`"), ("a **", "a "), ("```\n`", "```\n`"), ("a", "a")],
)
def test_open_marks_are_closed(block: str, shown: str) -> None:
    assert close_marks(block) == shown


def test_drawing_takes_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a block of a thousand lines was drawn between any two tokens, ten times as long as these take."""
    clock, drawing = [0.0], [0.0]
    monkeypatch.setattr("h2o_stream.ui.terminal.time.monotonic", lambda: clock[0])

    class Slow:
        def __rich__(self) -> str:
            clock[0] += 0.5
            drawing[0] += 0.5
            return ""

    with Frames(Slow(), Console(file=io.StringIO(), force_terminal=True), 0.08) as frames:
        clock[0], drawing[0] = 0.0, 0.0
        for _ in range(1000):
            clock[0] += 0.05
            frames.draw()
        assert 5 < drawing[0] < 0.3 * clock[0]


@pytest.mark.parametrize(("columns", "refreshed"), with_exhaustive([(30, 1), (80, 7)], [(30, 7), (80, 1)]))
def test_finished_lines_stay(columns: int, refreshed: int) -> None:
    """On a real terminal, frame by frame: a line with another below it never changes again."""
    screen = pyte.HistoryScreen(columns, 20, history=500)
    stream = pyte.Stream(screen)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=columns, height=20, highlight=False)

    def lines() -> list[str]:
        stream.feed(out.getvalue().replace("\n", "\r\n"))
        out.seek(0)
        out.truncate()
        past = ["".join(row[x].data for x in range(columns)) for row in screen.history.top]
        return [line.rstrip() for line in past + screen.display]

    frames = []
    with MarkdownReply(lambda width: Text("FOOTER"), console) as reply:
        for number, character in enumerate(TEXT):
            reply._live._next_at = math.inf
            reply.push(character)
            if number % refreshed == 0:
                reply._live.refresh()
                frames.append(lines())
    final = "\n".join(lines())
    assert final.count("A paragraph") == final.count("one") == final.count("def hello") == 1
    assert "FOOTER" not in final
    assert 'print("hello")' in final
    for frame in frames:
        finished = "\n".join(frame[: frame.index("FOOTER")]).rstrip().split("\n")[:-1]
        assert final.split("\n")[: len(finished)] == finished
