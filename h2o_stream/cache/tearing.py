"""Guards what changes a cache: one thread at a time, and a mark while it is written to, which stays if cut off."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from h2o_stream.errors import H2OStreamError

_REARRANGING = ("reorder_cache", "batch_repeat_interleave", "batch_select_indices", "crop")

_CHANGING = ("reset", "state_dict", "load_state_dict", "pin", "unpin", "evict_first", "begin")
"""Methods that change a cache, or read all of it."""

CacheType = TypeVar("CacheType", bound=type)


def marks_tears(cache: CacheType) -> CacheType:
    """Class decorator for transformers' caches: sets `torn` when a layer takes keys, and while rows are rearranged.

    `AttachedForward` clears the mark at the end of a forward, `reset` always. What changes the cache is `exclusive`.
    """
    for name in dir(cache):
        if name.startswith("update"):
            setattr(cache, name, _tearing(getattr(cache, name)))
        elif name in _REARRANGING:
            setattr(cache, name, exclusive(_rearranging(getattr(cache, name))))
        elif name in _CHANGING:
            setattr(cache, name, exclusive(getattr(cache, name)))
    return cache


def _tearing(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def tearing(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.torn = True
        return update(self, *args, **kwargs)

    return tearing


def _rearranging(change: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(change)
    def rearranging(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.torn
        try:
            with self.writing():
                return change(self, *args, **kwargs)
        except H2OStreamError:  # refused: nothing was done
            self.torn = before
            raise

    return rearranging


def exclusive(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a method inside the `one_thread` of its object, and outside of torch's inference mode."""

    @functools.wraps(method)
    def in_one_thread(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.one_thread, torch.inference_mode(False), torch.no_grad():
            return method(self, *args, **kwargs)

    return in_one_thread
