"""What a turn costs after 100 turns and after 100,000: operations, bytes read, written and allocated, not seconds."""

import json
import os
import re
import sys
import threading
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from h2o_stream import CacheConfig, Engine, SamplingConfig, attach
from h2o_stream.base.logs import MAX_MARKS, Log, NumberLog
from h2o_stream.cache import shared_state
from h2o_stream.errors import DataError
from h2o_stream.serve.store import Store
from h2o_stream.session.automatic import automatic_session
from h2o_stream.session.conversation import Conversation
from h2o_stream.session.sessions import Session
from h2o_stream.session.transcript import Entry, Header, Transcript, _Content, header_record, last_turn, turn_record
from tests.fixtures import ids, make_llama
from tests.histories import Histories, said
from tests.serve_load import post
from tests.served import Running
from tests.tolerance import assert_close

pytestmark = [
    pytest.mark.usefixtures("own_home"),
    pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts what Linux counts"),
]

LENGTHS = 100, 100_000
TOKENS = 20
"""Of each turn that is only said to have been."""


def cost(action: Callable[[], object]) -> numpy.ndarray[Any, Any]:
    """Calls of functions, bytes read, bytes written, and most bytes allocated at once."""
    calls = [0]

    def count(frame: object, event: str, argument: object) -> None:
        calls[0] += event in ("call", "c_call")

    def moved() -> list[int]:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return [int(fields["rchar"]), int(fields["wchar"])]

    profile = sys.getprofile()
    tracemalloc.start()
    before = moved()
    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(profile)
    after, peak = moved(), tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return numpy.array([calls[0], *(y - x for x, y in zip(before, after, strict=True)), peak])


def lengthen(session: Session, turns: int) -> None:
    """Let a session with turns have so many, without the time that they take."""
    transcript, content = session.transcript, session.transcript._content
    shift = turns - len(content.entries)
    entries = [Entry(number, "A message", "ok") for number in range(1, shift + 1)]
    entries += [replace(entry, turn=entry.turn + shift) for entry in content.entries]
    transcript._content = _Content(turns + 1, content.header, Log(entries), Log(range(2, turns + 2)))
    transcript._size += 100 * shift
    os.truncate(transcript.path, transcript._size)


def older(conversation: Conversation, turns: int) -> None:
    """Let a conversation with turns have so many before them: what it holds is of the last ones."""
    engine, metadata = conversation.engine, conversation.metadata
    shift, said_before = (turns - metadata.turns) * TOKENS, turns - metadata.turns
    engine.tokens = NumberLog(numpy.concatenate((numpy.zeros(shift, numpy.int32), engine.tokens.array)))
    cache: Any = engine.cache
    cache.tokens.lengths, cache.tokens.columns = (len(engine.tokens),), len(engine.tokens)
    for group in cache.head_groups:
        tensors = group.tensors()
        tensors["seen"] += shift
        tensors["index"][tensors["index"] >= 0] += shift
    starts = numpy.arange(1, said_before + 1)[:, None] * [1, TOKENS] - [0, TOKENS]
    later = metadata.starts.array.reshape(-1, 2) + numpy.array([said_before, shift])
    conversation.metadata = replace(
        metadata, turns=turns, starts=NumberLog(numpy.concatenate((starts, later)).reshape(-1))
    )


@pytest.mark.parametrize("kind", ["automatic", "named"])
def test_a_turn_of_the_chat(make_history: Histories, kind: str) -> None:
    costs = []
    for turns in LENGTHS:
        history = make_history()
        if kind == "named":
            history.open(f"talk-{turns}")
        else:
            history.keep(automatic_session)
        said(history, "Tell me about the sea.", "And the tower?")
        assert history.session is not None
        lengthen(history.session, turns)
        older(history.conversation, turns)
        states = {turns: history.conversation.state_dict()}
        transactions = history._transactions
        transactions.checkpoint = replace(
            transactions.checkpoint, metadata=history.conversation.metadata, states=states
        )
        said(history, "Once more.")  # what is only now as long is written once
        costs.append(cost(lambda history=history: said(history, "And the light?")))  # type: ignore[misc]
        assert len(history.entries) == turns + 2
        history.close()
    assert (costs[1] <= 1.1 * costs[0] + [50, 500, 500, 5000]).all(), costs


