"""The page of ``h2o-compare locomo``."""

from __future__ import annotations

from collections.abc import Sequence

from h2o_lab.phrases import counted
from h2o_lab.recall.page import names_of, runs_of
from h2o_stream.ui.pages import Page, Record, TableData

_COLUMNS = {
    "listed": "right turn among five",
    "read": "right turn read",
    "reading": "something read",
    "f1": "F1 of replies",
}


def page(run: Record, records: Sequence[Record]) -> Page:
    """A table for each policy, window and mode of recall, by category."""
    header = ["questions", "number", *_COLUMNS.values()]
    tables = [
        TableData(" ".join(names_of(group[0])), header, [_row(record) for record in group])
        for group in runs_of(records)
    ]
    return Page(f"{run['model']}, LoCoMo: {counted(len(run['dialogues']), 'dialogue')}", "", tables)


def _row(record: Record) -> list[str]:
    shares = (record[name] for name in _COLUMNS)
    return [record["category"], str(record["questions"]), *("-" if one is None else f"{one:.0%}" for one in shares)]
