"""The index of the memory: what it finds, and that it follows the segments through undo, states and limits."""

from typing import Any

import numpy
import pytest
import torch

from h2o_stream import attach, config
from h2o_stream.errors import H2OStreamError
from h2o_stream.native import library
from tests.fixtures import make_llama
from tests.test_oracle import tokens_of
from tests.test_token_memory import disk_for, fed, remembering

pytestmark = pytest.mark.skipif(library.loaded() is None, reason="there is no compiled library")

NO_INDEX = 128
"""Segments of a chapter that does not fit."""


def set_up(monkeypatch: pytest.MonkeyPatch, **constants: int) -> None:
    """Set constants of the memory."""
    for name, value in constants.items():
        monkeypatch.setattr(config, f"MEMORY_{name}", value)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(monkeypatch, DISTANCE=40, MATCHES=5, CANDIDATES=40, QUESTION_CANDIDATES=40, PROMPT_PERIOD=1)
    set_up(monkeypatch, CHAPTER=1, BLOCKS=2, MIN_INDEX=1)


def found_by(cache: Any) -> list[set[int]]:
    """What each query of the last token has found."""
    (row,) = cache.memory.rows
    return [set(places.tolist()) for places in row.found.reshape(-1, config.MEMORY_MATCHES)]


def test_chapters_sort_the_codes_of_their_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens are there once, with their codes; blocks have fewer different codes than in the order of the text."""
    set_up(monkeypatch, CHAPTER=2)
    model, (made, _) = make_llama(size=64, groups=3), remembering()
    with torch.no_grad(), attach(model, made) as cache:
        fed(model, cache, tokens_of(2, 1100))
        fed(model, cache, [1])
        (row,) = cache.memory.rows
        (chapter,) = row.index.chapters
        for head in row._layout.heads:
            size = 4
            parts = [segment[head.scan : head.scan + 512 * size].reshape(8, size, 64) for segment in row.segments[:2]]
            codes = numpy.concatenate(parts).transpose(0, 2, 1)
            blocks = chapter[head.data : head.data + 16 * 64 * (size + 2)].reshape(16, -1)
            places = numpy.ascontiguousarray(blocks[:, 64 * size :]).view(numpy.uint16).ravel()
            sorted_codes = blocks[:, : 64 * size].reshape(16, size, 64).transpose(0, 2, 1)
            assert numpy.array_equal(numpy.sort(places), numpy.arange(1024))
            assert numpy.array_equal(sorted_codes.reshape(1024, size), codes.reshape(1024, size)[places])
            different = [sum(len(numpy.unique(block[:, 0])) for block in order) for order in (sorted_codes, codes)]
            assert different[0] < 0.7 * different[1]


def test_all_blocks_are_a_full_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for all of them, and most tokens compared exactly, a step finds what a search of all tokens does."""
    set_up(monkeypatch, CHAPTER=8, BLOCKS=64, CANDIDATES=3000)
    model, tokens, (made, _) = make_llama(size=32, groups=1), tokens_of(5, 4300), remembering()
    with torch.no_grad():
        with attach(model, made) as cache:
            for start in range(0, 4300, 860):
                fed(model, cache, tokens[start : start + 860])
            state = cache.state_dict()
            logits, found = fed(model, cache, [7]), found_by(cache)
            (row,) = cache.memory.rows
            assert len(row.index.chapters) == 1
        set_up(monkeypatch, CHAPTER=NO_INDEX, CANDIDATES=9000)
        with attach(model, made) as cache:
            cache.load_state_dict(state)
            torch.testing.assert_close(fed(model, cache, [7]), logits, rtol=1e-4, atol=1e-4)
            assert found_by(cache) == found


