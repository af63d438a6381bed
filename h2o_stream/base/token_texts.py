"""The tokenizers library, which raises nothing narrower than `Exception`, and panics, which are not even that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from h2o_stream.errors import H2OStreamError


@lru_cache(1)
def serialized(tokenizer: Tokenizer) -> str:
    """A tokenizer's JSON. It takes tenths of a second, in which no other thread goes on."""
    return tokenizer.to_str()


@contextmanager
def tokenizer_errors(what: str, kind: type[H2OStreamError] = H2OStreamError) -> Iterator[None]:
    """Turn whatever the block raises into an error of this kind in one line, which begins with `what`."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise kind(f"{what}: {reason}") from error


@contextmanager
def without_panics() -> Iterator[None]:
    """Leave out what the library prints about a panic in the block. What is else written to stderr comes after it."""
    try:
        written, original = os.memfd_create("stderr"), os.dup(2)
    except (AttributeError, OSError):  # another system, or no stderr
        yield
        return
    panics = False
    with os.fdopen(written, "r+b", 0) as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        except BaseException as error:
            panics = is_panic(error)
            raise
        finally:
            os.dup2(original, 2)
            file.seek(0)
            with suppress(OSError):
                os.write(original, b"" if panics else file.read())
            os.close(original)


def is_panic(error: BaseException) -> bool:
    """Whether the library has failed in a way that it does not expect."""
    return type(error).__name__ == "PanicException"


class TokenTextStream:
    """The text of tokens that come one by one.

    Args:
        backend: a tokenizer of the library.
        special: whether special tokens are text.
    """

    def __init__(self, backend: Any, special: bool = False) -> None:
        self._backend, self._stream = backend, DecodeStream(skip_special_tokens=not special)

    def push(self, token: int) -> str:
        """The text that a token adds.

        Raises:
            H2OStreamError: the decoder fails.
        """
        with tokenizer_errors(f"the model's tokenizer cannot write token {token}"):
            return self._stream.step(self._backend, token) or ""
