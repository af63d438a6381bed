"""What tokens of a pass overwrite in the slots of a head group, so that those which are not said can be taken back."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.gpu.decode import journal_kernel

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
    def _entries(group: HeadGroup, count: int) -> list[list[Tensor | None]]:
        keys, values, *rest = _slots(group)
        alike = [keys[:, :, 0], values[:, :, 0], *rest]
        with torch.inference_mode(False):
            return [[None if x is None else torch.empty_like(x) for x in alike] for _ in range(count)]


def _slots(group: HeadGroup) -> list[Any]:
    longs = group.long_term_scores if group.policy.long_term else None
    return [group.store.keys, group.store.values, group.scores, longs, group.index, group.rank, group.free, group.seen]


def _launch(group: HeadGroup, entry: list[Tensor | None], back: bool) -> None:
    keys, values, *rest = _slots(group)
    (_, heads, slots, size), width = keys.shape, values.shape[-1]
    journal_kernel[(heads,)](
        keys, values, *rest, *entry, slots, D=size, DV=width, DP=triton.next_power_of_2(size),
        VP=triton.next_power_of_2(width), BS=min(triton.next_power_of_2(slots), _COLUMNS), BACK=back,
    )  # fmt: skip
