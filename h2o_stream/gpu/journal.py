"""What tokens of a pass overwrite in the slots of a head group, so that those which are not said can be taken back."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.gpu.groups import slots_of
from h2o_stream.gpu.journal_kernel import journal_kernel

_COLUMNS = 1024


class Journal:
    """The slots of the head groups of one stream as they were before some tokens.

    Args:
        groups: their slots, of one row, stay where they are.
        count: tokens of a pass after its first one, which is always said.
    """

    def __init__(self, groups: list[HeadGroup], count: int) -> None:
        self._groups = {id(group): (group, self._entries(group, count)) for group in groups}

    def note(self, group: HeadGroup, number: int) -> None:
        """Note a group before the token that comes so many after the first one."""
        _launch(group, self._groups[id(group)][1][number - 1], back=False)

    def take_back(self, count: int, kept: int) -> None:
        """Of `count` tokens of a pass only the first ones stay."""
        for group, entries in self._groups.values():
            for number in range(count - 1, kept - 1, -1):
                _launch(group, entries[number - 1], back=True)

    @staticmethod
    def _entries(group: HeadGroup, count: int) -> list[dict[str, Tensor | None]]:
        rows = "keys", "values", "value_codes", "value_grid"
        alike = {name: x[:, :, 0] if name in rows and x is not None else x for name, x in slots_of(group).items()}
        with torch.inference_mode(False):
            return [
                {f"old_{name}": None if x is None else torch.empty_like(x) for name, x in alike.items()}
                for _ in range(count)
            ]


def _launch(group: HeadGroup, entry: dict[str, Tensor | None], back: bool) -> None:
    size, width, slots, plan = group.store.keys.shape[-1], group.store.values.shape[-1], group.store.slots, group.plan
    journal_kernel[(group.index.shape[1],)](
        **slots_of(group), **entry, slots=slots, D=size, DV=width, DP=triton.next_power_of_2(size),
        VP=triton.next_power_of_2(width), BS=min(triton.next_power_of_2(slots), _COLUMNS), BITS=plan.kv_bits,
        SINKS=plan.exact_sinks, RING=max(plan.residual, 1), BACK=back,
    )  # fmt: skip