def test_a_turn_of_the_server(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [0]

    def count(frame: object, event: str, argument: object) -> None:
        calls[0] += event in ("call", "c_call")

    with monkeypatch.context() as patch:  # threads that begin now are counted
        patch.setattr(threading, "_profile_hook", count)
        server = Running(tmp_path, tiny_folder)
    costs = []
    with server:
        for turns in LENGTHS:
            said = None

            def say(text: str) -> None:
                nonlocal said
                body = {"input": text, "temperature": 0, "max_output_tokens": 8, "previous_response_id": said}
                status, answer = post(server.url, "/v1/responses", body)
                assert status == 200, answer
                said = answer["id"]

            say("Tell me about the sea.")
            say("And the tower?")
            conversations = server.service.conversations
            live = conversations.awake[next(reversed(conversations.awake))]
            kept = live.kept
            assert kept is not None
            assert kept.session is not None
            shift = turns - len(kept.session.transcript.entries)
            lengthen(kept.session, turns)
            older(live.conversation, turns)
            kept.hashes = Log([*map(str, range(shift)), *kept.hashes])
            kept.turns = Log(range(turns + 1))
            server.service.store._index(kept, 1)
            kept.ids[said.removeprefix("resp_")] = turns
            for again in ("Once more.", "And again."):
                say(again)
            before, moved = calls[0], cost(lambda: say("And the light?"))
            costs.append([calls[0] - before, *moved[1:]])
            assert len(kept.session.transcript.entries) == turns + 3
    limits = 1.1 * numpy.array(costs[0]) + [50, 500, 500, 200_000]  # threads allocate at once, or one after another
    assert (numpy.array(costs[1]) <= limits).all(), costs


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=30))
def test_logs_are_as_lists(steps: list[tuple[int, int]]) -> None:
    """Whatever is appended to which version."""
    versions = [(Log[int](), NumberLog(), list[int]())]
    for value, back in steps:
        log, numbers, expected = versions[max(len(versions) - 1 - back, 0)]
        if value == 5 and expected:
            versions.append((log.first(len(expected) - 1), numbers.shortened(1), expected[:-1]))
        else:
            versions.append((log.append(value), numbers.append([value]).marked(), [*expected, value]))
    for log, numbers, expected in versions:
        assert list(log) == list(numbers) == expected
        assert log[-2:] == numbers[-2:] == expected[-2:]
        assert len(numbers.marks) <= MAX_MARKS
        assert all(NumberLog(numbers[:length]).marked().marks[-1] == (length, crc) for length, crc in numbers.marks)
        assert (numbers == versions[-1][1]) is (expected == versions[-1][2]) is (log == versions[-1][0])


