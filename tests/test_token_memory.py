"""The memory of evicted tokens: what attention finds in it, against the oracle; undo, states, limits."""

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from h2o_stream import CacheConfig, attach, config
from h2o_stream.cache.arrays import to_arrays, to_tensors
from h2o_stream.cache.segment_file import SegmentFile
from h2o_stream.cache.token_memory import retrieving, sealed_segments
from h2o_stream.cache.windows import HeadWindow, Schedule
from h2o_stream.config import EngineChoice
from h2o_stream.errors import ConfigError, DataError, H2OStreamError
from h2o_stream.native import library
from h2o_stream.session.state_files import StateFiles
from tests.fixtures import make_llama, with_exhaustive
from tests.in_turn import in_turn
from tests.oracle import Rules
from tests.test_oracle import compare, tokens_of
from tests.tolerance import assert_close, relative_error

pytestmark = pytest.mark.skipif(library.loaded() is None, reason="there is no compiled library")

MATCHES, DISTANCE = 5, 40

BOTH: tuple[EngineChoice, ...] = ("auto", "eager")

CANDIDATES = "MEMORY_CANDIDATES", "MEMORY_QUESTION_CANDIDATES"

ONE_CODE = 5e-3
"""Difference of logits relative to their RMS that one element makes whose code in 8 bits is the next one, because it is
halfway between two: four times the largest observed. Elements that are not rounded at all make 20 times as much."""


