"""Exceptions of h2o_stream. Every message is one line that says what to change."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path


class H2OStreamError(Exception):
    """Base class of all exceptions of this package."""


class ConfigError(H2OStreamError, ValueError):
    """Invalid setting: the message names the value, the limit and the option."""


class UnsupportedModelError(H2OStreamError):
    """The architecture does not work with the requested cache."""


class ModelNotFoundError(H2OStreamError):
    """No model could be loaded by that name."""


class DataError(H2OStreamError):
    """An input file cannot be read: the message names file, line and problem."""


class OutOfMemoryError(H2OStreamError):
    """Not enough memory for the model, the cache or the step."""


def install_command(packages: str) -> str:
    """The command that installs packages for this Python; in a checkout, in the versions that it is tested with."""
    tested, here = Path(__file__).parents[1] / "constraints.txt", Path.cwd()
    python, constraints = (
        shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))
        for path in (Path(sys.executable), tested)
    )
    pip = f"{python} -m pip install" if find_spec("pip") else f"uv pip install --python {python}"  # uv's have none
    return f"{pip} {f'-c {constraints} ' if tested.exists() else ''}{packages}"


def means_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, torch or the operating system reports that memory is exhausted."""
    signs = ("allocate memory", "out of memory", "bad_alloc")
    return isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in signs)


@contextmanager
def file_errors(place: object) -> Iterator[None]:
    """Turn an OSError of the block into a one-line DataError about this place. A broken pipe is passed through."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise DataError(f"{place}: {error.strerror or error}") from error
