"""Everything at once on an h2o-serve with 1,024 descriptors: idle connections, clients that drip or do not read,
schemas without an end, messages of 4 MB. Meanwhile another client streams replies, follows a schema, and asks for
/health.

python -m lab.tools.serve_siege --seconds 600

Prints the largest gap in the stream, before a first token too, and the largest latencies; also the largest of those
during which the machine's host gave its processors to no other machine. The machine itself must be quiet.
"""

import argparse
import asyncio
import json
import multiprocessing
import resource
import tempfile
import threading
import time
from bisect import bisect
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil

from lab.tools.serve_storm import resident
from tests.serve_kill import Server
from tests.serve_load import post

JSON = {"Content-Type": "application/json"}
BOMB = {"type": "string", "allOf": [{"type": "string", "pattern": f"^.*(a|b){{{n}}}.*$"} for n in range(1, 40)]}
COUNTS = {"idle": 1_100, "drip": 64, "unread": 32, "bomb": 8, "long": 4}


def body(text: str, **more: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], **more}).encode()


def form(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


_BEFORE_S, _ALONE = 1.0, 0.03
"""A latency counts as without other machines if they took less than this share of it and of the time before."""


def stolen_s() -> float:
    """Seconds that a virtual machine's processors had to wait for others."""
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


def head(size: int) -> bytes:
    lines = ("POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json")
    return "\r\n".join((*lines, f"Content-Length: {size}", "", "")).encode()


class Flood:
    """What attacks the server, in a process of its own."""

    def __init__(self, port: int, until: float, kinds: Sequence[str]) -> None:
        self._port, self._until, self._kinds, self.seen = port, until, kinds, Counter[str]()

    async def run(self) -> None:
        await asyncio.gather(
            *(self._again(getattr(self, f"_{kind}")) for kind in self._kinds for _ in range(COUNTS[kind]))
        )

    async def _again(self, act: Callable[[Any, Any], Awaitable[str]]) -> None:
        while time.time() < self._until:
            writer = None
            try:
                async with asyncio.timeout(self._until - time.time() + 1):
                    reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                    result = await act(reader, writer)
            except (OSError, TimeoutError) as error:
                result = type(error).__name__
            finally:
                if writer is not None:
                    writer.close()
            self.seen[f"{act.__name__[1:]}: {result}"] += 1
            await asyncio.sleep(0.5)

    async def _idle(self, reader: Any, writer: Any) -> str:
        return "closed" if not await reader.read(1) else "answered"

    async def _drip(self, reader: Any, writer: Any) -> str:
        for byte in head(1000) + b" " * 1000:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.5)
        return "taken"

    async def _unread(self, reader: Any, writer: Any) -> str:
        data = body("Write much.", stream=True, logprobs=True, top_logprobs=20, max_tokens=2000)
        writer.transport.pause_reading()
        writer.write(head(len(data)) + data)
        await asyncio.sleep(20)
        return "left"

    async def _bomb(self, reader: Any, writer: Any) -> str:
        data = body("Write.", **form(BOMB))
        writer.write(head(len(data)) + data)
        return str((await reader.read(12))[9:12], "ascii")

    async def _long(self, reader: Any, writer: Any) -> str:
        data = body("word " * 780_000, max_tokens=2)
        writer.write(head(len(data)) + data)
        await writer.drain()
        return str((await reader.read(12))[9:12], "ascii")


def flood(port: int, until: float, kinds: Sequence[str]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    attack = Flood(port, until, kinds)
    asyncio.run(attack.run())
    print(dict(sorted(attack.seen.items())), flush=True)


class Probe:
    """The other client."""

    def __init__(self, server: Server, until: float) -> None:
        self._server, self._until, self._seen = server, until, dict[str, list[tuple[float, float]]]()
        self._stolen = [(time.perf_counter(), stolen_s())]

    def run(self) -> None:
        acts = self._stream, self._health, self._schema
        threads = [threading.Thread(target=self._again, args=(act,)) for act in acts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._stolen.sort()
        for name, seen in sorted(self._seen.items()):
            ordered = sorted(seconds for seconds, _ in seen)
            middle, high = ordered[len(seen) // 2], ordered[len(seen) * 99 // 100]
            line = f"{name}: {len(seen)}, median {middle:.3f} s, 99% {high:.3f} s, largest {ordered[-1]:.3f} s"
            alone = [seconds for seconds, end in seen if self._share(end - seconds - _BEFORE_S, end) < _ALONE]
            print(f"{line} (of {len(alone)} without other machines {max(alone, default=0):.3f} s)", flush=True)

    def _share(self, start: float, end: float) -> float:
        """Of the processors' time that other machines took meanwhile."""
        first = max(bisect(self._stolen, (start,)) - 1, 0)
        last = min(bisect(self._stolen, (end,)), len(self._stolen) - 1)
        (began, before), (ended, after) = self._stolen[first], self._stolen[last]
        return (after - before) / max(ended - began, 1e-9) / (psutil.cpu_count() or 1)

    def _again(self, act: Callable[[], None]) -> None:
        while time.time() < self._until:
            try:
                act()
            except OSError as error:
                self._note(f"failed {act.__name__[1:]} ({type(error).__name__})", 0)

    def _note(self, name: str, seconds: float) -> None:
        now = time.perf_counter()
        self._seen.setdefault(name, []).append((seconds, now))
        self._stolen.append((now, stolen_s()))

    def _stream(self) -> None:
        connection = HTTPConnection("127.0.0.1", self._server.port, timeout=60)
        last = time.perf_counter()
        asked = body("Tell me a long story.", stream=True, max_tokens=300)
        connection.request("POST", "/v1/chat/completions", asked, JSON)
        answer, name = connection.getresponse(), "first token"
        while line := answer.readline():
            if b'"content": "' in line and b'"content": ""' not in line:
                now = time.perf_counter()
                self._note(name, now - last)
                last, name = now, "gap of a stream"
        connection.close()
        if answer.status != 200:
            self._note(f"stream refused with {answer.status}", 0)

    def _health(self) -> None:
        began = time.perf_counter()
        assert self._server.is_healthy()
        self._note("health", time.perf_counter() - began)
        time.sleep(0.05)

    def _schema(self) -> None:
        began = time.perf_counter()
        asked = json.loads(body("Say no.", max_tokens=8, **form({"enum": ["yes", "no"]})))
        status, _ = post(self._server.url, "/v1/chat/completions", asked)
        self._note(f"schema, status {status}", time.perf_counter() - began)
        time.sleep(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--quiet-seconds", type=float, default=10, help="of the other client alone, first")
    parser.add_argument("--only", nargs="*", default=[*COUNTS], choices=COUNTS)
    given, rest = parser.parse_known_args()
    stolen, began = stolen_s(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        with Server(Path(folder), *rest, files=1024) as server:
            Probe(server, time.time() + given.quiet_seconds).run()
            until = time.time() + given.seconds
            attack = multiprocessing.get_context("spawn").Process(target=flood, args=(server.port, until, given.only))
            attack.start()
            Probe(server, until).run()
            attack.join(30)
            with suppress(AssertionError):
                assert server.is_healthy()
                print(f"afterwards it is healthy, {resident(server.process.pid):.0f} MiB", flush=True)
            end = time.monotonic()
        print(f"SIGTERM ended it in {time.monotonic() - end:.2f} s")
    share = (stolen_s() - stolen) / (end - began) / (psutil.cpu_count() or 1)
    print(f"other machines on this one's host took {share:.1%} of the processors")


if __name__ == "__main__":
    main()