def test_rotations_of_the_distances_there_are(talker: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of all that the model was trained for: 65,536 of Llama's would take 32 MB."""
    found, greedy = [], SamplingConfig(temperature=0, max_tokens=600)
    for everything in (False, True):
        if everything:
            monkeypatch.setattr(shared_state, "_MIN_REACH", 2**20)
        with Engine(talker(context=65536), tokenizer, CacheConfig(window=64), greedy) as engine:
            engine.end_tokens = frozenset()
            list(engine.prefill([*range(3, 59)]))
            list(engine.decode())
            assert (len(engine.cache.head_groups[0].table.on_cpu(1)) > 2048) == everything
            found.append([*engine.tokens])
    assert found[0] == found[1]


@pytest.mark.parametrize("engine", ["auto", "eager"])
def test_rotations_of_a_long_prompt(monkeypatch: pytest.MonkeyPatch, engine: Any) -> None:
    """Its tokens are counted before its distances are looked up."""
    monkeypatch.setattr(shared_state, "_MIN_REACH", 32)
    model, tokens = make_llama(context=4096), ids(200)
    with attach(model, CacheConfig(window=16, chunk=20), engine=engine) as cache:
        whole = model(tokens, past_key_values=cache).logits[:, -1]
        cache.reset()
        assert model(tokens[:, :100], past_key_values=cache).logits.isfinite().all()
        assert_close(model(tokens[:, 100:], past_key_values=cache).logits[:, -1], whole)


@given(st.lists(st.tuples(st.sampled_from(["turn", "undo"]), st.integers(0, 9000)), max_size=6), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_last_turn_is_found_at_the_end(tmp_path: Path, steps: list[tuple[str, int]], cut: bool) -> None:
    path = tmp_path / "transcript.jsonl"
    path.unlink(missing_ok=True)
    transcript = Transcript(path)
    transcript.append(header_record(Header("m", "h2o", 64, None)))
    for kind, size in steps:
        turn = len(transcript.entries) + 1
        entry = turn_record(Entry(turn, "x" * size, "ok"))
        transcript.append(entry if kind == "turn" else {"type": "undo", "turn": max(turn - 2, 0)})
    if cut:
        with path.open("ab") as file:
            file.write(b'{"type": "turn", "turn": 99')
    assert last_turn(path) == (transcript.entries[-1].turn if transcript.entries else 0)


ODD = st.sampled_from([None, True, -1, 0, 2**70, 0.5, "", "x", "\ud800", "0" * 32, [], {}, [1], ["a"], {"a": []}])
FIELDS = ("type", "turn", "prompt", "text", "kind", "finish", "time", "thinking", "model", "policy", "window", "system")
RECORDS = st.one_of(
    ODD,
    st.builds(
        lambda good, odd: good | odd,
        st.sampled_from([turn_record(Entry(1, "a", "b")), {"type": "undo", "turn": 0}]),
        st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=2),
    ),
    st.lists(ODD, max_size=4),
)


def lines(records: list[Any], cut: int) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()[: -cut or None]


@given(st.lists(RECORDS, max_size=4), st.integers(0, 30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_strange_transcripts(tmp_path: Path, records: list[Any], cut: int) -> None:
    """They are refused, or read as far as they are whole, and gone on with."""
    path = tmp_path / "strange.jsonl"
    path.write_bytes(lines([header_record(Header("m", "h2o", 64, None)), *records], cut))
    with suppress(DataError):
        last_turn(path)
    try:
        transcript = Transcript(path)
    except DataError as error:
        assert re.search(r"line \d|header", str(error))  # noqa: PT017  # some are read
        return
    if transcript.line_count == 0:
        transcript.append(header_record(Header("m", "h2o", 64, None)))
    transcript.append(turn_record(Entry(last_turn(path) + 1, "c", "d")))
    again = Transcript(path)
    assert (list(again.entries), again.line_count) == (list(transcript.entries), transcript.line_count)


@given(
    st.lists(ODD | st.lists(ODD, max_size=4), max_size=4),
    st.dictionaries(st.sampled_from(["model", "key", "first", "owner", "system"]), ODD),
    st.integers(0, 9),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_strange_files_of_a_server(tmp_path: Path, records: list[Any], about: dict[str, Any], cut: int) -> None:
    """No file of a conversation keeps a server from starting, or from forgetting it."""
    folder = tmp_path / ("a" * 32)
    folder.mkdir(exist_ok=True)
    said = [turn_record(Entry(number, "a", "b")) for number in range(1, 4)]
    (folder / "transcript.jsonl").write_bytes(lines([header_record(Header("m", "h2o", 64, None)), *said], 0))
    good = {"model": "m", "key": [], "system": None, "owner": "", "first": "0"}
    (folder / "serve.jsonl").write_bytes(lines([good | about, ["1", 1], *records], cut))
    store = Store(tmp_path, "m", 3, 0, 1e6)
    for kept in store.to_forget({}):
        list(store.with_hash(kept.hashes[-1], ""))
        store.forget(kept)
    assert not store._by_hash
    assert not store._by_id
    store.close()
