"""Other processes: those that this one has started, and those beside it (``accelerate launch``, ``torchrun``)."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

from h2o_stream.base.options import whole_number
from h2o_stream.errors import ConfigError


def yield_to_others(process: int) -> None:
    """Let a process have the processors only while nobody else wants them.

    Linux weighs processes by niceness within a session only, and lets a nice one finish its slice before others.
    """
    with suppress(OSError):
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.setpriority(os.PRIO_PROCESS, process, 19)


class Processes:
    """This process among those launched together: the `rank` of `count`.

    With `shares_model` they share a model, so each must do all of the work.
    """

    def __init__(self, shares_model: bool = False) -> None:
        self.shares_model = shares_model
        self.count = _variable("WORLD_SIZE", "1")
        self.rank = _variable("RANK", "0") if self.count > 1 else 0

    @property
    def main(self) -> bool:
        """Whether this process prints and writes on behalf of all."""
        return self.rank == 0

    def gather(self, items: dict[int, Any]) -> dict[int, Any]:
        """Merge the items of all processes, in every process; waits for all of them."""
        import torch
        from accelerate import PartialState
        from accelerate.utils import gather_object

        PartialState(cpu=not torch.accelerator.is_available())
        return {number: item for part in gather_object([items]) for number, item in part.items()}


def _variable(name: str, otherwise: str) -> int:
    """A number that torchrun sets; raises ConfigError if something else did."""
    if (number := whole_number(text := os.environ.get(name, otherwise))) is None:
        raise ConfigError(f"the environment variable {name} is {text!r}, which torchrun sets to a number; unset it")
    return number


def broadcast(value: Any) -> Any:
    """Return the first process's value if several share a model, otherwise `value`."""
    distributed = sys.modules.get("torch.distributed")  # nothing is initialized before it is imported
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return value
    values = [value]
    distributed.broadcast_object_list(values)
    return values[0]
