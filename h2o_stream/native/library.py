"""Loads the compiled library for the best instruction set, or explains why there is none.

One library per instruction set is compiled from `src` (CMakeLists.txt), so that a wheel runs on any processor of its
architecture; an editable install has the one for this processor. A small library says what the processor supports. Each
has a checksum file; a library that is damaged, truncated or from another build is not loaded. One that was compiled
beside another `abi.py` is not used.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from functools import cache
from pathlib import Path

from h2o_stream.errors import ConfigError
from h2o_stream.native import abi

INSTRUCTIONS = ("portable", "avx2", "avxvnni", "avx512", "neon", "i8mm")
"""Of x86-64 and of Arm, each from baseline to best, in the order of src/abi.h."""

INSTRUCTIONS_VARIABLE = "H2O_INSTRUCTIONS"
"""Environment variable that selects an instruction set, for tests and debugging."""

FOLDER_VARIABLE = "H2O_LIBRARY_FOLDER"
"""Environment variable with another folder of libraries, such as those of `make sanitize`."""

CHECK_VARIABLE = "H2O_CHECK_STEPS"
"""Environment variable: every native step is compared with the eager one, layer by layer."""

_PROCESSOR = "cpu"
"""In place of an instruction set: names the library that says what the processor supports."""

_INSTALLED_WITHOUT = (
    "h2o_stream was installed without its compiled library, because there was no C++ compiler or compilation failed "
    "(see pip install -v): install GCC or Clang, then h2o_stream again"
)


def loaded() -> ctypes.CDLL | None:
    """The library for the best supported instruction set, or None; see `why_not`.

    Raises:
        ConfigError: H2O_INSTRUCTIONS names an unavailable instruction set.
    """
    return _load()[0]


def why_not() -> str:
    """Why there is no library and what to do about it, in one line; empty if there is one."""
    return _load()[2]


def name() -> str:
    """Instruction set of the loaded library, one of `INSTRUCTIONS`, or "none"."""
    return _load()[1]


def identity() -> str:
    """Identifies the loaded library: its name and checksum."""
    return f"{name()} {_checksum(name())}" if loaded() else name()


def refusal(library: ctypes.CDLL) -> str:
    """Why the last call in this thread refused what it was given, see `src/check.h`; nothing if memory ran out."""
    library.h2o_refusal.restype = ctypes.c_char_p
    reason: bytes = library.h2o_refusal()
    return reason.decode()


def available() -> list[str]:
    """The instruction sets that are installed and supported by this processor, best last."""
    if not _path(_PROCESSOR).exists():
        return []
    supports = open_library(_PROCESSOR).h2o_cpu_supports
    return [choice for number, choice in enumerate(INSTRUCTIONS) if supports(number) and _path(choice).exists()]


def multiplies_bfloat16() -> bool:
    """Whether the processor has units for bfloat16; False without a library."""
    return loaded() is not None and bool(open_library(_PROCESSOR).h2o_cpu_multiplies_bfloat16())


def open_library(choice: str) -> ctypes.CDLL:
    """Open the library for one of `available`, or the one for the processor's features.

    Raises:
        OSError: the library is damaged or from another build or version, or the system cannot load it.
    """
    path = _path(choice)
    if hashlib.sha256(path.read_bytes()).hexdigest() != _checksum(choice):
        raise OSError(f"{path.name} is damaged or of another build, its checksum differs")
    library = ctypes.CDLL(str(path.resolve()))
    if _compiled_for(library) != _interface():
        raise OSError(f"{path.name} was compiled for another version of h2o_stream")
    return abi.declare(library, abi.PROCESSOR_FUNCTIONS if choice == _PROCESSOR else abi.KERNEL_FUNCTIONS)


@cache
def _load() -> tuple[ctypes.CDLL | None, str, str]:
    """The library, its instruction set, and why there is none."""
    requested = os.environ.get(INSTRUCTIONS_VARIABLE)
    if requested and requested not in INSTRUCTIONS:
        raise ConfigError(f"{INSTRUCTIONS_VARIABLE}={requested}: choose one of {', '.join(INSTRUCTIONS)}")
    try:
        choices = available()
        if not choices:
            return None, "none", _INSTALLED_WITHOUT
        if requested and requested not in choices:
            raise ConfigError(
                f"{INSTRUCTIONS_VARIABLE}={requested}: this processor and installation have {', '.join(choices)}"
            )
        best = requested or choices[-1]
        return open_library(best), best, ""
    except OSError as error:
        return None, "none", f"the compiled library cannot be used, run make setup or install h2o_stream again: {error}"


@cache
def _interface() -> str:
    """Identifies the interface that Python declares."""
    return hashlib.sha256(Path(abi.__file__).read_bytes()).hexdigest()


def _compiled_for(library: ctypes.CDLL) -> str:
    """The interface that a library was compiled for; nothing if it does not say."""
    try:
        library.h2o_abi.restype = ctypes.c_char_p
    except AttributeError:
        return ""
    digest: bytes = library.h2o_abi()
    return digest.decode()


def _checksum(choice: str) -> str:
    """The checksum written at build time, or ""."""
    path = _path(choice).with_suffix(".sum")
    return path.read_text(errors="replace").strip() if path.is_file() else ""


def _path(choice: str) -> Path:
    return Path(os.environ.get(FOLDER_VARIABLE) or Path(__file__).parent) / f"_h2o_{choice}.so"
