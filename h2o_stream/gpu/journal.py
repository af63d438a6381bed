"""What tokens of a pass overwrite in slots and states, so that those which are not said can be taken back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
from torch import Tensor

from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.gpu.groups import slots_of
from h2o_stream.gpu.journal_kernel import journal_kernel
from h2o_stream.gpu.mixers import mix
from h2o_stream.native.mixers import Mixer

_COLUMNS = 1024


class MixerJournal:
    """The states of a layer before a pass, and what its tokens brought, from which those that stay are mixed again.

    Args:
        number: of the layer.
        mixer: its recurrent mixer.
        states: stay where they are.
        count: tokens of a pass, at most.
        dtype: of what is projected.
    """

    @torch.inference_mode(False)
    def __init__(self, number: int, mixer: Mixer, states: Mapping[str, Tensor], count: int, dtype: torch.dtype) -> None:
        self.number, self._mixer, self._states = number, mixer, states
        self._before = {name: torch.empty_like(state) for name, state in states.items()}
        rows, device = sum(matrix.rows for matrix in mixer.projections), next(iter(states.values())).device
        self._projected = torch.empty(count, rows, dtype=dtype, device=device)

    def note(self, projected: Tensor) -> None:
        """Note the states, and what the tokens of a pass bring."""
        self._projected[: len(projected)].copy_(projected)
        for name, state in self._states.items():
            self._before[name].copy_(state)

    def take_back(self, kept: int) -> None:
        """Only the first tokens stay."""
        for name, state in self._states.items():
            state.copy_(self._before[name])
        out = self._projected.new_empty(kept, self._mixer.out.columns)
        mix(self._mixer, self._projected[:kept], self._states, out, 1, in_prompt=False)


class Journal:
    """The slots of the head groups of one stream, and its states, as they were before some tokens.

    Args:
        groups: their slots, of one row, stay where they are.
        count: tokens of a pass after its first one, which is always said.
        mixers: of the recurrent layers.
    """

    def __init__(self, groups: Sequence[HeadGroup], count: int, mixers: Sequence[MixerJournal] = ()) -> None:
        self._mixers = {mixer.number: mixer for mixer in mixers}
        self._groups = {id(group): (group, self._entries(group, count)) for group in groups}

    def note(self, group: HeadGroup, number: int) -> None:
        """Note a group before the token that comes so many after the first one."""
        _launch(group, self._groups[id(group)][1][number - 1], back=False)

    def note_states(self, number: int, projected: Tensor) -> None:
        """Note the states of a layer before the tokens of a pass, and what these bring."""
        self._mixers[number].note(projected)

    def take_back(self, count: int, kept: int) -> None:
        """Of `count` tokens of a pass only the first ones stay."""
        for mixer in self._mixers.values():
            mixer.take_back(kept)
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
