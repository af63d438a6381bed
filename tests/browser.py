"""A page in headless Chromium, driven by its own protocol over two pipes: nothing has to be installed beside it."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

_PIPES = """
import fcntl, os, sys
moved = [fcntl.fcntl(int(pipe), fcntl.F_DUPFD, 10) for pipe in sys.argv[1:3]]
os.dup2(moved[0], 3), os.dup2(moved[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Chromium reads commands from descriptor 3 and writes to 4."""

_PATIENCE_S = 30.0


class Page:
    """A page. A context manager, which checks at its end that nothing went wrong in the page.

    Attributes:
        problems: errors, and what the policy of the page has stopped.
    """

    def __init__(self, profile: Path, size: str = "1280,860", *more: str) -> None:
        assert CHROMIUM is not None
        (read, self._commands), (self._answers, write) = os.pipe(), os.pipe()
        arguments = [
            "--headless=new", "--no-sandbox", "--remote-debugging-pipe", "--disable-gpu", f"--window-size={size}",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _PIPES,
                str(read),
                str(write),
                CHROMIUM,
                *arguments,
                f"--user-data-dir={profile}",
                *more,
            ],
            pass_fds=(read, write),
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self._rest, self._number, self._session = b"", 0, ""
        self.problems: list[str] = []
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.command(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        self.command("Browser.close")
        self._process.wait(_PATIENCE_S)
        os.close(self._commands)
        os.close(self._answers)
        if kind is None:
            assert not self.problems, self.problems

    def command(self, method: str, **params: Any) -> Any:
        """Send a command, and wait for its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        number = self._number
        while (answer := self._next()).get("id") != number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._answers], [], [], _PATIENCE_S)[0], "the browser does not answer"
            self._rest += os.read(self._answers, 1 << 20)
        line, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self._number += 1
            answer = {"id": self._number, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
            os.write(self._commands, json.dumps(answer | {"sessionId": self._session}).encode() + b"\0")

    def open(self, url: str) -> None:
        """Go to an address, or load the page again."""
        self.command("Page.navigate", url="about:blank")
        self.command("Page.navigate", url=url)
        self.wait("document.readyState == 'complete' && document.querySelector('#legend span, .error')")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.command("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + _PATIENCE_S
        while not self.run(f"!!({condition})"):
            assert time.monotonic() < deadline, condition
            time.sleep(0.02)

    def texts(self, selector: str) -> list[str]:
        """What the elements show."""
        found: list[str] = self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(x => x.innerText)")
        return found

    def click(self, selector: str, words: str = "") -> None:
        """Click the last element that has these words."""
        found, wanted = f"[...document.querySelectorAll({json.dumps(selector)})]", json.dumps(words)
        self.run(f"{found}.filter(x => x.innerText.includes({wanted})).at(-1).click()")

    def type(self, text: str) -> None:
        """Type where the cursor is, and press Enter."""
        self.command("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            enter = {"key": "Enter", "code": "Enter", "text": "\r", "windowsVirtualKeyCode": 13}
            self.command("Input.dispatchKeyEvent", type=kind, **enter)

    def screenshot(self, path: Path) -> None:
        """Take a picture."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.command("Page.captureScreenshot")["data"]))
