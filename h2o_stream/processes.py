"""The processes of ``accelerate launch`` or ``torchrun`` that share a piece of work; usually there is only this one."""

from __future__ import annotations

import os
from typing import Any


class Processes:
    """This process among those that were launched together.

    Attributes:
        count: how many there are.
        rank: the number of this one, from 0.
        together: whether they share a model, so that each has to do all there is to do.
    """

    def __init__(self, together: bool = False) -> None:
        self.together = together
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0")) if self.count > 1 else 0

    @property
    def main(self) -> bool:
        """Whether this one speaks and writes for all."""
        return self.rank == 0

    def gather(self, own: dict[int, Any]) -> dict[int, Any]:
        """Everything that all processes have, in each of them; waits for the last one."""
        import torch
        from accelerate import PartialState
        from accelerate.utils import gather_object

        PartialState(cpu=not torch.accelerator.is_available())
        return {number: item for part in gather_object([own]) for number, item in part.items()}


def broadcast(value: Any) -> Any:
    """What the first of the processes that share a model says, where there are several; `value` where there are not."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return value
    said = [value]
    distributed.broadcast_object_list(said)
    return said[0]
