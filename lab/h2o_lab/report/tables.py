"""Tables of pages for papers and programs: LaTeX and CSV; and which format the name of a file asks for."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from io import StringIO
from pathlib import Path

from h2o_stream.errors import ConfigError
from h2o_stream.ui.pages import Page, TableData

CSV_BEGINS = ("comparison", "table")
"""The first columns of tables in CSV."""


def latex_table(table: TableData) -> str:
    """A table for a paper, with booktabs."""
    lines = [" & ".join(map(_latex, line)) + r" \\" for line in (table.header, *table.rows)]
    columns = "l" + "r" * (len(table.header) - 1)
    body = [lines[0], r"\midrule", *lines[1:]]
    return "\n".join([rf"\begin{{tabular}}{{{columns}}}", r"\toprule", *body, r"\bottomrule", r"\end{tabular}", ""])


def latex_page(page: Page) -> str:
    """A page's tables for a paper, each after a comment that names it."""
    titles = [" ".join(f"% {page.title} {table.title}".split()) for table in page.tables]
    return "\n".join(f"{title}\n{latex_table(table)}" for title, table in zip(titles, page.tables, strict=True))


def csv_tables(pages: Mapping[str, Page]) -> str:
    """The tables of pages as one: the page and the title of its table in front of each row, all columns after."""
    tables = [(name, table) for name, page in pages.items() for table in page.tables]
    columns = dict.fromkeys(column for _, table in tables for column in table.header)
    text = StringIO()
    writer = csv.DictWriter(text, [*CSV_BEGINS, *columns], restval="", lineterminator="\n")
    writer.writeheader()
    for name, table in tables:
        for row in table.rows:
            writer.writerow(dict(zip((*CSV_BEGINS, *table.header), (name, table.title, *row), strict=True)))
    return text.getvalue()


def _latex(text: str) -> str:
    return re.sub(r"([&%$#_{}])", r"\\\1", text)


def format_of(path: Path, *formats: str) -> str:
    """The format of a file by the end of its name; raises ConfigError if it is none of `formats`."""
    suffix = path.suffix.lower()
    if suffix not in formats:
        raise ConfigError(
            f"--to {path} names no format that there is; it takes a name that ends in {', '.join(formats)}"
        )
    return suffix
