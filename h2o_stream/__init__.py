"""h2o_stream: endless conversations with a language model, in a key/value cache of constant size.

The public names are imported on first use, so that importing the package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from h2o_stream.base.startup import let_idle_threads_sleep
from h2o_stream.config import CacheConfig, RecallConfig, SamplingConfig
from h2o_stream.errors import ConfigError, H2OStreamError, ModelNotFoundError, UnsupportedModelError

if TYPE_CHECKING:
    from h2o_stream.attachment.attach import attach
    from h2o_stream.cache.full_cache import FullCache
    from h2o_stream.cache.h2o_cache import H2OCache
    from h2o_stream.engine.engine import Engine
    from h2o_stream.session.conversation import Conversation

    __version__: str

__all__ = [
    "CacheConfig",
    "ConfigError",
    "Conversation",
    "Engine",
    "FullCache",
    "H2OCache",
    "H2OStreamError",
    "ModelNotFoundError",
    "RecallConfig",
    "SamplingConfig",
    "UnsupportedModelError",
    "attach",
]

_LAZY = {
    "attach": "h2o_stream.attachment.attach",
    "H2OCache": "h2o_stream.cache.h2o_cache",
    "FullCache": "h2o_stream.cache.full_cache",
    "Engine": "h2o_stream.engine.engine",
    "Conversation": "h2o_stream.session.conversation",
}


let_idle_threads_sleep()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("h2o_stream.base.resources").version_of("h2o-stream")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
