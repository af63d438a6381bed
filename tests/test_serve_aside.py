"""What takes long happens in other threads: texts, states, indexes and lists that others do not wait for."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from h2o_stream.cache import state
from h2o_stream.cache.slots import Slots
from h2o_stream.errors import H2OStreamError
from h2o_stream.models import tokenizer
from h2o_stream.recall import recall
from h2o_stream.serve import app, aside, chat, conversations, endings, long_texts, service
from h2o_stream.serve.stream import Pace
from h2o_stream.session import state_files
from tests import served
from tests.native_builds import needs_library
from tests.serve_load import post
from tests.served import Running, connected, reply
from tests.waiting import wait_for

pytestmark = needs_library

server, _goes_on = served.impatient_server, served.goes_on


def test_parts_of_prompts_are_as_long_as_others_can_wait_for() -> None:
    pace = Pace()
    assert (pace.tokens, pace.seconds(9)) == (256, inf)
    pace.replies = True
    assert pace.tokens == 64
    assert [pace.seconds(step_s) for step_s in (0, 0.06)] == pytest.approx([0.1, 0.04])
    shares = [pace.seconds(step_s) / 0.4 for step_s in 50 * [0.2, 0.6]]
    assert sum(max(share, 0) for share in shares[-10:]) / 10 == pytest.approx(0.4, abs=0.05)
    assert max(shares[-9::2]) < 0.1, "nor do they wait much longer for a step that is slow"


def test_replies_go_on_between_the_layers_of_prompts(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose clients may leave meanwhile."""
    question, worker, events = "Name tools. " * 40, server.service.worker, list[str]()
    wanted, read, forward = reply(server.say(question)), worker._batch.read, worker._forward

    def read_slowly(*prompts: Any) -> Iterator[Any]:
        for logits in read(*prompts):
            events.append("layer" if logits is None else "read")
            yield logits

    monkeypatch.setattr(Pace, "seconds", lambda *_: 1e-4)
    monkeypatch.setattr(worker._batch, "read", read_slowly)
    monkeypatch.setattr(worker, "_forward", lambda *args, **more: (events.append("step"), forward(*args, **more)))
    goes_on = b'{"messages": [{"role": "user", "content": "Go on."}], "max_tokens": 1000000, "ignore_eos": true}'
    with connected(server, goes_on):
        wait_for(lambda: any(job.tokens > 2 for job in worker._jobs))
        events.clear()
        assert reply(server.say(question, ignore_eos=False)) == wanted
        assert ("layer", "step") in pairwise(events)
        assert not {("layer", "layer"), ("layer", "read")} & {*pairwise(events)}
        with connected(server, json.dumps({"messages": [{"role": "user", "content": question * 9}]}).encode()):
            wait_for(lambda: any(job.between_layers for job in worker._jobs))
        wait_for(lambda: len(worker._jobs) == 1)
    server.check_idle()


def test_events_are_handled_between_requests_that_come_together() -> None:
    order = list[str]()

    async def handle_events() -> None:
        while order.count("work") < 8:
            order.append("event")
            await asyncio.sleep(0)

    async def run() -> None:
        works = (aside.aside(10, lambda: order.append("work")) for _ in range(8))
        await asyncio.gather(handle_events(), *works)

    asyncio.run(run())
    assert ("work", "work") not in pairwise(order)


def test_a_server_ends_though_it_reads(tiny_folder: Path) -> None:
    """Threads, and what Python does at its end, are not waited for."""
    code = (
        "import atexit, sys, time; from h2o_stream.cli import serve; from h2o_stream.serve import connections; "
        "from h2o_stream.serve.aside import Threads; atexit.register(time.sleep, 600); "
        "connections.Server.run = lambda *_: (Threads('h2o-read').submit(lambda: time.sleep(600)), sys.exit(143)); "
        "serve.main()"
    )
    done = subprocess.run([sys.executable, "-c", code, "-m", tiny_folder, "--port", "0", "--quiet"], timeout=120)
    assert done.returncode == 143


