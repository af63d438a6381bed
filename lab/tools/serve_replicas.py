"""Two replicas behind nginx, by the configuration in docs/serving.md; one is killed, and comes back.

python -m lab.tools.serve_replicas
"""

import argparse
import http.client
import json
import re
import signal
import subprocess
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.serve_kill import Server
from tests.serve_load import TOPICS

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"
FRAME = """daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{}}
http {{
    log_format upstream '$upstream_addr'; access_log {folder}/access.log upstream;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    {documented}
}}
"""


class Client:
    """A client with a key of its own, and its conversation."""

    def __init__(self, port: int, number: int) -> None:
        self._port, self._number = port, number
        self._messages: list[dict[str, str]] = []

    def go_on(self) -> str:
        """What came of one more turn."""
        said = {"role": "user", "content": f"Turn {len(self._messages) // 2} about {TOPICS[self._number]}."}
        status, data = self.post({"messages": [*self._messages, said], "temperature": 0, "max_tokens": 6})
        if status != 200:
            return f"status {status}"
        answer = json.loads(data)
        self._messages += [said, {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}]
        return f"{answer['h2o']['origin']}, {answer['h2o']['turns_read']} turns read"

    def stream(self, tokens: int) -> str:
        """How a streamed reply ended."""
        said = [{"role": "user", "content": f"A long story about {TOPICS[self._number]}, please."}]
        try:
            data = self.post({"messages": said, "max_tokens": tokens, "stream": True})[1]
        except http.client.IncompleteRead:
            return "cut off"
        return "complete" if data.endswith(b"data: [DONE]\n\n") else "cut off"

    def post(self, body: Any) -> tuple[int, bytes]:
        """Status and body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            headers = {"Authorization": f"Bearer key-{self._number}", "Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def documented(ports: list[int], own: int) -> str:
    """The configuration in the documentation, with other ports."""
    text = DOCS.read_text(encoding="utf-8").split("```nginx\n")[1].split("```")[0]
    for number, port in enumerate(ports, 8001):
        text = text.replace(f"127.0.0.1:{number}", f"127.0.0.1:{port}")
    return re.sub(r"listen \d+", f"listen 127.0.0.1:{own}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8799)
    parser.add_argument("options", nargs="*", help="of the servers")
    given = parser.parse_args()
    options = given.options or ["--window", "64", "--dtype", "float32"]
    with (
        tempfile.TemporaryDirectory() as folder, Server(Path(folder, "a"), *options) as one,
        Server(Path(folder, "b"), *options) as other,
    ):  # fmt: skip
        configuration = Path(folder, "nginx.conf")
        filled = documented([one.port, other.port], given.port)
        configuration.write_text(FRAME.format(folder=folder, documented=filled))
        proxy = subprocess.Popen(["nginx", "-c", str(configuration), "-p", folder])
        time.sleep(1)
        clients = [Client(given.port, number) for number in range(len(TOPICS))]

        def turn(what: str) -> None:
            print(f"{what}: {dict(Counter(client.go_on() for client in clients))}", flush=True)

        try:
            for number in range(3):
                turn(f"turn {number + 1}")
            print(f"requests of each replica: {dict(Counter(Path(folder, 'access.log').read_text().split()))}")
            with ThreadPoolExecutor(len(clients)) as executor:
                streams = [executor.submit(client.stream, 400) for client in clients]
                time.sleep(2)
                one.process.send_signal(signal.SIGKILL)
                one.process.wait()
                print(f"streams while one replica was killed: {dict(Counter(x.result() for x in streams))}")
            turn("without it")
            turn("again")
            one.__enter__()
            time.sleep(6)
            turn("after it came back")
            turn("again")
        finally:
            proxy.terminate()
            proxy.wait()


if __name__ == "__main__":
    main()
