"""What the kernels need to know of a head group beside its tensors, and what keeps them from one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.slots import ENCODED
from h2o_stream.cache.store import wide
from h2o_stream.native.slots import POLICIES

MAX_CHUNK = 64
"""Tokens between two evictions of a prompt: scores decay by powers of up to so many, see `policies.accumulated`."""

_MAX_SIZE = 256
"""Numbers of a head that fit into registers."""

_MAX_WINDOW = 1 << 15
"""Slots whose numbers fit beside others into 32 bits."""


def why_not(group: HeadGroup) -> str:
    """Why the kernels cannot attend and evict as this group does, or nothing."""
    if group.rule not in POLICIES:
        return f"policy {group.rule.rpartition(':')[2]} is written in Python"
    shape = group.shape
    if shape is not None and max(shape.key_size, shape.value_size) > _MAX_SIZE:
        return f"heads are larger than {_MAX_SIZE}"
    return ""


def walks(group: HeadGroup) -> bool:
    """Whether a prompt of any length can be taken at once: the slots that it ends with hold all of its chunks."""
    fits = 0 < group.plan.chunk <= MAX_CHUNK and group.schedule.max_held < _MAX_WINDOW
    return fits and not (group.schedule.fixed and group.schedule.stages)


def limits_of(group: HeadGroup, rows: Sequence[tuple[int, int]], new: int) -> Tensor | None:
    """[B, chunks] int32, tokens held after each chunk of rows with so many earlier and new ones; None for all slots."""
    schedule, chunk = group.schedule, group.plan.chunk
    if group.store.slots == schedule.window + group.spare and (schedule.fixed or min(rows)[0] >= schedule.settled):
        return None
    ends = range(chunk, new + chunk, chunk)
    held = [[schedule.held(before + min(end, count)) for end in ends] for before, count in rows]
    pinned = torch.tensor(held, dtype=torch.int32, pin_memory=group.device.type == "cuda")
    return pinned.to(group.device, non_blocking=True)  # without waiting for other blocks of the prompt


def slots_of(group: HeadGroup) -> dict[str, Tensor | None]:
    """What is written, by argument: kept by nobody, since the slots of an ended stream would stay."""
    codes = {name: getattr(group.store, name, None) for name in (*ENCODED, "key_range")}
    longs = group.long_term_scores if group.policy.long_term else None
    names = "scores", "index", "rank", "free", "seen"
    books = {name: getattr(group, name) for name in names} | {"longs": longs}
    return {"keys": group.store.keys, "values": group.store.values} | codes | books


def decoded(group: HeadGroup) -> dict[str, Tensor]:
    """All slots but one of a group whose keys and values are in few bits, those in float32, as `prompt_kernel` takes
    them: the first one is free.
    """
    order = group.index.sort(-1).indices[..., 1:]
    keys, values = (x.gather(2, wide(order, x)) for x in group.store.read_exactly(group.store.slots))
    made = {name: getattr(group, name).gather(2, order) for name in ("scores", "index", "rank")}
    if group.policy.long_term:
        made["longs"] = group.long_term_scores.gather(2, order)
    return made | {"keys": keys, "values": values, "free": torch.zeros_like(group.free)}


def encode(group: HeadGroup, slots: Mapping[str, Tensor], seen: Tensor) -> None:
    """Put what `decoded` made back into few bits; rows [B, 1, 1] have seen so many tokens."""
    order = slots["index"].sort(-1).indices[..., 1:]
    keys, values = (slots[name].gather(2, wide(order, slots[name])) for name in ("keys", "values"))
    kept = {name: slots[name].gather(2, order) for name in ("scores", "index", "rank")}
    if group.policy.long_term:
        kept["long_term_scores"] = slots["longs"].gather(2, order)
    slot, free = group.store.place_prefill(keys, values, kept["index"], seen)
    group.fill(slot, kept)
    group.free.fill_(free)


def num_evictions(group: HeadGroup, lengths: tuple[int, ...]) -> set[int]:
    """How many tokens the next one evicts, in the rows."""
    return {group.schedule.num_evictions(length) for length in lengths}


def bounds_of(ranges: tuple[range, ...], device: torch.device) -> Tensor | None:
    """[n, 2] int64, where each range starts and stops; None without any."""
    if not ranges:
        return None
    return torch.tensor([(tokens.start, tokens.stop) for tokens in ranges], dtype=torch.int64, device=device)