def test_long_texts_leave_the_processors_to_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process tokenizes them as this one does, also after it was killed; where somebody waits for them at a terminal,
    there is none.
    """
    monkeypatch.setattr(long_texts, "_LONG", 10)
    words = Tokenizer(models.WordLevel({"a": 0, "é": 1}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    threads, text, here = aside.Threads("h2o-test"), "a é é " * 1000, psutil.Process()

    def processes() -> list[psutil.Process]:
        alive = (child for child in here.children() if child.status() != psutil.STATUS_ZOMBIE)
        return [child for child in alive if "h2o_stream.serve.long_texts" in child.cmdline()]

    long_texts._process.cache_clear()
    assert tokenizer.encode(words, text) == [0, 1, 1] * 1000
    wait_for(lambda: not processes())
    for _ in range(2):
        assert threads.submit(lambda: tokenizer.encode(words, text)).result() == [0, 1, 1] * 1000
        (process,) = processes()
        assert os.getsid(process.pid) == os.getsid(0)
        assert not hasattr(os, "SCHED_IDLE") or os.sched_getscheduler(process.pid) == os.SCHED_IDLE
        process.kill()
        assert threads.submit(lambda: tokenizer.encode(words, text)).result() == [0, 1, 1] * 1000
    for unreadable in ("b", "\ud800"):
        with pytest.raises(H2OStreamError, match="cannot read this"):
            threads.submit(lambda more=unreadable: tokenizer.encode(words, text + more)).result()
    long_texts._process.cache_clear()


def test_long_texts_are_read_where_nobody_waits(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the thread that steps all replies nor in that of the connections; and what cannot fit is not read."""
    server.say("Ready?")
    read: list[tuple[str, str, int]] = []

    def noting(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            text = next(value for value in args if isinstance(value, str | bytes | list))
            read.append((what, threading.current_thread().name, len(str(text))))
            return function(*args, **more)

        return call

    monkeypatch.setattr(tokenizer, "encode", noting("tokens", tokenizer.encode))
    monkeypatch.setattr(json.JSONDecoder, "decode", noting("JSON", json.JSONDecoder.decode))
    monkeypatch.setattr(chat, "parse_dialogue", noting("messages", chat.parse_dialogue))
    text, other = "A long text. " * 2000, [{"role": "user", "content": "Hello."}]
    with ThreadPoolExecutor(2) as executor:
        reply = executor.submit(server.ask, text, "It is.", "Why?", recall="auto")
        assert server.ask("A short one.")[0] == reply.result()[0] == 200
    threads = {what: {name for found, name, size in read if found == what and size >= len(text)} for what, *_ in read}
    assert all(name.startswith("h2o-read") for name in threads["tokens"])
    assert threads["tokens"]
    assert threads["JSON"] | threads["messages"] <= {name for _, name, _ in read if name.startswith("h2o-aside")}
    read.clear()
    for module in (aside, service):
        monkeypatch.setattr(module, "LONG", 1000)
    for refused, param in (
        ({"messages": [{"role": "system", "content": text}, *other]}, "messages"),
        ({"messages": other, "pins": [text]}, "pins"),
        ({"messages": [{"role": "system", "content": text[:6000]}, *other], "window": 300}, "messages"),
    ):
        status, answer = post(server.url, "/v1/chat/completions", refused)
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "context_length_exceeded", param)
    assert {name[:9] for what, name, size in read if what == "tokens" and size >= 6000} == {"h2o-aside"}
    assert not [what for what, _, size in read if what == "tokens" and size >= len(text)]


