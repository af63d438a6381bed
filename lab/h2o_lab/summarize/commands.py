"""``h2o-compare requests`` and ``h2o-compare score``: before and after the model, for summarization."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from h2o_lab.summarize.requests import FormName, build_requests, read_articles
from h2o_lab.summarize.rouge import ROUGE, RougeScorer, require_rouge, score_file
from h2o_stream.base.options import Option
from h2o_stream.base.resources import write_text
from h2o_stream.session.jsonl import JsonlWriter, jsonl_text

if TYPE_CHECKING:
    from h2o_stream.ui.pages import Page
    from h2o_stream.ui.terminal import Terminal


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

    def run(self, terminal: Terminal, records: JsonlWriter) -> None:
        """Write the requests."""
        built = list(build_requests(read_articles(self.articles), self.form, self.shots))[: self.limit]
        write_text(self.to, jsonl_text(built), "--to")
        terminal.note(f"{len(built)} requests are in {self.to}")


@dataclass(frozen=True)
class ScoreOptions:
    """ROUGE of saved answers, without a model (extra "rouge").

    FILES are predictions of summarize, or answers in HELM's form with the request echoed.
    """

    files: Annotated[list[Path], typer.Argument(help="Files of answers.", show_default=False)]
    to: Annotated[Path | None, Option("File for the table: .md, .csv or .tex.")] = None

    def run(self, terminal: Terminal, records: JsonlWriter) -> None:
        """Score the files and show a row for each. To a file, too, in the format of its name."""
        from h2o_lab.report.tables import csv_tables, format_of, latex_page
        from h2o_stream.ui.pages import Page, TableData
        from h2o_stream.ui.tables import data_table, markdown_page

        require_rouge()
        suffix = format_of(self.to, ".md", ".csv", ".tex") if self.to else ""
        scorer = RougeScorer()
        scored = [score_file(file, scorer) for file in self.files]
        for record in scored:
            records.write(record)
        rows = [
            [Path(record["file"]).stem, str(record["n"]), *(f"{100 * record[name]:.2f}" for name in ROUGE)]
            for record in scored
        ]
        table = TableData("", ("answers", "n", "ROUGE-1", "ROUGE-2", "ROUGE-L"), rows)
        if self.to is not None:
            page = Page("ROUGE F-measures in %", "", [table])
            texts: dict[str, Callable[[Page], str]] = {
                ".md": markdown_page,
                ".csv": lambda page: csv_tables({"score": page}),
                ".tex": latex_page,
            }
            write_text(self.to, texts[suffix](page), "--to")
        if not terminal.quiet:
            terminal.console.print(data_table(table, terminal.console.width))
