"""Summarization from articles to a table: requests, answers in HELM's form, scores without a model."""

from pathlib import Path
from typing import Any

import pytest

from h2o_lab.summarize.requests import Article, build_requests, read_articles, read_requests
from tests.commands import invoke, records
from tests.fixtures import written


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
