"""Which stream a forward belongs to: an attached model has one at a time, and each is told from those before it."""

from __future__ import annotations

from typing import Any

from h2o_stream.cache.full_cache import FullCache
from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.errors import H2OStreamError


class Stream:
    """What ``past_key_values`` is after a forward that began a stream: the attached cache, until the next one begins.

    Looks like the cache in everything else, to `isinstance` too.

    Args:
        cache: of the attached model, at the start of a stream.
    """

    def __init__(self, cache: H2OCache | FullCache) -> None:
        self._cache, self._number = cache, cache.stream_number

    @property
    def cache(self) -> H2OCache | FullCache:
        """The cache.

        Raises:
            H2OStreamError: it holds another stream by now.
        """
        if self._cache.stream_number != self._number:
            raise H2OStreamError(
                "past_key_values is of a stream that a newer one has replaced; an attached model has one stream at a "
                "time, so that guidance and other ways of running two side by side are not served"
            )
        return self._cache

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.cache, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._cache)

    def __len__(self) -> int:
        return len(self.cache)


def cache_of(given: Any) -> Any:
    """The cache that a forward is given, whichever way it is named.

    Raises:
        H2OStreamError: its stream was replaced.
    """
    return given.cache if type(given) is Stream else given
