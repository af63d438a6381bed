"""Every family under every policy, chunked and one-shot, alone and in a padded batch, against the oracle."""

import copy
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from h2o_stream import CacheConfig, attach
from tests.causal_models import ENTRIES
from tests.families import (
    CELLS,
    CONTEXT,
    DIFFERENT,
    FAMILIES,
    LARGEST,
    TIE,
    config_of,
    error,
    is_sampled,
    matrix,
    rules_of,
    summary,
)
from tests.fixtures import ids, thinned
from tests.oracle import Oracle, cache_of
from tests.sweep import OUTCOMES, outcome, rows_in

MEAN = {torch.float32: 5e-6, torch.bfloat16: 0.06}
"""RMS difference relative to the RMS of the logits."""


def of_families(name: str, rows: list[tuple[int, Any]], chosen: Callable[[int, Any], bool]) -> Any:
    """Rows of a family's number and a named value, of which `make test` takes the chosen ones of some."""
    rows = thinned(rows, lambda number, value: is_sampled(number) and chosen(number, value))
    return pytest.mark.parametrize(
        ("number", name), rows, ids=lambda x: FAMILIES[x].name if isinstance(x, int) else str(x)
    )


def modes(first: int = 0) -> Any:
    """Every family in each of its position modes from this index on; the first is the default."""
    return of_families(
        "positions",
        [(number, positions) for number, family in enumerate(FAMILIES) for positions in family.positions[first:]],
        lambda number, positions: (
            FAMILIES[number].name in DIFFERENT if first else positions == FAMILIES[number].positions[0]
        ),
    )


@pytest.mark.every(2)
@pytest.mark.parametrize(("number", "policy", "cells"), matrix())
def test_matrix(number: int, policy: str, cells: list[tuple[int, int]]) -> None:
    """All of them together show the table in the next test."""
    assert max(error(number, policy, *cell) for cell in cells) < LARGEST


def test_the_docs_say_what_the_matrix_says() -> None:
    """Written by ``make family-table``; `test_matrix` proves that nothing is missing.

    `make test` proves the hardest cell of every policy with one of two families, and of `h2o` with some;
    `make test-all` proves the rest.
    """
    assert summary(lambda number, policy: len(CELLS)) in Path("lab/docs/families.md").read_text(encoding="utf-8")


@pytest.mark.every(2)
@modes(first=1)
def test_every_position_mode(number: int, positions: str) -> None:
    """The matrix covers the default mode."""
    assert error(number, "h2o", 5, 3, positions) < LARGEST


@pytest.mark.every(3)
@of_families(
    "dtype",
    [(number, dtype) for number in range(len(FAMILIES)) for dtype in MEAN],
    lambda number, dtype: dtype == torch.float32 or FAMILIES[number].name in DIFFERENT,
)
def test_before_any_eviction_it_equals_transformers_cache(number: int, dtype: torch.dtype) -> None:
    """In bfloat16 its error against float32 is at most 1.5 times that of transformers' own cache."""
    family, tokens = FAMILIES[number], ids(40, 2, seed=5)
    if dtype == torch.bfloat16 and "experts" in family.special:
        pytest.skip("rounding sends some tokens to other experts")
    model = copy.deepcopy(family.make()).to(dtype)
    exact = copy.deepcopy(model).float()(tokens).logits
    chunks, theirs = tokens.split([35] + [1] * 5, 1), cache_of(model)
    starts = itertools.accumulate((part.shape[1] for part in chunks), initial=0)
    places = [torch.arange(start, start + part.shape[1])[None] for start, part in zip(starts, chunks, strict=False)]
    wanted = torch.cat(
        [
            model(part, past_key_values=theirs, position_ids=place, use_cache=True).logits
            for part, place in zip(chunks, places, strict=True)
        ],
        1,
    ).float()
    for positions in family.positions:
        with attach(model, CacheConfig(window=40, positions=positions, chunk=7)) as cache:
            ours = torch.cat([model(part, past_key_values=cache).logits for part in chunks], 1).float()
        assert float((ours - wanted).norm() / wanted.norm()) < MEAN[dtype]
        assert (ours - exact).norm() < 1.5 * (wanted - exact).norm() + MEAN[torch.float32] * exact.norm()


@pytest.mark.every(2)
@modes()
def test_far_past_the_span_and_the_context(number: int, positions: str) -> None:
    """With absolute positions to the end of the context, and past every sliding window."""
    family = FAMILIES[number]
    model, config = family.make(), config_of(family, "h2o", 16, positions)
    tokens = ids(CONTEXT if positions == "absolute" else CONTEXT + 60, seed=6)[0].tolist()
    oracle = Oracle(model, rules_of(config, family))
    wanted = oracle.feed(tokens, chunk=16)
    with attach(model, config) as cache:
        ours = model(torch.tensor([tokens]), past_key_values=cache).logits[0]
    assert oracle.margin > TIE
    assert float((ours - wanted).abs().max() / wanted.abs().max()) < LARGEST


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
