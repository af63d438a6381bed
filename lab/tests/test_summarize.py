"""Requests in the cookbook's and HELM's formats, and summaries of them."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from h2o_lab.summarize.requests import Article, build_requests, read_articles, read_requests
from h2o_stream.config import SamplingConfig
from h2o_stream.errors import DataError
from tests.commands import invoke, records
from tests.fixtures import written

FORM = {"max_tokens": 64, "temperature": 0.3, "top_p": 1, "stop": ["###"], "n": 1, "logprobs": 1}


def request_file(folder: Path, *lines: Any) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_both_forms_are_read(tmp_path: Path) -> None:
    cookbook = {"article": "A long text.", "summary_gt": "A text.", **FORM}
    helm = {"prompt": "Another.", "best_of": 1, "echo": False, "model": "x", **FORM}
    path = request_file(tmp_path, cookbook, "", helm, {"request": helm, "result": {}}, {"prompt": "bare"})
    first, second, third, bare = read_requests(path)
    assert (first.prompt, first.reference) == ("A long text.", "A text.")
    assert first.sampling == SamplingConfig(0.3, 1, 0, 0, 1, dry_multiplier=0, max_tokens=64, stop=("###",))
    assert second == third
    assert second.reference is None
    assert bare.sampling == SamplingConfig(0.0, 1.0, 0, 0, 1, dry_multiplier=0, max_tokens=64)
    assert len(read_requests(path, 2)) == 2


@pytest.mark.parametrize(("line", "words"), [
    ("{", "not JSON"), ("[1]", "expected an object, got list"), ({"text": "x"}, "article or prompt must be"),
    ('{"id": ' + "9" * 5000 + "}", "not JSON"), ({"prompt": "x", "max_tokens": math.inf}, "must be a number"),
    ({"prompt": 3}, "article or prompt must be"), ({"prompt": ""}, "article or prompt must be"),
    ({"article": "x", "summary_gt": ["y"]}, "summary_gt must be"),
    ({"prompt": "x", "stop": [1]}, "stop must be"), ({"prompt": "x", "stop": [""]}, "a stop string is empty"),
    ({"prompt": "x", "max_tokens": "many"}, "max_tokens must be a number"),
    ({"prompt": "x", "max_tokens": 0}, "--max-tokens must be at least 1"),
    ({"prompt": "x", "temperature": True}, "temperature must be a number"),
    ({"prompt": "x", "temperature": -1}, "--temp must be 0"),
])  # fmt: skip
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, line: Any, words: str) -> None:
    path = request_file(tmp_path, {"prompt": "fine"}, line)
    with pytest.raises(DataError, match=r"requests\.jsonl:2: ") as caught:
        read_requests(path)
    assert words in str(caught.value)


def test_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the file has no requests"):
        read_requests(request_file(tmp_path, ""))


@pytest.fixture
def articles(tmp_path: Path) -> Path:
    lines = [{"document": f"Text {n}.\nMore of it.", "summary": f"Summary {n}."} for n in range(4)]
    return written(tmp_path / "articles.jsonl", lines)


def test_examples_come_before_the_article() -> None:
    (request,) = build_requests([Article("One.", "1"), Article("Two.", "2")], "xsum", shots=1)
    asks = "\n\nSummarize the above article in 1 sentence.\n"
    assert request["article"] == f"###\nArticle: One.{asks}1\n\n###\nArticle: Two.{asks}"
    assert (request["summary_gt"], request["stop"], request["max_tokens"]) == ("2", ["###"], 64)
    (other,) = build_requests([Article("One.", "1")], "cnn_dailymail", shots=0)
    assert "in 3 sentences" in other["article"]
    assert other["max_tokens"] == 128


def test_from_articles_to_a_table(articles: Path, tiny_folder: Path, tmp_path: Path) -> None:
    asked, answers = tmp_path / "requests.jsonl", tmp_path / "new" / "answers.jsonl"
    built = invoke("h2o-compare", "requests", articles, "--form", "xsum", "--shots", "1", "--to", asked)
    assert built.exit_code == 0, built.stderr
    assert len(read_requests(asked)) == 3
    base = ["summarize", "-m", tiny_folder, "--input_path", asked, "--policies", "h2o", "--recent_ratio", "0.2"]
    made = invoke("h2o-compare", *base, "--output_path", answers, "--limit", "2", "--jsonl", "-")
    assert made.exit_code == 0, made.stderr
    echoed = records(answers.read_text())
    assert [line["request"] for line in echoed] == records(asked.read_text())[:2]
    assert all(line["result"]["choices"][0]["finish_reason"] in ("stop", "length") for line in echoed)
    table = tmp_path / "table.tex"
    scored = invoke("h2o-compare", "score", answers, "--to", table, "--jsonl", "-")
    assert scored.exit_code == 0, scored.stderr
    (score,) = records(scored.stdout)
    summarized = records(made.stdout)[1]
    assert [score[name] for name in ("n", "rouge1", "rouge2", "rougeL")] == [
        summarized[name] for name in ("n", "rouge1", "rouge2", "rougeL")
    ]
    assert r"\begin{tabular}{lrrrr}" in table.read_text()
    markdown = tmp_path / "table.md"
    assert invoke("h2o-compare", "score", answers, "--to", markdown, "-q").exit_code == 0
    assert "| answers | n | ROUGE-1 |" in markdown.read_text()


def test_a_perfect_answer(tmp_path: Path) -> None:
    lines = [{"text": "the same words", "reference": "the same words"}, {"text": "others", "reference": "none"}]
    path = written(tmp_path / "answers.jsonl", lines)
    (score,) = records(invoke("h2o-compare", "score", path, "--jsonl", "-").stdout)
    assert score["rouge2"] == pytest.approx(0.5)


@pytest.mark.parametrize(("arguments", "words"), [
    (["requests", "articles.jsonl", "--to", "x", "--shots", "4"], "lower --shots"),
    (["requests", "nothing", "--to", "x"], "nothing: No such file"),
    (["score", "articles.jsonl"], "articles.jsonl:1: no answer with its reference"),
    (["summarize", "--requests", "r", "--output-path", "x"], "takes one of --policies and of --windows"),
])  # fmt: skip
def test_what_is_wrong_is_one_line(articles: Path, monkeypatch: Any, arguments: list[str], words: str) -> None:
    monkeypatch.chdir(articles.parent)
    done = invoke("h2o-compare", *arguments, "-q")
    assert done.exit_code in (1, 2)
    assert (done.stderr.count("\n"), words in done.stderr) == (1, True), done.stderr
    assert len(read_articles(articles)) == 4


@pytest.mark.usefixtures("no_charts")
def test_summarize(tiny_folder: Path, text: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "requests.jsonl", tmp_path / "out"
    request = {"max_tokens": 6, "temperature": 0.5, "top_p": 1, "n": 1, "summary_gt": "some words"}
    stops = [[], [], [], ["###"], []]
    written(file, [{**request, "article": "word " * (20 + 9 * n), "stop": stops[n]} for n in range(5)])
    base = ["summarize", "-m", tiny_folder, "--requests", file, "--policies", "full,h2o", "--windows", "16,32"]
    base += ["--jsonl", "-", "--dtype", "float32"]
    done = invoke("h2o-compare", *base, "--limit", "4", "--out", out)
    assert done.exit_code == 0, done.stderr
    run, *results = records(done.stdout)
    assert (run["requests"], run["prefill"], run["sample"]) == (4, "full", False)
    assert [(r["policy"], r["window"], r["n"]) for r in results] == [
        ("full", None, 4), ("h2o", 16, 4), ("h2o", 32, 4),
    ]  # fmt: skip
    assert [r["evicting"] for r in results] == [0, 4, 3]
    assert all(0 <= r["rouge2"] <= r["rouge1"] <= 1 and 4 <= r["new_tokens"] <= 24 for r in results)
    names = sorted(path.name for path in (out / "predictions").iterdir())
    assert names == ["full.jsonl", "h2o-16.jsonl", "h2o-32.jsonl"]
    assert "| h2o | 16 |" in (out / "summarize.md").read_text()
    assert (out / "summarize.png").exists()

    whole = (out / "predictions" / "h2o-16.jsonl").read_text()
    (out / "predictions" / "h2o-16.jsonl").unlink()
    sorted((out / "parts").iterdir())[0].write_bytes(b"torn")
    again = invoke("h2o-compare", *base, "--limit", "4", "--out", out, "-q")
    assert again.exit_code == 0, again.stderr
    made = {line["index"]: line["text"] for line in records((out / "predictions" / "h2o-16.jsonl").read_text())}
    assert made == {line["index"]: line["text"] for line in records(whole)}
    for old, new in zip(results, records(again.stdout)[1:], strict=True):
        assert {**old, "tok_s": 0} == {**new, "tok_s": 0}

    other = invoke("h2o-compare", *base, "--out", out, "--sample", "-q")
    assert other.exit_code == 1
    assert "another run" in other.stderr


def test_summarize_says_where_nothing_is_evicted(tiny_folder: Path, tmp_path: Path) -> None:
    file = written(tmp_path / "requests.jsonl", [{"article": "word " * 20, "summary_gt": "word", "max_tokens": 4}])
    base = ["summarize", "-m", tiny_folder, "--requests", file, "--policies", "h2o", "--windows", "16,200,300"]
    done = invoke("h2o-compare", *base)
    assert done.exit_code == 0, done.stderr
    assert "At 200 and 300 nothing was evicted: no request exceeds that." in " ".join(done.stderr.split())


def test_summarize_by_ratios_and_by_bytes(tiny_folder: Path, tmp_path: Path) -> None:
    """Regression: both ended in "leave out --window", which nobody had given."""
    lines = [{"article": "word " * count, "summary_gt": "word", "max_tokens": 4} for count in (100, 300)]
    file = written(tmp_path / "requests.jsonl", lines)
    base = ["summarize", "-m", tiny_folder, "--requests", file, "--policies", "full,h2o", "--jsonl", "-"]
    done = invoke("h2o-compare", *base, "--heavy_ratio", "0.1", "--recent_ratio", "0.1", "--sinks", "4")
    assert done.exit_code == 0, done.stderr
    run, full, h2o = records(done.stdout)
    assert run["window"] == [None, None]
    assert full["windows"] is None
    low, high = h2o["windows"]
    assert low - 4 == pytest.approx(run["prompt_tokens"] / 4 * 2 * 0.2, abs=2)
    assert high - 4 == pytest.approx(run["prompt_tokens"] * 3 / 4 * 2 * 0.2, abs=2)
    assert f"{low} to {high}" in done.stderr
    sized = invoke("h2o-compare", *base, "--cache-size", "8KiB")
    assert sized.exit_code == 0, sized.stderr
    (window,) = {*records(sized.stdout)[2]["windows"]}
    assert records(sized.stdout)[2]["window"] == window != 256
    both = invoke("h2o-compare", *base, "--recent-ratio", "0.1", "--windows", "32")
    assert (both.exit_code, both.stderr.count("\n")) == (2, 1)
    assert "leave out --windows" in both.stderr


def test_requests_beyond_the_context(tiny_folder: Path, tmp_path: Path) -> None:
    """Regression: one request that full cannot read ended the whole run."""
    lines = [{"article": "word " * count, "summary_gt": "word", "max_tokens": 4} for count in (50, 900, 60)]
    file = written(tmp_path / "requests.jsonl", lines)
    base = ["summarize", "-m", tiny_folder, "--requests", file, "--windows", "32", "--jsonl", "-"]
    done = invoke("h2o-compare", *base, "--policies", "full,recent,h2o")
    assert done.exit_code == 0, done.stderr
    counts = {r["policy"]: (r["n"], r["left_out"]) for r in records(done.stdout)[1:]}
    assert counts == {"full": (2, 1), "recent": (3, 0), "h2o": (3, 0)}
    assert "full leaves out 1 of 3 requests: up to 90" in done.stderr
    written(file, lines[1:2])
    alone = invoke("h2o-compare", *base, "--policies", "full,h2o")
    assert [r["policy"] for r in records(alone.stdout)[1:]] == ["h2o"], alone.stderr
    none = invoke("h2o-compare", *base, "--policies", "full", "-q")
    assert (none.exit_code, none.stderr.count("\n")) == (2, 1)
    assert "use --positions gap or rolling" in none.stderr


def test_chunks_make_a_difference(tiny_folder: Path, tmp_path: Path) -> None:
    prompts = ["one two three " * 12, "The quick brown fox. " * 9, "a b c d e " * 20]
    file = written(tmp_path / "requests.jsonl", [{"prompt": prompt, "max_tokens": 8} for prompt in prompts])

    def texts(name: str, *more: object) -> list[str]:
        base = ["summarize", "-m", tiny_folder, "--requests", file, "--policies", "h2o", "--windows", "24"]
        done = invoke("h2o-compare", *base, "--out", tmp_path / name, "--dtype", "float32", "-q", *more)
        assert done.exit_code == 0, done.stderr
        made = records((tmp_path / name / "predictions" / "h2o-24.jsonl").read_text())
        assert all(line["rouge"] is None for line in made), "there is no reference"
        return [line["text"] for line in made]

    whole = texts("whole")
    assert texts("eager", "--engine", "eager") == whole
    assert texts("chunked", "--prefill", "chunked", "--chunk", "4") != whole