def test_a_long_opening_is_read_once_where_nobody_waits(
    tmp_path: Path, long_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made tokens of to see whether it fits, and with the first message, but not by the thread of all replies."""
    threads, encode, system = list[str](), tokenizer.encode, "Be kind to all. " * 700

    def noting(backend: Any, text: str, *more: Any) -> Any:
        if len(text) >= len(system) - 1:
            threads.append(threading.current_thread().name.rpartition("-")[0])
        return encode(backend, text, *more)

    with Running(tmp_path, long_folder, awake=1, running=1) as running:
        monkeypatch.setattr(tokenizer, "encode", noting)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "Are you?"}]
        answer = running.say(messages=messages)
        assert threads == ["h2o-aside", "h2o-read"]
        threads.clear()
        running.say("Go to sleep.")
        running.service.conversations.templates._kept.clear()  # as after a restart
        more = [{"role": "assistant", "content": reply(answer)}, {"role": "user", "content": "And now?"}]
        assert running.say(messages=messages + more)["h2o"]["turns_known"] == 1
        assert threads == ["h2o-load"]


def test_states_are_loaded_and_copied_where_nobody_waits(
    tmp_path: Path, long_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 80 MB, which is read, checked and copied, held all replies for 75 ms, and a busy machine for a second."""
    handled = Counter[str]()

    def noting(function: Callable[..., Any], size: Callable[[Any], int], place: int) -> Callable[..., Any]:
        def call(*values: Any) -> Any:
            handled[threading.current_thread().name.rstrip("-_0123456789")] += size(values[place])
            return function(*values)

        return call

    def all_bytes(arrays: Any) -> int:
        return sum(array.nbytes for array in arrays.values())

    for module in (conversations, endings):
        monkeypatch.setattr(module, "LARGE", 1)
    monkeypatch.setattr(state_files, "decode_state", noting(state_files.decode_state, len, 0))
    monkeypatch.setattr(state, "_crc", noting(state._crc, lambda array: array.nbytes, 0))
    monkeypatch.setattr(Slots, "load", noting(Slots.load, all_bytes, 1))
    monkeypatch.setattr(Slots, "arrays", noting(Slots.arrays, lambda slots: slots.nbytes, 0))
    with Running(tmp_path, long_folder, awake=2, running=2) as running:
        first = running.say("Number 0.")
        asked = ["Number 0.", reply(first), "And?"]
        opened = [running.say(*asked, **more)["h2o"]["origin"] for more in ({"store": False}, {}, {"n": 2}, {})]
        for number in range(2):
            running.say(f"Go to sleep, {number}.")
        opened.append(running.say("And?", previous_response_id=first["id"])["h2o"]["origin"])
        running.say(*asked[:1], reply(first), "Then?", stop=["e"])
        running.say(*asked[:1], reply(first), "Then?", "It is.", "No?", stop=["e"])
    assert opened == ["branched", "continued", *3 * ["branched"]]
    assert {*handled} == {"h2o-load", "h2o-read", "h2o-save"}


def test_long_lists_of_tokens_are_written_where_nobody_waits(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer with 20 likely tokens for each of 16,384 would stop all others for seconds."""
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "temperature": 0, "store": False}
    here, threads = server.say("A list.", **asked)["choices"], list[str]()

    def noting(function: Callable[..., Any], *values: Any) -> Any:
        threads.append(threading.current_thread().name)
        return function(*values)

    for module, name in ((chat, "chat_logprobs"), (app, "patient_json")):
        monkeypatch.setattr(module, name, partial(noting, getattr(module, name)))
    for module in (aside, app):
        monkeypatch.setattr(module, "LONG", 30)
    assert server.say("A list.", **asked)["choices"] == here
    assert [name[:9] for name in threads] == 2 * ["h2o-aside"]


def test_what_recall_searches_is_indexed_where_nobody_waits(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a megabyte that a client pasted held all replies for seconds, when it asked about that."""
    seen, text = list[str](), "My code is 4711. Your code is 1174. " * 80

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any) -> Any:
            if any(len(value) >= len(text) - 1 for value in values if isinstance(value, str)):
                seen.append(threading.current_thread().name.rstrip("-_0123456789"))
            return function(*values)

        return call

    monkeypatch.setattr(recall, "locate", noting(recall.locate))
    monkeypatch.setattr(recall, "cut_pieces", noting(recall.cut_pieces))
    asked = {"recall": "auto", "previous_response_id": server.say(text, recall="auto")["id"]}
    assert server.say("What is my code?", **asked)["h2o"]["origin"] == "continued"
    assert seen == ["h2o-save"]
    assert server.say("Summarize the text above.", **asked)["h2o"]["origin"] == "branched"
    assert seen == ["h2o-save", "h2o-read", "h2o-read", "h2o-save-long"]
    seen.clear()
    monkeypatch.setattr(recall, "decide", lambda *_: seen.append(threading.current_thread().name[:8]) or [])
    for mode in ("wide", "auto"):
        said = server.say("My code is 4711.", recall=mode)["id"]
        server.say("What is my code?", recall=mode, previous_response_id=said)
    assert seen == ["h2o-read", "h2o-serv"]
