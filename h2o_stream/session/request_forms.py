"""Builds summarization requests from articles, with examples before the article if asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from h2o_stream.errors import ConfigError, DataError
from h2o_stream.session.jsonl import read_objects

FormName = Literal["xsum", "cnn_dailymail"]


@dataclass(frozen=True)
class _Form:
    """How HELM asks for the summaries of a data set: in how many sentences and tokens."""

    instruction: str
    max_tokens: int


_FORMS: dict[FormName, _Form] = {
    "xsum": _Form("Summarize the above article in 1 sentence.", 64),
    "cnn_dailymail": _Form("Summarize the above article in 3 sentences.", 128),
}

_STOP = "###"


@dataclass(frozen=True)
class Article:
    """A text and its summary."""

    text: str
    summary: str


def read_articles(path: Path) -> list[Article]:
    """The articles of a JSON Lines file, in the field names of XSUM (document, summary) or CNN/DailyMail.

    Raises:
        DataError: the file cannot be read, or a line has no article or no summary.
    """
    return [
        Article(
            _text(record, ("document", "article", "text"), place),
            _text(record, ("summary", "highlights", "summary_gt"), place),
        )
        for place, record in read_objects(path, "ARTICLES")
    ]


def _text(record: dict[str, Any], names: tuple[str, ...], place: str) -> str:
    value = next((record[name] for name in names if name in record), None)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{place}: one of {', '.join(names)} must be a non-empty string")
    return " ".join(value.split())


def build_requests(articles: list[Article], form: FormName, shots: int) -> Iterator[dict[str, Any]]:
    """Requests for the articles after the first `shots`, which are the examples of each.

    Raises:
        ConfigError: there are too few articles.
    """
    if shots >= len(articles):
        raise ConfigError(f"shots is {shots}, the file has {len(articles)} articles; lower --shots")
    chosen = _FORMS[form]
    examples = "".join(f"{_asked(example, chosen)}{example.summary}\n\n" for example in articles[:shots])
    for article in articles[shots:]:
        yield {
            "article": examples + _asked(article, chosen),
            "summary_gt": article.summary,
            "max_tokens": chosen.max_tokens,
            "temperature": 0.3,
            "top_p": 1,
            "n": 1,
            "stop": [_STOP],
        }


def _asked(article: Article, form: _Form) -> str:
    return f"{_STOP}\nArticle: {article.text}\n\n{form.instruction}\n"