@pytest.fixture(autouse=True)
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Distances and matches of a size that tests can reach; all old tokens are compared exactly."""
    monkeypatch.setattr(config, "MEMORY_DISTANCE", DISTANCE)
    monkeypatch.setattr(config, "MEMORY_MATCHES", MATCHES)
    for name in CANDIDATES:
        monkeypatch.setattr(config, name, 2048)
    monkeypatch.setattr(config, "MEMORY_PROMPT_PERIOD", 1)


def remembering(**changes: Any) -> tuple[CacheConfig, Rules]:
    """A config with a memory, and the rules that it means."""
    made = replace(
        CacheConfig("h2o", 14, 5, 2, 0.9, "gap", 13, 8, memory="auto", budgets="equal", long_term=2.0), **changes
    )
    plan = made.plan()
    rules = Rules(plan.window, plan.heavy, plan.sinks, plan.decay, plan.positions, plan.span, long_term=plan.long_term)
    return made, replace(rules, matches=MATCHES, max_distance=DISTANCE)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("groups", "positions"), with_exhaustive([(3, "gap"), (1, "rolling")], [(1, "gap"), (3, "rolling")])
)
def test_attention_is_the_oracles(groups: int, positions: Any) -> None:
    made, rules = remembering(positions=positions)
    rules.span = made.plan().span
    assert compare(make_llama(groups=groups), made, rules, tokens_of(groups, 70), 40, ONE_CODE, BOTH)


def test_without_heavy_hitters() -> None:
    made, rules = remembering(policy="sink", heavy=None, sinks=4, positions="rolling")
    assert compare(make_llama(groups=3), made, rules, tokens_of(4, 60), 33, ONE_CODE, BOTH)


def test_a_long_stream_with_pins_and_transient_tokens() -> None:
    """More tokens than are compared with all keys rotated; transient ones are not remembered."""
    pins, transient = (range(3, 5),), ((0, range(20, 40)), (345, range(330, 334)))
    made, rules = remembering()
    movable = 14 - 2 - 2
    recent = movable - movable * 5 // 12
    rules = replace(rules, pins=pins, transient=transient, recents=lambda layer, head: recent)
    assert compare(make_llama(groups=3), made, rules, tokens_of(8, 360), 345, ONE_CODE)


def test_nothing_is_remembered_by_default() -> None:
    assert CacheConfig().plan().memory == 0


def test_it_is_filled_while_nothing_searches_it() -> None:
    made, _ = remembering()
    model, tokens, logits = make_llama(groups=3), tokens_of(8, 90), dict[str, list[torch.Tensor]]()
    with torch.no_grad():
        for memory in ("off", "auto"):
            with attach(model, replace(made, memory=memory)) as cache:
                cache.search_memory(False)
                logits[memory] = [fed(model, cache, part) for part in (tokens[:60], tokens[60:61], tokens[61:80])]
                cache.search_memory(True)
                logits[memory] += [fed(model, cache, part) for part in (tokens[80:81], tokens[81:])]
    assert [torch.equal(*pair) for pair in zip(*logits.values(), strict=True)] == [True, True, True, False, False]


@pytest.mark.parametrize(("changes", "reason"), [
    ({"policy": "full"}, "full evicts nothing"), ({"positions": "absolute"}, "not rotated yet"),
    ({"device": "cpu"}, "--cache-device cpu"), ({"memory": 0}, "--memory takes"), ({"chunk": 0}, "--chunk"),
])  # fmt: skip
def test_refusals(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        CacheConfig(**{"memory": "auto", **changes})


def fed(model: Any, cache: Any, tokens: list[int], alone: bool = False) -> torch.Tensor:
    """Logits of the last of some tokens, fed one by one or together."""
    parts = [[token] for token in tokens] if alone else [tokens]
    for part in parts:
        logits = model(torch.tensor([part]), past_key_values=cache).logits[0, -1]
    return logits


@pytest.mark.parametrize("engine", with_exhaustive(["auto"], ["eager"]))
def test_a_state_continues_in_another_process_as_here(engine: EngineChoice) -> None:
    """Before and after segments are full; what comes after a state does not change it."""
    made, _ = remembering()
    model, tokens = make_llama(groups=3), tokens_of(2, 1300)
    with torch.no_grad():
        with attach(model, made, engine=engine) as cache:
            fed(model, cache, tokens[:700])
            middle = cache.state_dict()
            wanted = fed(model, cache, tokens[700:1250])
            late, later = cache.state_dict(), fed(model, cache, tokens[1250:1260], alone=True)
            cache.load_state_dict(middle)
            other = fed(model, cache, tokens[1:500])
            cache.load_state_dict(middle)
            assert torch.equal(fed(model, cache, tokens[700:1250]), wanted)
        with attach(model, made, engine=engine) as cache:
            cache.load_state_dict(late)
            assert torch.equal(fed(model, cache, tokens[1250:1260], alone=True), later)
            cache.load_state_dict(middle)
            assert torch.equal(fed(model, cache, tokens[1:500]), other)
            cache.reset()
            assert cache.memory is not None
            assert cache.memory.tokens == 0


def test_a_damaged_state_is_refused() -> None:
    made, _ = remembering()
    model = make_llama()
    with torch.no_grad(), attach(model, made) as cache:
        fed(model, cache, tokens_of(2, 700))
        state = cache.state_dict()
        for name in ("memory.0.0", "memory.0.1", "memory.0.counts"):
            damaged = state | {name: state[name].clone()}
            damaged[name][0] += 1
            with pytest.raises(H2OStreamError, match="damaged"):
                cache.load_state_dict(damaged)
        with (
            pytest.raises(H2OStreamError, match="another policy"),
            attach(make_llama(), replace(made, memory="off")) as off,
        ):
            off.load_state_dict(state)


@in_turn("engine, index", [("auto", -(2**31)), ("eager", 2**31 - 1)])
def test_tokens_that_cannot_be(engine: EngineChoice, index: int) -> None:
    """A crafted state may say of a token that it comes later than all; its distance stays within the table of RoPE."""
    made, _ = remembering()
    model = make_llama()
    with torch.no_grad(), attach(model, made, engine=engine) as cache:
        fed(model, cache, tokens_of(2, 300))
        assert cache.memory is not None
        row = cache.memory.rows[0]
        for head in range(len(row.counts)):
            assert len(row.records(head))
            row._records_in(row.segments[0], head)[:, :4].view(numpy.int32)[:] = index
        assert fed(model, cache, tokens_of(3, 40)).isfinite().all()
        assert fed(model, cache, tokens_of(4, 3), alone=True).isfinite().all()


@pytest.mark.parametrize("engine", with_exhaustive(["auto"], ["eager"]))
def test_rows_of_a_batch_are_as_alone(engine: EngineChoice) -> None:
    made, _ = remembering()
    model, rows = make_llama(groups=3), [tokens_of(seed, 120) for seed in (5, 6)]
    with torch.no_grad(), attach(model, made, engine=engine) as cache:
        alone = []
        for row in rows:
            cache.reset()
            fed(model, cache, row[:80])
            alone.append(fed(model, cache, row[80:], alone=True))
        cache.reset()
        batch = torch.tensor(rows)
        model(batch[:, :80], past_key_values=cache)
        for part in batch[:, 80:100].split(1, 1):
            model(part, past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        for part in batch.flip(0)[:, 100:].split(1, 1):
            logits = model(part, past_key_values=cache).logits[:, -1]
    assert relative_error(logits, torch.stack(alone[::-1])) < 1e-4


def test_the_oldest_go_when_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = remembering(memory=1)  # as little as there can be: three segments
    model = make_llama()
    with torch.no_grad(), attach(model, made) as cache:
        for start in range(0, 2400, 300):
            fed(model, cache, tokens_of(3, 2400)[start : start + 300])
            (row,) = cache.memory.rows
            assert len(row.segments) <= 3
        assert row.dropped > 0
        assert row.dropped + row.counts.max() <= 2400
        state, tokens = cache.state_dict(), tokens_of(4, 40)
        wanted = fed(model, cache, tokens)
        cache.load_state_dict(state)
        assert torch.equal(fed(model, cache, tokens), wanted)


def disk_for(segments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a disk have room for so many segments."""
    extend = SegmentFile._extend

    def limited(self: SegmentFile) -> int:
        if self._used >= segments:
            raise OSError(28, "No space left on device")
        return extend(self)

    monkeypatch.setattr(SegmentFile, "_extend", limited)


