"""The programs in examples/."""

import ast
import io
import re
import runpy
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import make_llama, thinned
from tests.oracle import Oracle, Rules
from tests.test_oracle import TIE, tokens_of
from tests.tolerance import assert_close

EXAMPLES = Path(__file__).parents[1] / "examples"
naive_h2o: Any = runpy.run_path(str(EXAMPLES / "naive_h2o.py"))


SHAPES, WINDOWS, PROMPTS = [(2, 1), (1, 3), (2, 3)], [(0, 7), (5, 6), (6, 1)], [1, 9, 30]


@pytest.mark.every(2)
@pytest.mark.parametrize(("shape", "window", "prompt"), thinned(
    product(SHAPES, WINDOWS, PROMPTS),
    lambda *row: len({*map(list.index, (SHAPES, WINDOWS, PROMPTS), row)}) == 1,
))  # fmt: skip
def test_naive_h2o_is_the_oracle(shape: tuple[int, int], window: tuple[int, int], prompt: int) -> None:
    (heads, groups), (heavy, recent) = shape, window
    model = make_llama(heads=heads, groups=groups, seed=1)
    tokens = tokens_of(2, 60)
    chunks = [tokens[:prompt], *([token] for token in tokens[prompt:50]), tokens[50:]]
    oracle = Oracle(model, Rules(heavy + recent, heavy))
    expected, wanted = [], []
    for chunk in chunks:
        expected.append(oracle.feed(chunk))
        wanted.append([oracle.kept(layer) for layer in range(2)])
    assert oracle.margin > TIE
    stream = naive_h2o["Stream"](model, heavy, recent)
    for chunk, logits, kept in zip(chunks, expected, wanted, strict=True):
        assert_close(stream.feed(chunk), logits)
        assert [layer.index.tolist() for layer in stream.layers] == kept


def test_naive_h2o_replies_and_says_what_it_kept(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    naive_h2o["main"]("Hello!", "60", str(tiny_folder))
    reply, rest = capsys.readouterr().out.split("\n\nKept 64 of ")
    assert reply
    seen, kept = rest.split(" tokens: ")
    assert int(seen) > 80  # the prompt, and 59 of the reply
    assert len(ast.literal_eval(kept)) == 64


def test_a_chat(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["chat.py", str(tiny_folder)])
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello!\nAnd then?\nWhy?\n"))
    runpy.run_path(str(EXAMPLES / "chat.py"), run_name="__main__")
    told = re.findall(r"\[(\d+) of (\d+) tokens kept, \d+ tok/s\]", capsys.readouterr().out)
    kept, seen = zip(*((int(kept), int(seen)) for kept, seen in told), strict=True)
    assert 0 < seen[0] < seen[1] < seen[2]
    assert kept == tuple(min(count, 256) for count in seen)


def test_a_chat_without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["chat.py", "/no/such/model.gguf"])
    with pytest.raises(SystemExit, match="no/such/model"):
        runpy.run_path(str(EXAMPLES / "chat.py"), run_name="__main__")
