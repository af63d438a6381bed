"""Whether evicted passages are read again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from h2o_stream.errors import ConfigError

RecallMode = Literal["auto", "off"]

CHAT_RECALL: RecallMode = "auto"
"""The mode of recall in ``h2o-chat``. Elsewhere it is that of `RecallConfig`."""


@dataclass(frozen=True)
class RecallConfig:
    """Whether evicted passages are read again before a reply, and how many.

    Args:
        mode: ``auto`` searches for every message; ``off`` never does.
        budget: most tokens to read again in a turn; None is a quarter of the window.
    """

    mode: RecallMode = "off"
    budget: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(RecallMode):
            raise ConfigError(f"recall is {self.mode!r}; --recall takes {' or '.join(get_args(RecallMode))}")
        if self.budget is not None and self.budget < 1:
            raise ConfigError(f"the budget of recall is {self.budget} tokens; it must be at least 1")
