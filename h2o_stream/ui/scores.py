"""Scores of saved answers as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from h2o_stream.compare.summarize.rouge import ROUGE, RougeScorer, score_file
from h2o_stream.resources import write_text
from h2o_stream.session.jsonl import JsonlWriter
from h2o_stream.ui.pages import Page, TableData
from h2o_stream.ui.tables import data_table, latex_table, markdown_page
from h2o_stream.ui.terminal import Terminal


def show_scores(files: Sequence[Path], to: Path | None, terminal: Terminal, jsonl: JsonlWriter) -> None:
    """Score files of answers and show a row for each. To a file, too: as LaTeX if its name ends in .tex, else as
    Markdown.
    """
    scorer = RougeScorer()
    records = [score_file(file, scorer) for file in files]
    for record in records:
        jsonl.write(record)
    rows = [
        [Path(record["file"]).stem, str(record["n"]), *(f"{100 * record[name]:.2f}" for name in ROUGE)]
        for record in records
    ]
    table = TableData("", ("answers", "n", "ROUGE-1", "ROUGE-2", "ROUGE-L"), rows)
    if to is not None:
        page = Page("ROUGE F-measures in %", "", [table])
        write_text(to, latex_table(table) if to.suffix == ".tex" else markdown_page(page), "--to")
    if not terminal.quiet:
        terminal.console.print(data_table(table, terminal.console.width))
