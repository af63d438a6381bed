"""One thread at a time: an attached model has one stream, and native code writes its slots without locks of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any, NoReturn

from h2o_stream.errors import H2OStreamError


class OneThread:
    """A context that one thread at a time can be in, as often as it likes. It does not wait: another is refused.

    What holds one can be neither deep-copied nor pickled.
    """

    def __init__(self) -> None:
        self._lock = RLock()

    def __enter__(self) -> None:
        """Raise H2OStreamError if another thread is inside."""
        if not self._lock.acquire(blocking=False):
            raise H2OStreamError(
                "another thread is using this attached model, which has one stream; let one thread at a time use it, "
                "or attach a copy of the model for each"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise H2OStreamError."""
        raise H2OStreamError("an attached model can be neither copied nor pickled, nor can its cache; leave the block")


class Tearable:
    """A cache that is torn while it is written to, and stays so if that is cut off.

    Attributes:
        torn: a forward or a reset was cut off halfway; only `reset` and loading a state help.
    """

    torn = False

    def check_whole(self) -> None:
        """Raise H2OStreamError if it is torn."""
        if self.torn:
            raise H2OStreamError("the last forward was cut off halfway; reset() to start a new stream")

    @contextmanager
    def writing(self, anew: bool = False) -> Iterator[None]:
        """Write to the cache inside the block. Afterwards it is whole if the stream begins `anew`; else as before."""
        before, self.torn = self.torn, True
        yield
        self.torn = before and not anew
