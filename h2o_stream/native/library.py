"""The compiled library: which of those that were built at install is loaded, or why there is none.

There is one for each instruction set, compiled from `src` (CMakeLists.txt): a wheel runs on any processor of its kind.
Beside each lies its checksum: one that is damaged, truncated or of another build is never loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from functools import cache
from pathlib import Path

from h2o_stream.errors import ConfigError
from h2o_stream.native.abi import declare

INSTRUCTIONS = ("portable", "avx2", "avx512")
"""From what every processor has to the best; the numbers of `h2o_cpu_level` in src/cpu.cpp."""

INSTRUCTIONS_VARIABLE = "H2O_INSTRUCTIONS"
"""The environment variable that names another than the best, for tests and to find errors."""

FOLDER_VARIABLE = "H2O_LIBRARY_FOLDER"
"""The environment variable that names another folder of libraries, such as those that `make sanitize` builds."""

_INSTALLED_WITHOUT = (
    "h2o_stream was installed without its compiled library, since there was no C++ compiler or it failed "
    "(pip install -v says why): install GCC or Clang, then h2o_stream again"
)


def loaded() -> ctypes.CDLL | None:
    """The library for the best instructions that the processor has; None where there is none, see `missing_reason`.

    Raises:
        ConfigError: H2O_INSTRUCTIONS names something that there is not.
    """
    return _found()[0]


def missing_reason() -> str | None:
    """Why there is no library, and what to do about it, in one line; None where there is one."""
    return _found()[2]


def name() -> str:
    """Which instructions the loaded library uses, one of `INSTRUCTIONS`; "none" without a library."""
    return _found()[1]


def identity() -> str:
    """What tells the loaded library from others: its name and its checksum."""
    return f"{name()} {_checksum(name())}" if loaded() else name()


def available() -> list[str]:
    """The instruction sets that there is a library for and that this processor has, the best last."""
    portable = _path("portable")
    if not portable.exists():
        return []
    level = int(open_library("portable").h2o_cpu_level())
    return [choice for choice in INSTRUCTIONS[: level + 1] if _path(choice).exists()]


def open_library(choice: str) -> ctypes.CDLL:
    """The library for one of `available`, whichever is the best.

    Raises:
        OSError: it is damaged or of another build, or the system cannot load it.
        AttributeError: it is of another version.
    """
    path = _path(choice)
    if hashlib.sha256(path.read_bytes()).hexdigest() != _checksum(choice):
        raise OSError(f"{path.name} is damaged or of another build, its checksum differs")
    return declare(ctypes.CDLL(str(path.resolve())))


@cache
def _found() -> tuple[ctypes.CDLL | None, str, str | None]:
    """The library, its name, and why there is none."""
    wanted = os.environ.get(INSTRUCTIONS_VARIABLE)
    if wanted and wanted not in INSTRUCTIONS:
        raise ConfigError(f"{INSTRUCTIONS_VARIABLE}={wanted}: choose one of {', '.join(INSTRUCTIONS)}")
    try:
        choices = available()
        if not choices:
            return None, "none", _INSTALLED_WITHOUT
        if wanted and wanted not in choices:
            raise ConfigError(
                f"{INSTRUCTIONS_VARIABLE}={wanted}: this processor and installation have {', '.join(choices)}"
            )
        best = wanted or choices[-1]
        return open_library(best), best, None
    except (OSError, AttributeError) as error:  # the latter: of another version
        return None, "none", f"the compiled library cannot be loaded, install h2o_stream again: {error}"


def _checksum(choice: str) -> str:
    """What was written down when the library was built; nothing where it is missing."""
    path = _path(choice).with_suffix(".sum")
    return path.read_text(errors="replace").strip() if path.is_file() else ""


def _path(choice: str) -> Path:
    return Path(os.environ.get(FOLDER_VARIABLE) or Path(__file__).parent) / f"_h2o_{choice}.so"