@pytest.mark.every(2)
@pytest.mark.parametrize("full_disk", [False, True])
def test_forwards_longer_than_what_is_dropped(full_disk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest segment has less in it than tokens are counted when it goes: heads never have more than there is."""
    if full_disk:
        disk_for(3, monkeypatch)
    made, _ = remembering(memory="auto" if full_disk else 1, window=256, heavy=None, chunk=128)
    model, tokens, end, dropped = make_llama(), tokens_of(5, 5200), 0, set[int]()
    with torch.no_grad(), attach(model, made) as cache:
        for count in (100, 1024, 400, 1, 1024, 1024, 511, 1, 1024):
            fed(model, cache, tokens[end : end + count])
            end += count
            (row,) = cache.memory.rows
            dropped.add(row.dropped)
            assert row.counts.max() <= 512 * len(row.segments)
            assert row.dropped <= end
    assert len(dropped) > 3


def test_a_forward_longer_than_the_memory_is_refused() -> None:
    """Before anything is changed, and with how many there may be."""
    made, _ = remembering(memory=1)
    model, tokens = make_llama(), tokens_of(6, 1700)
    with torch.no_grad(), attach(model, made) as cache:
        for first in (0, 600):
            if first:
                fed(model, cache, tokens[:first])
            with pytest.raises(H2OStreamError, match="1600 tokens at once do not fit.* feed at most 1024, or raise"):
                fed(model, cache, tokens[:1600])
        refused = fed(model, cache, tokens[600:650])
        cache.reset()
        fed(model, cache, tokens[:600])
        assert torch.equal(fed(model, cache, tokens[600:650]), refused)


@pytest.mark.parametrize(("common", "window"), [(256, 256), (256, 400), (2048, 500)])
def test_there_is_room_whatever_the_forwards(common: int, window: int) -> None:
    """Counted as native code does, with windows that shrink, stay and grow."""
    made, _ = remembering(memory=1, window=256, heavy=None)
    draw = random.Random(window)
    schedule = Schedule(common, tuple(range(common + 1, window)), window)
    with attach(make_llama(), made) as cache:
        memory = cache.memory
        assert memory is not None
        for group in cache.evicting_groups:
            group.set_schedule(schedule)
        for longest in (2, 300, 1024) * 4:
            memory.begin(1)
            seen = 0
            for _ in range(40 if longest > 2 else 3000):
                before, seen = seen, seen + draw.randint(1, longest)
                memory.make_room([seen], [before])
                (row,) = memory.rows
                row.counts += seen - schedule.held(seen) - (before - schedule.held(before))
                assert row.counts.max() <= 512 * len(row.segments)


def test_rows_of_other_lengths_keep_what_they_have() -> None:
    """What a long row needs is not dropped from a short one."""
    made, _ = remembering(memory=1)
    with attach(make_llama(), made) as cache:
        cache.make_memory_room([1000, 100])
        cache.tokens.lengths = (1000, 100)
        cache.make_room_for_prompt([], "float32", (1000, 100, 2000, 1100), 2)
        assert [row.dropped for row in cache.memory.rows] == [512, 0]


def test_copies_of_rows_are_in_ram_if_the_disk_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = remembering()
    model, tokens = make_llama(groups=3), tokens_of(5, 120)
    batch = torch.tensor([tokens[:100], tokens[20:]])
    with torch.no_grad(), attach(model, made) as cache:
        model(batch, past_key_values=cache)
        state = cache.state_dict()
        wanted = model(batch[:, :3], past_key_values=cache).logits
        cache.load_state_dict(state)
        disk_for(0, monkeypatch)
        cache.reorder_cache(torch.tensor([0, 1, 0]))
        copied = model(batch[[0, 1, 0], :3], past_key_values=cache).logits
        assert_close(copied, wanted[[0, 1, 0]])  # products of other sizes are rounded otherwise


def test_a_chat_goes_on_though_the_disk_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states before turns hold what the stream forgets: of its newest tokens the segments are in RAM then."""
    made, _ = remembering(window=256, heavy=None, chunk=128)
    model, tokens, held = make_llama(), tokens_of(5, 8000), []
    disk_for(6, monkeypatch)
    with torch.no_grad(), attach(model, made) as cache:
        for end in range(0, 8000, 1000):
            fed(model, cache, tokens[end : end + 1000])
            held.append(cache.memory.state())
        (row,) = cache.memory.rows
        assert (len(row.segments), row.dropped) == (3, 13 * 512)
        state = cache.state_dict()
        wanted = fed(model, cache, tokens[:50])
        cache.load_state_dict(state)
        assert torch.equal(fed(model, cache, tokens[:50]), wanted)


def test_a_state_that_has_no_room_on_disk_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = remembering(window=256, heavy=None, chunk=128)
    model = make_llama()
    with torch.no_grad(), attach(model, made) as cache:
        for _ in range(4):
            fed(model, cache, tokens_of(2, 1000))
        state = {name: array.clone() for name, array in cache.state_dict().items()}
    disk_for(0, monkeypatch)
    with attach(model, made) as cache, pytest.raises(H2OStreamError, match="No space left on device; take --memory"):
        cache.load_state_dict(state)


def test_a_question_is_compared_with_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last chunk of a prompt has candidates of its own; steps after it have theirs."""
    model, tokens = make_llama(size=64, groups=3), tokens_of(7, 1620)
    made, _ = remembering()
    logits = {}
    with torch.no_grad(), attach(model, made) as cache:
        fed(model, cache, tokens[:1600])
        state = cache.state_dict()
        for candidates in [(2048, 2048), (1, 2048), (1, 1)]:
            for name, count in zip(CANDIDATES, candidates, strict=True):
                monkeypatch.setattr(config, name, count)
            cache.load_state_dict(state)
            logits[candidates] = fed(model, cache, tokens[1600:1608]), fed(model, cache, tokens[1608:], alone=True)
    assert torch.equal(logits[1, 2048][0], logits[2048, 2048][0])
    assert not torch.equal(logits[1, 2048][0], logits[1, 1][0])
    assert not torch.equal(logits[1, 2048][1], logits[2048, 2048][1])


def test_codes_are_learned_from_steps_and_copied_keys() -> None:
    """Keys that are all alike, which fewer directions describe than codes have, and no prompt."""
    made, rules = remembering(window=14)
    model, tokens = make_llama(groups=3), [5, 6] * 170
    assert compare(model, made, rules, tokens[:90], 2, ONE_CODE) in (True, False)
    with torch.no_grad(), attach(model, made) as cache:
        logits = fed(model, cache, tokens, alone=True)
    assert logits.isfinite().all()


def test_heads_with_the_largest_windows_retrieve() -> None:
    layers = [[HeadWindow((0,), 2.0), HeadWindow((1, 2), 0.5)], [HeadWindow((0, 1, 2), 0.75)], []]
    assert retrieving(layers) == [[True, False], [False], []]
    equal = [[HeadWindow()], [HeadWindow()]]
    assert retrieving(equal) == [[True], [True]]


def test_sessions_share_full_segments(tmp_path: Path) -> None:
    """A state on disk has files of its memory beside it, for the user only, as long as a state needs them."""
    made, _ = remembering()
    model, files = make_llama(), StateFiles(tmp_path)
    with torch.no_grad(), attach(model, made) as cache:
        for line in (1, 2):
            fed(model, cache, tokens_of(line, 700))
            files.write(line, to_arrays(cache.state_dict()), {"turn": line})
        wanted = fed(model, cache, tokens_of(3, 5))
        shared = sorted(tmp_path.glob("memory-*"))
        assert len(shared) == 2
        assert all(path.stat().st_mode & 0o077 == 0 for path in shared)
        state = files.read(2, 2)
        assert state is not None
        segments = [state[name] for name in sealed_segments(state)]
        assert len(segments) == 2
        assert not any(segment.flags.owndata for segment in segments), "they are mapped"
        cache.load_state_dict(to_tensors(state))
        assert torch.equal(fed(model, cache, tokens_of(3, 5)), wanted)
        files.keep(lambda line: line == 1)
        assert files.read(1, 1) is not None
        assert len([*tmp_path.glob("memory-*")]) == 1
        for damaged in (b"torn", b""):
            next(tmp_path.glob("memory-*")).write_bytes(damaged)
            with pytest.raises((DataError, H2OStreamError), match="damaged|does not fit"):
                cache.load_state_dict(to_tensors(files.read(1, 1) or {}))
        files.keep(lambda line: False)
        assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="files take room when they are written to")
def test_whole_pages_have_room_on_disk() -> None:
    """Also the largest ones: writing into one whose end has no room would be a crash on a full disk."""
    file = SegmentFile(4160)
    taken = [file.take() for _ in range(600)]  # five mappings of 128, each smaller than such a page
    assert os.fstat(file._file.fileno()).st_blocks * 512 >= 5 * (2 << 20) > len(taken) * 4160
