"""A bounded storm on an h2o-serve on this machine: wrong requests, thousands at once, clients that leave.

python -m lab.tools.serve_storm http://127.0.0.1:8000 --pid PID --requests 20000 --concurrency 10000
"""

import argparse
import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

CHAT = {"messages": [{"role": "user", "content": "Say something."}], "max_tokens": 2, "temperature": 0}
BODIES = {
    "a reply": json.dumps(CHAT).encode(),
    "bad JSON": b'{"messages": [',
    "a wrong role": json.dumps(CHAT | {"messages": [{"role": "robot", "content": "x"}]}).encode(),
    "no message": b"{}",
    "1 MB of x": b"x" * 2**20,
    "too large": b" " * (5 * 2**20),
}


def request(body: bytes) -> bytes:
    """The bytes of a request that closes its connection."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


async def ask(host: str, port: int, body: bytes, read: int = -1) -> str:
    """Status of an answer, with "+" if it says when to come back; after `read` bytes the client leaves."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        return type(error).__name__
    try:
        writer.write(request(body))
        if read >= 0:
            await reader.read(read)
            return "left"
        answer = await reader.read(4096)
        return answer[9:12].decode() + ("+" if b"retry-after" in answer.lower() else "")
    except OSError as error:
        return type(error).__name__
    finally:
        writer.close()


async def storm(host: str, port: int, bodies: list[bytes], concurrency: int, read: int = -1) -> Counter[str]:
    """The answers to all bodies, so many of them concurrently."""
    gate, found = asyncio.Semaphore(concurrency), Counter[str]()

    async def one(body: bytes) -> None:
        async with gate:
            found[await ask(host, port, body, read)] += 1

    await asyncio.gather(*(one(body) for body in bodies))
    return found


def resident(pid: int) -> float:
    """MiB of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, default=10_000)
    options = parser.parse_args()
    place = urlsplit(options.url)
    host, port = place.hostname or "127.0.0.1", place.port or 80

    async def measure(name: str, bodies: list[bytes], concurrency: int, read: int = -1) -> None:
        start = time.perf_counter()
        found = await storm(host, port, bodies, concurrency, read)
        took = time.perf_counter() - start
        print(f"{name}: {dict(found)} in {took:.1f} s; {resident(options.pid):.0f} MiB", flush=True)

    for name, body in BODIES.items():
        await measure(name, [body] * 4, 4)
    stream = json.dumps(CHAT | {"stream": True, "max_tokens": 2000}).encode()
    await measure("clients that leave", [stream] * 64, 32, 300)
    await measure(f"{options.concurrency} at once", [BODIES["a reply"]] * options.concurrency, options.concurrency)
    for part in range(4):
        mixed = [BODIES["bad JSON"], BODIES["a wrong role"], BODIES["no message"], b'{"n": 99}'] * (
            options.requests // 16
        )
        await measure(f"requests, part {part + 1} of 4", mixed, 64)


if __name__ == "__main__":
    asyncio.run(main())
