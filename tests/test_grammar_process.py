"""The process that follows grammars ends by itself."""

import json
import multiprocessing
import signal
import time
from multiprocessing import Pipe

import psutil
import pytest

from h2o_stream.serve import grammar_process


def test_time_to_follow_a_grammar_is_that_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process ends, not only the waiting for it; and waiting for the processor is no work."""

    class Endless:
        def deep_copy(self) -> "Endless":
            return self

        def consume_token(self, _: int) -> None:
            time.sleep(0.3)
            while True:
                pass

    monkeypatch.setattr(grammar_process, "STEP_S", 0.1)
    monkeypatch.setattr(grammar_process, "compile_rules", lambda *_: [Endless()])
    monkeypatch.setattr(grammar_process, "_masks", lambda *_: [b""])
    ours, theirs = Pipe()
    process = multiprocessing.get_context("fork").Process(target=grammar_process._serve, args=(theirs, None, {}))
    process.start()
    ours.recv_bytes()
    ours.send_bytes(json.dumps({"rules": "", "thinking": None, "begun": []}).encode())
    assert [ours.recv_bytes() for _ in range(2)] == [b"+", b""]
    ours.send_bytes(grammar_process.step_message(1, 0, [5]))
    process.join(0.25)
    assert process.is_alive()
    process.join(10)
    assert process.exitcode == -signal.SIGPROF


def test_others_have_the_processor_before_a_grammar_that_works_long() -> None:
    forked = multiprocessing.get_context("fork")
    long = forked.Process(target=lambda: any(False for _ in iter(int, 1)), daemon=True)
    short = forked.Process(target=time.sleep, args=(60,), daemon=True)
    for process in (long, short):
        process.start()
    begun = {psutil.Process(process.pid): 0 for process in (long, short)}
    before = psutil.Process().nice()
    while sum(next(iter(begun)).cpu_times()[:2]) < grammar_process._LONG_S + 0.02:
        grammar_process._watch(begun, 2**40)
    grammar_process._watch(begun, 2**40)
    assert [process.nice() for process in begun] == [19, before]
    for process in (long, short):
        process.kill()
        process.join()
    grammar_process._watch(begun, 2**40)
    assert not begun
