"""The check of a file that was described without torch, in a process of its own beside the chat.

The process loads the file through transformers and compares (`engine.check`). Its result is kept by digest. Without
torch there is no check.
"""

from __future__ import annotations

import importlib.util
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

from h2o_stream.errors import H2OStreamError
from h2o_stream.processes import python_command
from h2o_stream.runtime.known import Known, read_known

_CODE = "from h2o_stream.engine.check import main; main()"
"""What the process runs."""

DAMAGED = 3
"""Exit code of the process if packed weights on disk were not those of the file."""

_POLL_S = 0.05

_BEGINNING = "starting"
"""The stage before the process says one."""


def can_check() -> bool:
    """Whether there is something to compare with."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


class BackgroundCheck:
    """A check that runs while the model is used already, from `begin` on.

    Args:
        name: what the user typed.
        path: of the file or folder.
        variant: see `runtime.sources.Source`.

    Attributes:
        failure: why the file could not be checked, once that is known; or nothing.
        stage: what the check does now, as one line.
    """

    def __init__(self, name: str, path: Path, variant: str) -> None:
        self._name, self._path, self._variant = name, path, variant
        self._process: subprocess.Popen[str] | None = None
        self._known: Known | None = None
        self._listener: threading.Thread | None = None
        self.failure, self.stage, self._complaint = "", _BEGINNING, ""

    def begin(self) -> None:
        """Begin in the background, if that has not happened: after the first token, which has the machine to itself."""
        if self._process is None:
            self._process = subprocess.Popen(
                python_command(_CODE, self._name, str(self._path), self._variant),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # Ctrl-C ends a reply, not the check
            )
            self._listener = threading.Thread(target=self._listen, args=(self._process,), daemon=True)
            self._listener.start()

    @property
    def ended(self) -> bool:
        """Whether there is a result, or a failure."""
        if self._known is not None or self.failure:
            return True
        if self._process is None or self._process.poll() is None:
            return False
        self._close()
        if self._process.returncode == DAMAGED:
            self.failure = self.stage
            self._complaint = (
                f"the packed weights of {self._name} on disk were damaged, and are removed: {self.stage}. What it has "
                "said may be wrong. Start again: they are packed anew"
            )
            return True
        with suppress(OSError, H2OStreamError):  # the file may be gone
            self._known = read_known(self._path, self._variant)
        if self._known is None:
            said = self._process.returncode > 0 and self.stage != _BEGINNING
            self.failure = self.stage if said else "its process was ended"
        elif self._known.difference:
            self._complaint = (
                f"{self._name} was read wrongly from its file: transformers' model differs ({self._known.difference}) "
                "and predicts text better. What it has said may be wrong. Start again: it is loaded through "
                "transformers now, as by --engine eager"
            )
        return True

    def _listen(self, process: subprocess.Popen[str]) -> None:
        """Read what the process writes: a line at each stage, and at last why nothing could be compared."""
        assert process.stdout is not None
        for line in process.stdout:
            self.stage = line.strip()

    def _close(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        assert self._listener is not None
        self._process.wait()
        self._listener.join()
        self._process.stdout.close()

    @property
    def complaint(self) -> str:
        """A line for the user if what the model has said may be wrong, or nothing."""
        return self._complaint if self.ended else ""

    @property
    def doubt(self) -> str:
        """Where both differ although the file was not found to be read wrongly, or nothing."""
        return self._known.doubt if self.ended and self._known is not None else ""

    def wait(self, timeout_s: float = float("inf")) -> bool:
        """Wait for the result at most this long; whether it is there."""
        self.begin()
        until = time.monotonic() + timeout_s
        while not self.ended:
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_S)
        return True

    def digest(self) -> str:
        """What transformers' model is called in states, once the check has passed, which is waited for; or nothing."""
        self.wait()
        return "" if self._known is None else self._known.digest

    def require(self) -> None:
        """Wait until the model was compared, if it can be.

        Raises:
            H2OStreamError: it was read wrongly.
        """
        self.wait()
        if self.complaint:
            raise H2OStreamError(self.complaint)

    def stop(self) -> None:
        """End the check without a result; the next start begins it again."""
        if self._process is not None and not self.ended:
            self._process.kill()
            self._close()
