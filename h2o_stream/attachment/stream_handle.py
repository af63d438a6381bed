"""Which stream a forward belongs to: an attached model has one at a time, and older ones are recognized."""

from __future__ import annotations

from typing import Any

from h2o_stream.cache.full_cache import FullCache
from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.errors import H2OStreamError


class StreamHandle:
    """The ``past_key_values`` of a forward that began a stream: stands for the cache until the next stream begins.

    Otherwise it looks like the cache, to `isinstance` too.
    """

    def __init__(self, cache: H2OCache | FullCache) -> None:
        self._cache, self._number = cache, cache.stream_number

    @property
    def cache(self) -> H2OCache | FullCache:
        """The cache; raises H2OStreamError if it holds a newer stream."""
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


def cache_of(past_key_values: Any) -> Any:
    """The cache itself, if it comes as a `StreamHandle`; raises H2OStreamError if a newer stream has replaced it."""
    return past_key_values.cache if type(past_key_values) is StreamHandle else past_key_values
