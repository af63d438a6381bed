"""Every entry of transformers' causal-LM map is right or refused for a true reason, never wrong and never a crash."""

import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.causal_models import ENTRIES
from tests.fixtures import thinned
from tests.sweep import OUTCOMES, outcome, rows_in

DOCS = Path("lab/docs/families.md").read_text(encoding="utf-8")

same_version = pytest.mark.skipif(
    f"transformers {transformers.__version__}" not in DOCS, reason="the table is of another version of transformers"
)


SOME = ((None, "absolute"), ("auto",))
ALL = ((None, "rolling", "absolute"), ("auto", "eager"))


@pytest.mark.every(2)
@pytest.mark.parametrize(("entry", "tried"), thinned(
    [(entry, tried) for entry in ENTRIES for tried in (SOME, ALL)],
    lambda entry, tried: tried is SOME and ENTRIES.index(entry) % 8 == 0,
))  # fmt: skip
def test_right_or_refused(entry: str, tried: Any) -> None:
    """`make test` tries some in the default and absolute positions with the default engine."""
    found = outcome(entry, *tried)
    if f"transformers {transformers.__version__}" in DOCS:
        assert entry in rows_in(DOCS)[found], "make family-table"


def test_nearly_all_are_tried() -> None:
    assert len(ENTRIES) >= 170


@same_version
def test_the_counts_in_the_docs() -> None:
    rows = rows_in(DOCS)
    assert list(rows) == list(OUTCOMES)
    assert sorted(entry for entries in rows.values() for entry in entries) == ENTRIES
    for name, entries in rows.items():
        assert re.search(rf"^\| {re.escape(name)} \| {len(entries)} \|", DOCS, re.MULTILINE)
