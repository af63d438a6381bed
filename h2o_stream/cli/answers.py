"""``h2o-compare requests`` and ``h2o-compare score``: before and after the model, for summarization."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from h2o_stream.base.options import Option
from h2o_stream.base.resources import write_text
from h2o_stream.cli import run
from h2o_stream.cli.options import OUTPUT, OutputOptions, group_of
from h2o_stream.session.jsonl import JsonlWriter, jsonl_text
from h2o_stream.session.requests import FormName, build_requests, read_articles

_NAME = "h2o-compare"


@dataclass(frozen=True)
class RequestsOptions:
    """Build summarization requests from articles, in the form of HELM's XSUM or CNN/DailyMail.

    ARTICLES has one JSON object a line, with document and summary (XSUM) or article and highlights (CNN/DailyMail).
    """

    articles: Annotated[Path, typer.Argument(help="Articles in JSON Lines.", show_default=False)]
    to: Annotated[Path, Option("File for the requests.")]
    form: Annotated[FormName, Option("Form of the requests.")] = "xsum"
    shots: Annotated[int, Option("The first N articles are examples in every request.", min=0)] = 0
    limit: Annotated[int | None, Option("Requests; default is all.", min=1)] = None


@dataclass(frozen=True)
class ScoreOptions:
    """ROUGE of saved answers, without a model (extra "rouge").

    FILES are predictions of summarize, or answers in HELM's form with the request echoed.
    """

    files: Annotated[list[Path], typer.Argument(help="Files of answers.", show_default=False)]
    to: Annotated[Path | None, Option("File for the table: .md, .csv or .tex.")] = None


def add_to(app: typer.Typer) -> None:
    """Add both commands."""
    run.command(app, _NAME, group_of(RequestsOptions), OUTPUT, name="requests", help=inspect.getdoc(RequestsOptions))(
        _requests
    )
    run.command(app, _NAME, group_of(ScoreOptions), OUTPUT, name="score", help=inspect.getdoc(ScoreOptions))(_score)


def _requests(options: RequestsOptions, output: OutputOptions) -> None:
    from h2o_stream.ui.terminal import Terminal

    built = list(build_requests(read_articles(options.articles), options.form, options.shots))[: options.limit]
    write_text(options.to, jsonl_text(built), "--to")
    Terminal(output.color, output.quiet).note(f"{len(built)} requests are in {options.to}")


def _score(options: ScoreOptions, output: OutputOptions) -> None:
    from h2o_stream.ui.tables import show_scores
    from h2o_stream.ui.terminal import Terminal

    with JsonlWriter(output.jsonl) as records:
        show_scores(options.files, options.to, Terminal(output.color, output.quiet), records)
