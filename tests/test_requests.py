"""Requests in the cookbook's and HELM's formats, and invalid ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from h2o_lab.summarize.requests import read_requests
from h2o_stream.config import SamplingConfig
from h2o_stream.errors import DataError

FORM = {"max_tokens": 64, "temperature": 0.3, "top_p": 1, "stop": ["###"], "n": 1, "logprobs": 1}


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_both_forms_are_read(tmp_path: Path) -> None:
    cookbook = {"article": "A long text.", "summary_gt": "A text.", **FORM}
    helm = {"prompt": "Another.", "best_of": 1, "echo": False, "model": "x", **FORM}
    path = written(tmp_path, cookbook, "", helm, {"request": helm, "result": {}}, {"prompt": "bare"})
    first, second, third, bare = read_requests(path)
    assert (first.prompt, first.reference) == ("A long text.", "A text.")
    assert first.sampling == SamplingConfig(0.3, 1, 0, 0, 1, dry_multiplier=0, max_tokens=64, stop=("###",))
    assert second == third
    assert second.reference is None
    assert bare.sampling == SamplingConfig(0.0, 1.0, 0, 0, 1, dry_multiplier=0, max_tokens=64)
    assert len(read_requests(path, 2)) == 2


@pytest.mark.parametrize(("line", "words"), [
    ("{", "not JSON"), ("[1]", "expected an object, got list"), ({"text": "x"}, "article or prompt must be"),
    ({"prompt": 3}, "article or prompt must be"), ({"prompt": ""}, "article or prompt must be"),
    ({"article": "x", "summary_gt": ["y"]}, "summary_gt must be"),
    ({"prompt": "x", "stop": [1]}, "stop must be"), ({"prompt": "x", "stop": [""]}, "a stop string is empty"),
    ({"prompt": "x", "max_tokens": "many"}, "max_tokens must be a number"),
    ({"prompt": "x", "max_tokens": 0}, "--max-tokens must be at least 1"),
    ({"prompt": "x", "temperature": True}, "temperature must be a number"),
    ({"prompt": "x", "temperature": -1}, "--temp must be 0"),
])  # fmt: skip
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, line: Any, words: str) -> None:
    path = written(tmp_path, {"prompt": "fine"}, line)
    with pytest.raises(DataError, match=r"requests\.jsonl:2: ") as caught:
        read_requests(path)
    assert words in str(caught.value)


def test_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the file has no requests"):
        read_requests(written(tmp_path, ""))
