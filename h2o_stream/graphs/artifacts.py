"""Where compiled graphs come from: memory, the user's cache folder, or a process that makes them meanwhile."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from h2o_stream.native import legacy_library as library
from h2o_stream.resources import cache_folder

if TYPE_CHECKING:
    from h2o_stream.graphs.trace import Blueprint

Runner = Callable[[list[Tensor]], list[Tensor]]
"""A compiled graph: inputs as in `trace.Step.forward`, a list that it empties; outputs."""

_loaded: dict[str, Runner] = {}

_LOOK_AGAIN_S = 0.5
"""Seconds between two looks at a process that compiles, and until one is started with all that is wanted by then."""


class Artifacts:
    """The graphs of one model.

    Args:
        folder: where they are kept; the default is the user's cache folder.

    Attributes:
        patient: graphs are made only while nothing else is done here, as in a chat, where someone types and reads.
            Otherwise they take their part of the processor: a stream without a pause would never get them.
        trouble: a line for the user when some graph cannot be made.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache_folder() / "graphs"
        self.patient = False
        self.trouble = ""
        self._wanted: dict[str, bytes] = {}
        self._failed: set[str] = set()
        self._building: tuple[list[str], subprocess.Popen[bytes]] | None = None
        self._looked = 0.0

    def get(self, blueprint: Blueprint) -> Runner | None:
        """The graph of a blueprint; None if it is not there yet, then it is being made or will be."""
        key = blueprint.key
        if key in _loaded:
            return _loaded[key]
        if key not in self._wanted and key not in self._failed:
            if runner := self._load(key):
                return runner
            self._want(key, blueprint)
        self.look()
        return _loaded.get(key)

    def _want(self, key: str, blueprint: Blueprint) -> None:
        """Take it down as it is now: the model may be given back before its turn comes."""
        if library.compiler() is None:
            self._give_up(key, "no C++ compiler was found, install g++ or clang++")
            return
        if not self._wanted:
            self._looked = time.monotonic()
        try:
            self._wanted[key] = blueprint.pickled()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self._give_up(key, str(error))

    def wait(self) -> None:
        """Until nothing is being made."""
        while self._wanted:
            self._looked = 0.0
            self.look()
            time.sleep(0.05)

    def look(self) -> None:
        """See what has become of the process, and start the next; `get` does so too."""
        now = time.monotonic()
        if not self._wanted or now - self._looked < _LOOK_AGAIN_S:
            return
        self._looked = now
        if self._building is None:
            keys = list(self._wanted)
            try:
                self._building = keys, self._start(keys)
            except OSError as error:
                for key in keys:
                    self._give_up(key, str(error))
            return
        keys, process = self._building
        ended = process.poll() is not None
        for key in self._wanted.keys() & keys:
            if self._load(key):
                del self._wanted[key]
            elif ended:
                self._give_up(key, f"see {self._log(keys)}")
        if ended:
            self._building = None

    def _give_up(self, key: str, reason: str) -> None:
        self._wanted.pop(key, None)
        self._failed.add(key)
        self.trouble = f"decode steps stay uncompiled, several times slower: {reason}; --no-compile does not try"

    def _start(self, keys: list[str]) -> subprocess.Popen[bytes]:
        """A process of its own that ends by itself, so that what a short run began is there for the next."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # What is pickled has no name on the disk: nobody else can put anything in its place.
        with tempfile.TemporaryFile() as described, self._log(keys).open("wb") as log:
            pickle.dump([self._wanted[key] for key in keys], described)
            described.seek(0)
            return subprocess.Popen(
                [sys.executable, "-m", "h2o_stream.graphs.build", *map(self._path, keys)],
                stdin=described,
                stdout=log,
                stderr=log,
                # Linux gives every session the same, however nice its processes are among themselves.
                start_new_session=not self.patient,
                process_group=0 if self.patient else None,
            )

    def _log(self, keys: list[str]) -> Path:
        return self.folder / f"{keys[0]}.log"

    def _load(self, key: str) -> Runner | None:
        path = self._path(key)
        if not path.exists():
            return None
        library.loaded()  # a graph calls it
        try:
            # As torch._inductor.aoti_load_package does, without the import of the whole compiler.
            _loaded[key] = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1).boxed_run
        except RuntimeError:  # damaged: made anew
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):
            path.touch()  # in use: see `build.KEPT_S`
        return _loaded[key]

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.pt2"
