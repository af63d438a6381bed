"""Streaming Markdown: finished lines do not change, neither in the text nor on the screen."""

import io
import math

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
