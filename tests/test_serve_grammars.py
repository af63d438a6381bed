"""Grammars that take much time or memory: one reply is refused or ended, and others go on."""

import asyncio
import errno
import json
import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from h2o_stream.serve import grammar_client, grammar_process, grammars
from h2o_stream.serve.places import Places
from h2o_stream.serve.schemas import is_larger
from tests import served
from tests.native_builds import needs_library
from tests.served import Running, connected, reply
from tests.test_serve_connections import BOMB
from tests.waiting import wait_for

pytestmark = needs_library


server, _goes_on = served.impatient_server, served.goes_on


SIZES = st.sampled_from([1, 3, 40, 1000, 10**6, 10**9])


def nested(schema: Any, depth: int) -> Any:
    """A schema deep inside of others."""
    for _ in range(depth):
        schema = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    return schema


def constrained(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def test_schemas_without_an_end(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is refused and its process ended, and neither other schemas nor other requests wait for them."""
    server.say("A number?", **constrained({"const": 1}))
    with ThreadPoolExecutor(3) as executor:
        bombs = [executor.submit(server.ask, "A bomb?", **constrained(BOMB)) for _ in range(3)]
        assert server.ask("Others?")[0] == 200
        assert reply(server.say("A number?", **constrained({"const": 1}))) == "1"
        assert not any(bomb.done() for bomb in bombs)
        monkeypatch.setattr(grammar_client, "COMPILE_S", 0.1)
        refused = [bomb.result() for bomb in bombs]
    assert [(status, answer["error"]["param"]) for status, answer in refused] == [(400, "response_format")] * 3
    wait_for(lambda: server.service.grammars.kept.free == server.service.config.running)


PATTERNS = ["^.*(a|b){%d}.*$", "(a*)*{%d}b", "[^x]{1,%d}", "((x{1,%d}){1,%d}){1,%d}", "^(?=a{%d})b$", "(%d"]
SCHEMAS = st.recursive(
    st.one_of(
        st.builds(lambda x, n: {"pattern": x.replace("%d", str(n))}, st.sampled_from(PATTERNS), SIZES),
        st.builds(lambda n: {"enum": [f"value {i}" * 9 for i in range(min(n, 5000))]}, SIZES),
        st.builds(lambda n: {"type": "string", "minLength": n, "maxLength": 2 * n}, SIZES),
        st.builds(lambda n: {"type": "integer", "minimum": -n, "maximum": 10**n if n < 99 else n}, SIZES),
        st.builds(lambda n: {"type": "number", "multipleOf": 1 / n, "minimum": 0.1, "maximum": n}, SIZES),
        st.builds(lambda x: {"$ref": x}, st.sampled_from(["#", "#/$defs/a", "#/$defs/b", "#/nowhere", "http://x/y"])),
        st.sampled_from([{}, True, False, {"type": "nothing"}, {"not": {}}, {"const": {"a": [1]}}, {"type": []}]),
    ),
    lambda inner: st.one_of(
        st.builds(
            lambda name, items, n: {name: (items * n)[:60]},
            st.sampled_from(["allOf", "anyOf", "oneOf"]), st.lists(inner, min_size=1, max_size=4), st.integers(1, 15),
        ),
        st.builds(lambda x, n: {"type": "array", "items": x, "minItems": n, "uniqueItems": n % 2 == 0}, inner, SIZES),
        st.builds(lambda x, n: {"properties": {f"p{i}": x for i in range(min(n, 900))}}, inner, SIZES),
        st.builds(lambda x, y: {"patternProperties": {"^a+$": x}, "additionalProperties": y}, inner, inner),
        st.builds(nested, inner, st.integers(1, 300)),
    ),
    max_leaves=6,
)  # fmt: skip


@settings(
    max_examples=max(settings.default.max_examples // 8, 1),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(SCHEMAS, SCHEMAS, SCHEMAS)
def test_any_schema(server: Running, monkeypatch: pytest.MonkeyPatch, schema: Any, a: Any, b: Any) -> None:
    """It is followed or refused, in the time that there is, and leaves no process."""
    monkeypatch.undo()
    server.say("A number?", **constrained({"const": 1}))
    monkeypatch.setattr(grammar_client, "COMPILE_S", 0.3)
    monkeypatch.setattr(grammar_client, "WAIT_S", 0.3)
    whole = {**schema, "$defs": {"a": a, "b": b}} if isinstance(schema, dict) else schema
    assume(not is_larger(whole, 2**21))  # as JSON, where nothing is shared: there were some of gigabytes
    status, answer = server.ask("Any?", **constrained(whole))
    assert status in (200, 400, 413), answer
    process = server.service.grammars._process
    assert process is not None
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_for(lambda: not children.read_text())
    wait_for(lambda: server.service.grammars.kept.free == server.service.config.running)


def test_schemas_that_wait(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no places left, one has little time; a client that leaves gives its place back."""
    monkeypatch.setattr(server.service.grammars.compiling, "free", 1)
    body = json.dumps({"messages": [{"role": "user", "content": "A bomb?"}], **constrained(BOMB)}).encode()
    with connected(server, body), connected(server, body):
        assert reply(server.say("A number?", **constrained({"const": 1}))) == "1"
    with ThreadPoolExecutor(2) as executor:
        bombs = [executor.submit(server.ask, "A bomb?", **constrained(BOMB)) for _ in range(2)]
        assert reply(server.say("A number?", **constrained({"const": 1}))) == "1"
        monkeypatch.setattr(grammar_client, "COMPILE_S", 0.2)
        assert {bomb.result()[0] for bomb in bombs} <= {503, 400}
    assert server.service.grammars.compiling.free == 1


def test_schemas_of_one_owner_do_not_keep_another_waiting() -> None:
    """Places go round; whoever leaves while waiting loses none."""
    served, places = list[str](), Places(1)

    async def ask(owner: str) -> None:
        await places.take(owner)
        await asyncio.sleep(0)
        served.append(owner)
        places.leave()

    async def all_of_them() -> None:
        tasks = [asyncio.ensure_future(ask(owner)) for owner in ("a", "a", "a", "a", "b", "c", "b")]
        await asyncio.sleep(0)
        tasks[1].cancel()
        tasks[5].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(all_of_them())
    assert (served, places.free, places.crowded) == (["a", "b", "a", "b", "a"], 1, False)


def test_no_more_grammars_than_replies(tmp_path: Path, tiny_folder: Path) -> None:
    """Each has a process and a descriptor, also while its request waits. Further ones come in their turn."""
    max_children, done = 0, threading.Event()
    with Running(tmp_path, tiny_folder, running=2, awake=4) as server:
        server.say("A number?", **constrained({"const": 1}))
        process = server.service.grammars._process
        assert process is not None
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

        def count() -> None:
            nonlocal max_children
            while not done.wait(0.005):
                max_children = max(max_children, len(children.read_text().split()))

        with ThreadPoolExecutor(9) as executor:
            counting = executor.submit(count)
            asked = [executor.submit(server.ask, f"{n}?", **constrained({"enum": [n, "text"]})) for n in range(8)]
            assert [each.result()[0] for each in asked] == [200] * 8
            done.set()
            counting.result()
        wait_for(lambda: server.service.grammars.kept.free == 2)
    assert 1 <= max_children <= 5  # some may be on their way out


def test_texts_of_one_request_follow_one_grammar(tmp_path: Path, tiny_folder: Path) -> None:
    """Each would have waited for a place, while those before it kept all that there are."""
    body = {"prompt": ["One?", "Two?", "Three?"], "max_tokens": 4, **constrained({"const": 1})}
    with Running(tmp_path, tiny_folder, running=1, awake=1) as server, server.connect(timeout_s=10) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
    assert [choice["text"] for choice in answer["choices"]] == ["1", "1", "1"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_its_grammar_waits(
    server: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Nothing waits for it any more: those after it, in the time that it would have taken, are not refused."""
    kept = server.service.grammars.kept
    body = {"messages": [{"role": "user", "content": "A number?"}], "stream": stream, **constrained({"const": 1})}
    with monkeypatch.context() as patched:
        patched.setattr(kept, "free", 0)
        with connected(server, json.dumps(body).encode()):
            wait_for(lambda: kept.crowded)
        wait_for(lambda: (server.service.active, kept.crowded, kept._queues) == (0, False, {}), timeout_s=5)


def test_grammars_have_a_limit_of_memory_together(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest one is ended, the others go on."""
    monkeypatch.setattr(grammars, "MAX_SUM_BYTES", 10 * 2**20)
    large = {"type": "array", "minItems": 99, "items": {"enum": [f"{'ab' * (n % 50)} {n}" for n in range(8000)]}}
    with Running(tmp_path, tiny_folder) as server, ThreadPoolExecutor(1) as executor:
        small = executor.submit(
            server.ask, "A text?", **constrained({"type": "string", "minLength": 500}), max_tokens=300
        )
        status, answer = server.ask("Many?", **constrained(large), max_tokens=300)
        assert (status, "memory" in answer["error"]["message"]) == (400, True)
        assert small.result()[0] == 200


def test_a_grammar_that_is_slow_to_follow_ends_its_reply_only(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others go on while what it allows is being found."""
    original, stopped = grammar_client.GrammarProcess.append, list[int]()

    def stop(self: Any, reply: int, message: bytes) -> None:
        if not stopped:
            stopped.append(self._pid)
            os.kill(self._pid, signal.SIGSTOP)
        original(self, reply, message)

    monkeypatch.setattr(grammar_client.GrammarProcess, "append", stop)
    with ThreadPoolExecutor(1) as executor:
        slow = executor.submit(server.ask, "A number?", **constrained({"type": "string", "minLength": 4}))
        wait_for(lambda: stopped)
        server.say("Others?", max_tokens=2)
        assert not slow.done()
        monkeypatch.setattr(grammar_client, "WAIT_S", 0.1)
        status, answer = slow.result()
    assert (status, "too much memory or time" in answer["error"]["message"]) == (400, True)
    wait_for(lambda: not Path(f"/proc/{stopped[0]}").exists())


def test_a_reply_that_waits_for_its_grammar_goes_on_as_alone(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of its last token are not those of the next steps, which others take meanwhile."""
    more = {**constrained({"type": "string", "maxLength": 40}), "max_tokens": 12, "store": False}
    alone = reply(server.say("A text?", **more))
    ready, asked, seldom_ready = grammars.RemoteGrammar.ready, threading.Event(), random.Random(1)

    def seldom(self: Any) -> bool:
        asked.set()
        return bool(seldom_ready.random() < 0.3 and ready.fget(self))  # type: ignore[attr-defined]

    monkeypatch.setattr(grammars.RemoteGrammar, "ready", property(seldom))
    with ThreadPoolExecutor(2) as executor:
        waits = executor.submit(server.say, "A text?", **more)
        asked.wait()
        server.say("Others?", max_tokens=30, ignore_eos=True)
        assert reply(waits.result()) == alone


def test_the_process_of_grammars_is_started_again(server: Running) -> None:
    server.say("A number?", **constrained({"const": 1}))
    process = server.service.grammars._process
    assert process is not None
    assert os.getsid(process.pid) == os.getsid(0), "another session has as much of the processors, however idle it is"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert reply(server.say("A number?", **constrained({"const": 1}))) == "1"


def test_a_grammar_without_a_descriptor_is_refused(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request alone is, and not with a traceback."""
    with monkeypatch.context() as patched:
        patched.setattr(socket, "socketpair", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        assert server.ask("A number?", **constrained({"const": 1}))[0] == 400
    assert reply(server.say("A number?", **constrained({"const": 1}))) == "1"


def test_time_to_follow_a_grammar_is_that_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process ends, not only the waiting for it; and waiting for the processor is no work."""

    class Endless:
        def deep_copy(self) -> "Endless":
            return self

        def consume_token(self, _: int) -> None:
            time.sleep(0.3)
            waited.set()
            while True:
                pass

    monkeypatch.setattr(grammar_process, "STEP_S", 0.1)
    monkeypatch.setattr(grammar_process, "compile_rules", lambda *_: [Endless()])
    monkeypatch.setattr(grammar_process, "_masks", lambda *_: [b""])
    forked, (ours, theirs) = multiprocessing.get_context("fork"), Pipe()
    waited = forked.Event()
    process = forked.Process(target=grammar_process._serve, args=(theirs, None, {}))
    process.start()
    ours.recv_bytes()
    ours.send_bytes(json.dumps({"rules": "", "thinking": None, "begun": []}).encode())
    assert [ours.recv_bytes() for _ in range(2)] == [b"+", b""]
    ours.send_bytes(grammar_process.step_message(1, 0, [5]))
    process.join(60)
    assert process.exitcode == -signal.SIGPROF
    assert waited.is_set()


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="other systems have the niceness of processes alone")
def test_others_have_the_processor_before_a_grammar_that_works_long() -> None:
    forked = multiprocessing.get_context("fork")
    long = forked.Process(target=lambda: any(False for _ in iter(int, 1)), daemon=True)
    short = forked.Process(target=time.sleep, args=(60,), daemon=True)
    for process in (long, short):
        process.start()
    begun = {psutil.Process(process.pid): 0 for process in (long, short)}
    while sum(next(iter(begun)).cpu_times()[:2]) < grammar_process._LONG_S + 0.02:
        grammar_process._watch(begun, 2**40)
    grammar_process._watch(begun, 2**40)
    assert [os.sched_getscheduler(process.pid) for process in begun] == [os.SCHED_IDLE, os.SCHED_OTHER]
    for process in (long, short):
        process.kill()
        process.join()
    grammar_process._watch(begun, 2**40)
    assert not begun
