"""The exceptions a user of h2o_stream can meet. Each message is one line that says what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class H2OStreamError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(H2OStreamError, ValueError):
    """A setting is wrong: the message names the value, the limit and the option."""


class UnsupportedModelError(H2OStreamError):
    """The architecture cannot be served with the cache that was asked for."""


class ModelNotFoundError(H2OStreamError):
    """No model could be loaded under the given name."""


class DataError(H2OStreamError):
    """An input file cannot be read: the message names file, line and what is wrong."""


class OutOfMemoryError(H2OStreamError):
    """The machine has no memory left for the model, the cache or the step."""


def means_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, torch or the operating system says that memory has ended."""
    signs = ("allocate memory", "out of memory", "bad_alloc")
    return isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in signs)


@contextmanager
def file_errors(place: object) -> Iterator[None]:
    """Turn an OSError of the block into a one-line DataError about this place. A broken pipe is passed through.

    Raises:
        DataError: a file could not be read or written.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise DataError(f"{place}: {error.strerror or error}") from error
