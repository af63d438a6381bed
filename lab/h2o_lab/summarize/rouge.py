"""ROUGE, of new answers and of saved ones. Needs the extra ``rouge``, but no model."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from h2o_stream.base.resources import require_package
from h2o_stream.errors import DataError
from h2o_stream.session.jsonl import read_objects

ROUGE = ("rouge1", "rouge2", "rougeL")


def require_rouge() -> None:
    """Raise H2OStreamError if answers cannot be scored: rouge-score is not installed."""
    require_package("rouge_score", "rouge-score", "ROUGE needs rouge-score")


class RougeScorer:
    """F-measures with stemming, as for the tables of the H2O cookbook and of HELM."""

    def __init__(self) -> None:
        from rouge_score.rouge_scorer import RougeScorer as Scorer

        self._scorer = Scorer(list(ROUGE), use_stemmer=True)

    def score(self, text: str, reference: str | None) -> list[float] | None:
        """F-measures of `ROUGE`, 0 to 1; None without a reference."""
        if reference is None:
            return None
        scores = self._scorer.score(reference, text)
        return [float(scores[name].fmeasure) for name in ROUGE]


def score_file(path: Path, scorer: RougeScorer) -> dict[str, Any]:
    """The record of a file of saved answers: our predictions, or HELM's form with the request echoed.

    Raises:
        DataError: the file cannot be read, or an answer or its reference is missing.
    """
    scores = [scorer.score(*_answer(record, place)) for place, record in read_objects(path, "FILES")]
    if not scores:
        raise DataError(f"{path}: the file has no answers")
    means = [fmean(column) for column in zip(*(row for row in scores if row is not None), strict=True)]
    return {"type": "score", "file": str(path), "n": len(scores), **dict(zip(ROUGE, means, strict=True))}


def _answer(record: dict[str, Any], place: str) -> tuple[str, str]:
    try:
        if "result" in record:
            text, reference = record["result"]["choices"][0]["text"], record["request"]["summary_gt"]
        else:
            text, reference = record["text"], record["reference"]
    except (LookupError, TypeError) as error:
        raise DataError(
            f"{place}: no answer with its reference (text and reference, or result.choices and request.summary_gt)"
        ) from error
    if not isinstance(text, str) or not isinstance(reference, str):
        raise DataError(f"{place}: answer and reference must be strings")
    return text, reference
