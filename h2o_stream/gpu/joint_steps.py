"""One token of each of several streams: a launch for all whose head groups have the same rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from h2o_stream.cache.attention import LogitTransform
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.gpu.groups import slots_of
from h2o_stream.gpu.kernels import GpuKernels, NewTokens, Norms
from h2o_stream.gpu.streams import ALIGNED, ARRAYS, NUMBERS

Tables: TypeAlias = dict[tuple[int, ...], Tensor]
"""What launches have read of streams, by its numbers: captured steps read it again."""


def step_streams(
    kernels: GpuKernels,
    streams: Sequence[tuple[HeadGroup, tuple[int, ...]]],
    new: NewTokens,
    transform: LogitTransform,
    norms: Norms,
    tables: Tables,
) -> None:
    """Take a token of each stream, a row of `new`: its head group, and the lengths of its rows, of which there is one.

    The rest is as for `GpuKernels.step`; `tables` is added to.
    """
    alike: dict[Any, list[int]] = {}
    for row, (group, lengths) in enumerate(streams):
        rules = kernels.rules_of(group, new, transform)
        shared = (number for name, number in rules.numbers.items() if name not in NUMBERS)
        key = *shared, *rules.constants.values(), id(group.table), kernels.is_empty_first(group, lengths)
        alike.setdefault(key, []).append(row)
    for rows in alike.values():
        entries: list[int] = []
        for row in rows:
            rules = kernels.rules_of(streams[row][0], new, transform)
            arrays, numbers = slots_of(streams[row][0]) | rules.tensors, rules.numbers | {"token": row}
            addresses = [0 if (array := arrays[name]) is None else array.data_ptr() for name in ARRAYS]
            assert not any(address % ALIGNED for address in addresses)
            entries += addresses + [numbers[name] for name in NUMBERS]
        group, lengths = streams[rows[0]]
        table = tables.get((*entries,))
        if table is None:
            table = tables[*entries,] = torch.tensor(entries, device=group.device).view(len(rows), -1)
        kernels.step(group, new, transform, lengths, norms, table)