def test_a_third_of_the_blocks_has_what_codes_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what an exact search finds, nearly as much as without an index. A state without one gets it again."""
    set_up(monkeypatch, CHAPTER=8, BLOCKS=8)
    model, tokens, (made, _) = make_llama(size=64, groups=3), tokens_of(7, 4208), remembering()
    found = dict[str, list[set[int]]]()

    def search(name: str, cache: Any, state: Any) -> None:
        found[name] = []
        for token in tokens[4200:]:
            cache.load_state_dict(state)
            fed(model, cache, [token])
            found[name] += found_by(cache)

    with torch.no_grad():
        with attach(model, made) as cache:
            for start in range(0, 4200, 840):
                fed(model, cache, tokens[start : start + 840])
            state = cache.state_dict()
            search("index", cache, state)
        set_up(monkeypatch, CHAPTER=NO_INDEX)
        with attach(model, made) as cache:
            search("scan", cache, state)
            cache.load_state_dict(state)
            without = cache.state_dict()
            set_up(monkeypatch, CANDIDATES=9000)
            search("exact", cache, state)
        set_up(monkeypatch, CHAPTER=8, CANDIDATES=40)
        with attach(model, made) as cache:
            search("made again", cache, without)
    shares = {
        name: numpy.mean([len(a & b) / len(b) for a, b in zip(found[name], found["exact"], strict=True)])
        for name in ("index", "scan")
    }
    assert found["made again"] == found["index"] != found["scan"]
    assert shares["index"] > 0.8 * shares["scan"] > 0.15


@pytest.mark.exhaustive
def test_threads_share_a_search() -> None:
    """What is found with an index does not depend on their number."""
    model, tokens, (made, _) = make_llama(size=64, groups=3), tokens_of(9, 1810), remembering()
    threads, logits = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            with torch.no_grad(), attach(model, made) as cache:
                for start in (0, 600, 1200):
                    prompt = fed(model, cache, tokens[start : start + 600])
                logits.append(torch.stack([prompt, fed(model, cache, tokens[1800:], alone=True)]))
                assert len(cache.memory.rows[0].index.chapters) > 1
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*logits)


def test_it_goes_with_the_oldest_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chapters of which a part was forgotten find the rest; undo and copies share them, with the same results."""
    set_up(monkeypatch, CHAPTER=2)
    model, tokens, (made, _) = make_llama(groups=3), tokens_of(3, 7200), remembering(memory=1)
    with torch.no_grad(), attach(model, made) as cache:
        segment = cache.memory._file.segment_bytes if cache.memory._file else 0
    assert segment
    made, _ = remembering(memory=9 * segment)  # six for tokens
    starts = set[int]()
    with torch.no_grad(), attach(model, made) as cache:
        for start in range(0, 7000, 500):
            fed(model, cache, tokens[start : start + 500])
            (row,) = cache.memory.rows
            starts.add(int(row.index.bounds[0]))
            assert len(row.segments) <= 6
            assert 0 <= row.found.max() < row.counts.max()
            state = cache.state_dict()
            wanted = fed(model, cache, tokens[7000:7003])
            cache.load_state_dict(state)
            assert torch.equal(fed(model, cache, tokens[7000:7003]), wanted)
            cache.load_state_dict(state)
            before = cache.memory.rows[0].index.addresses.copy()
            cache.reorder_cache(torch.tensor([0]))
            assert numpy.array_equal(cache.memory.rows[0].index.addresses, before)
            assert torch.equal(fed(model, cache, tokens[7000:7003]), wanted)
            cache.load_state_dict(state)
    assert starts == {0, -512}
    state = {name: array.clone() for name, array in state.items()}
    state["memory.0.chapter.0"][0] += 1
    with attach(model, made) as cache, pytest.raises(H2OStreamError, match="damaged"):
        cache.load_state_dict(state)


def test_without_room_on_disk_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens, (made, _) = make_llama(), tokens_of(4, 2000), remembering()
    disk_for(3, monkeypatch)
    with torch.no_grad(), attach(model, made) as cache:
        for start in range(0, 2000, 400):
            fed(model, cache, tokens[start : start + 400])
        (row,) = cache.memory.rows
        assert len(row.segments) == 3
        assert not row.index.chapters
