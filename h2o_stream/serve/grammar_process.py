"""The process that compiles grammars, and says token by token what they allow; see `grammars`.

It makes llguidance's tokenizer once. For each grammar it forks a process with limits of memory and time: a schema of
two kilobytes can ask for all memory and for years, whatever llguidance's own limits are.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import numpy
import psutil

from h2o_stream.base.processes import yield_to_others
from h2o_stream.config import STRUCTURE
from h2o_stream.engine.grammar import Matcher, Sample, compile_rules, guided
from h2o_stream.engine.speculation import foresee
from h2o_stream.engine.text import Markers
from h2o_stream.errors import DataError

MAX_BYTES, COMPILE_S, REPLY_S = 2**28, 5, 600
"""Memory of a grammar beside that of the tokenizer, and processor seconds until it is compiled and of all that follows;
the last limit only ends what its server has left behind."""

STEP_S = 2.0
"""Processor seconds of a token."""

_WATCH_S = 0.1
"""Seconds after which the memory of all grammars is looked at again."""

_LONG_S = 0.3
"""Processor seconds of an ordinary grammar."""

_STEP = struct.Struct("<Ii")
"""Number of a reply, and the grammar it begins with, or -1; the tokens follow. In answers it is `ALLOWED`, and what may
come next follows; or `FORESEEN`, and tokens."""

FORESEEN, ALLOWED = -2, -1


def foresee_message(reply: int) -> bytes:
    """The message that asks for tokens that a reply probably goes on with, before free text."""
    return _STEP.pack(reply, FORESEEN)


def read_answer(answer: bytes) -> tuple[int, bytes | None, list[int]]:
    """The number of a reply, what is allowed in it, and the tokens that were asked for, or None and no tokens."""
    (number, kind), rest = _STEP.unpack_from(answer), answer[_STEP.size :]
    if kind == ALLOWED:
        return number, rest, []
    return number, None, [token for (token,) in struct.iter_unpack("<i", rest)]


def step_message(reply: int, grammar: int, tokens: Sequence[int]) -> bytes:
    """The message that appends tokens to a reply."""
    return _STEP.pack(reply, grammar) + struct.pack(f"<{len(tokens)}i", *tokens)


def main() -> None:
    """Fork a process for each connection that arrives, until the server is gone."""
    with Connection(int(sys.argv[1])) as server, suppress(EOFError):
        metadata = json.loads(server.recv_bytes())
        tokenizer = guided(metadata["tokenizer"], metadata["vocabulary"], tuple(metadata["ends"]))
        added = {int(number): text for number, text in metadata["added"].items()}
        server.send_bytes(b"")
        begun = dict[psutil.Process, int]()  # with their memory when they began
        while True:
            _watch(begun, metadata["max_bytes"])
            if not server.poll(_WATCH_S if begun else None):
                continue
            handle = recv_handle(server)
            if (child := os.fork()) == 0:
                server.close()
                with Connection(handle) as client, suppress(EOFError, OSError):
                    _serve(client, tokenizer, added)
                os._exit(0)
            os.close(handle)
            with suppress(psutil.NoSuchProcess):
                begun[psutil.Process(child)] = _resident(psutil.Process())


def _watch(begun: dict[psutil.Process, int], max_bytes: int) -> None:
    """Forget processes that have ended; others have the processor before those that work long, and the largest one is
    ended if all of them have taken more memory than that.
    """
    taken = dict[psutil.Process, int]()
    for process, before in [*begun.items()]:
        if _has_ended(process.pid):
            del begun[process]
            continue
        with suppress(psutil.NoSuchProcess):
            taken[process] = max(_resident(process) - before, 0)
            if sum(process.cpu_times()[:2]) > _LONG_S:
                yield_to_others(process.pid)
    if sum(taken.values()) > max_bytes:
        max(taken, key=taken.__getitem__).kill()


def _has_ended(child: int) -> bool:
    """Whether a child has ended, which nobody else asks: Linux waits for idle ones to vanish before it says so."""
    try:
        return os.waitpid(child, os.WNOHANG) != (0, 0)
    except ChildProcessError:
        return True


def _resident(process: psutil.Process) -> int:
    """Bytes of a process in memory, without those of files where the system tells.

    Raises:
        psutil.NoSuchProcess: it has ended.
    """
    memory = process.memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))


def _serve(client: Connection, tokenizer: Any, added: Mapping[int, str]) -> None:
    client.send_bytes(str(os.getpid()).encode())
    asked = json.loads(client.recv_bytes())
    _limit(COMPILE_S)
    thinking = asked["thinking"] and Markers(**asked["thinking"])
    try:
        grammars = [x for x in compile_rules(tokenizer, added, asked["rules"], thinking) if x is not None]
        masks = [list(_masks(grammar, asked["begun"])) for grammar in grammars]
    except DataError as error:
        client.send_bytes(b"-" + str(error)[:1000].encode(errors="replace"))
        return
    except RecursionError:
        client.send_bytes(b"-it is too deep")
        return
    client.send_bytes(b"+")
    for mask in (mask for of_one in masks for mask in of_one):
        client.send_bytes(mask)
    resource.setrlimit(resource.RLIMIT_CPU, (REPLY_S, REPLY_S))
    replies, said = dict[int, Any](), dict[int, list[int]]()
    while True:
        signal.setitimer(signal.ITIMER_PROF, 0)
        message = client.recv_bytes()
        signal.setitimer(signal.ITIMER_PROF, STEP_S)  # which ends the process, also within the library
        number, grammar = _STEP.unpack_from(message)
        if grammar == FORESEEN:
            matcher = Matcher(replies[number], (), Sample(*asked["sample"]))
            found = foresee(matcher, numpy.array(said[number], numpy.int32)) if matcher.alive else []
            certain = takewhile(lambda guess: guess.length >= STRUCTURE, found)
            client.send_bytes(step_message(number, FORESEEN, [guess.token for guess in certain]))
            continue
        if grammar >= 0:
            replies[number], said[number] = grammars[grammar].deep_copy(), []
        for (token,) in struct.iter_unpack("<i", message[_STEP.size :]):
            replies[number].consume_token(token)
            said[number].append(token)
        client.send_bytes(_STEP.pack(number, ALLOWED) + _mask(replies[number]))


def _limit(seconds: int) -> None:
    if sys.platform == "linux":
        mapped = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MAX_BYTES, mapped + MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, REPLY_S))


def _masks(grammar: Any, tokens: Sequence[int]) -> Iterator[bytes]:
    """What is allowed before each of these tokens, and after the last one."""
    begun = grammar.deep_copy()
    yield _mask(begun)
    for token in tokens:
        begun.consume_token(token)
        yield _mask(begun)


def _mask(matcher: Any) -> bytes:
    """The tokens that may come next, a bit for each; nothing if the grammar does not allow those before."""
    mask = b"" if matcher.is_error() else bytes(matcher.compute_bitmask())
    return b"" if matcher.is_error() else mask


if __name__ == "__main__":
    main()
