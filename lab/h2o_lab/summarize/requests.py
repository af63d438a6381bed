"""Requests in JSON Lines, one per line: a text to continue, sampling settings and a reference answer.

Two formats are read: the H2O cookbook's summarization requests (``article``, ``summary_gt``) and HELM's (``prompt``,
possibly nested under ``request``). Both have ``max_tokens``, ``temperature``, ``top_p`` and ``stop``. Those in
the first one are also built here from articles, with examples before the article if asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from h2o_stream.config import SamplingConfig
from h2o_stream.errors import ConfigError, DataError
from h2o_stream.session.jsonl import read_objects


@dataclass(frozen=True)
class Request:
    """One text to continue, which is fed unchanged, with its sampling, maximum length and stop strings."""

    prompt: str
    reference: str | None
    sampling: SamplingConfig
    record: Mapping[str, Any] = field(default_factory=dict, compare=False)


def read_requests(path: Path, limit: int | None = None) -> tuple[Request, ...]:
    """The first `limit` requests of a file, or all. Empty lines are skipped.

    Raises:
        DataError: the file cannot be read, or a line is not a request.
    """
    records = read_objects(path, "--requests")
    if not records:
        raise DataError(f"{path}: the file has no requests")
    return tuple(_parse(record, place) for place, record in records[:limit])


def _parse(record: dict[str, Any], place: str) -> Request:
    given = record.get("request", record)
    if isinstance(record.get("request"), dict):
        record = {**record, **record["request"]}
    prompt, reference = record.get("article", record.get("prompt")), record.get("summary_gt")
    if not isinstance(prompt, str) or not prompt:
        raise DataError(f"{place}: article or prompt must be a non-empty string")
    if not isinstance(reference, str | None):
        raise DataError(f"{place}: summary_gt must be a string")
    return Request(prompt, reference, _sampling(record, place), given)


def _sampling(record: dict[str, Any], place: str) -> SamplingConfig:
    stop = record.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(s, str) for s in stop):
        raise DataError(f"{place}: stop must be a string or a list of strings")
    values = {"max_tokens": 64, "temperature": 0.0, "top_p": 1.0}
    for name, default in values.items():
        value = record.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < math.inf:
            raise DataError(f"{place}: {name} must be a number")
        values[name] = value
    try:
        return SamplingConfig(
            temperature=values["temperature"],
            top_p=values["top_p"],
            top_k=0,
            min_p=0.0,
            repetition_penalty=1.0,
            dry_multiplier=0.0,
            max_tokens=int(values["max_tokens"]),
            stop=tuple(stop),
        )
    except ConfigError as error:
        raise DataError(f"{place}: {error}") from error


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
    """Requests for the articles after the first `shots`, the examples; raises ConfigError if there are too few."""
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
