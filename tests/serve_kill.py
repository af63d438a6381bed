"""Kills an h2o-serve with SIGKILL in the middle of load, again and again, and looks for every finished turn after it.

python -m tests.serve_kill --kills 10 --conversations 16
"""

import argparse
import http.client
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.serve_load import QUESTIONS, TOPICS, post

COMMAND = "import sys; from h2o_stream.cli.serve import main; sys.argv = ['h2o-serve', *sys.argv[1:]]; main()"


_ENDS = (0, -signal.SIGTERM, *(128 + number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)))


class Server:
    """An h2o-serve in a process of its own. A context manager that terminates it."""

    def __init__(self, folder: Path, *options: str, files: int = 0) -> None:
        self.folder, self._files = folder, files
        self._bound = socket.socket()  # so that nobody else gets the port
        self._bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._bound.bind(("127.0.0.1", 0))
        self.port = self._bound.getsockname()[1]
        self._options = ["--port", str(self.port), "--folder", str(folder), "--quiet", *options]
        self.url = f"http://127.0.0.1:{self.port}"
        self.up = threading.Event()

    def __enter__(self) -> Self:
        limited = ["prlimit", f"--nofile={self._files}:{self._files}"] if self._files else []
        self.process = subprocess.Popen([*limited, sys.executable, "-c", COMMAND, *self._options])
        deadline = time.monotonic() + 60
        while not self.is_healthy():
            assert self.process.poll() is None, "the server does not start"
            assert time.monotonic() < deadline, "the server takes too long to start"
            time.sleep(0.02)
        self.up.set()
        return self

    def __exit__(self, *_: object) -> None:
        self.up.clear()
        self.process.terminate()
        assert self.process.wait(30) in _ENDS
        self._bound.close()

    def is_healthy(self) -> bool:
        """Whether it answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def kill(self) -> None:
        """Kill it, and start it again."""
        self.up.clear()
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.__enter__()


@dataclass
class Talk:
    """A conversation of the load: its messages, how often its server was killed meanwhile, and what was lost."""

    number: int
    messages: list[dict[str, str]] = field(default_factory=list)
    interrupted: int = 0
    lost: list[str] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)

    @property
    def turns(self) -> int:
        """Finished turns."""
        return len(self.messages) // 2

    def question(self) -> dict[str, str]:
        """What is asked next."""
        topic = f"{TOPICS[self.number % len(TOPICS)]} number {self.number}"
        return {"role": "user", "content": QUESTIONS[self.turns % len(QUESTIONS)].format(topic)}

    def go_on(self, server: Server, tokens: int) -> None:
        """A turn, or none if the server is killed before its end comes."""
        asked = [*self.messages, self.question()]
        try:
            status, answer = post(
                server.url, "/v1/chat/completions", {"messages": asked, "temperature": 0, "max_tokens": tokens}
            )
        except (OSError, http.client.HTTPException, ValueError):
            self.interrupted += 1
            return
        if status != 200:
            self.lost.append(f"status {status}: {answer}")
            return
        report = answer["h2o"]
        if report["turns_known"] != self.turns:
            self.lost.append(f"conversation {self.number}: {report['turns_known']} of {self.turns} turns are known")
        self.origins.append(report["origin"])
        reply = answer["choices"][0]["message"]["content"]
        self.messages = [*asked, {"role": "assistant", "content": reply}]


def kill_under_load(
    server: Server, conversations: int, kills: int, tokens: int, seconds: tuple[float, float], seed: int = 0
) -> list[Talk]:
    """Let conversations go on while the server is killed so often, and each for one more turn after it.

    Each has finished a turn more before every kill, however slow the machine is.
    """
    talks, draw, stop = [Talk(number) for number in range(conversations)], random.Random(seed), threading.Event()

    def load(talk: Talk) -> None:
        while not stop.is_set() and not talk.lost:
            if server.up.wait(1):
                talk.go_on(server, tokens)

    threads = [threading.Thread(target=load, args=(talk,)) for talk in talks]
    for thread in threads:
        thread.start()
    try:
        for kill in range(kills):
            time.sleep(draw.uniform(*seconds))
            deadline = time.monotonic() + 60
            while any(talk.turns <= kill and not talk.lost for talk in talks):
                assert time.monotonic() < deadline, "a conversation does not go on"
                time.sleep(0.01)
            server.kill()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    for talk in talks:
        talk.go_on(server, tokens)
    return talks


def undisturbed(server: Server, talk: Talk, tokens: int) -> bool:
    """Whether the same conversation, on a server that was never killed, has the same replies."""
    alone = Talk(talk.number)
    while alone.turns < talk.turns:
        alone.go_on(server, tokens)
    return alone.messages == talk.messages


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--seconds", type=float, nargs=2, default=(1.0, 4.0))
    parser.add_argument("--compared", type=int, default=4, help="conversations that are repeated without kills")
    parser.add_argument("options", nargs="*", help="of the server")
    given: Any = parser.parse_args(arguments)
    options = given.options or ["--dtype", "float32"]
    with tempfile.TemporaryDirectory() as killed, tempfile.TemporaryDirectory() as calm:
        with Server(Path(killed), *options) as server:
            talks = kill_under_load(server, given.conversations, given.kills, given.tokens, tuple(given.seconds))
        with Server(Path(calm), *options) as server:
            same = [undisturbed(server, talk, given.tokens) for talk in talks[: given.compared]]
    origins = [origin for talk in talks for origin in talk.origins]
    print(f"{given.kills} kills; {sum(talk.turns for talk in talks)} turns finished, "
          f"{sum(talk.interrupted for talk in talks)} requests cut off; "
          f"lost: {[line for talk in talks for line in talk.lost] or 'none'}; "
          f"{sum(same)} of {len(same)} conversations as without kills; "
          f"origins {({origin: origins.count(origin) for origin in sorted({*origins})})}")  # fmt: skip


if __name__ == "__main__":
    main()
