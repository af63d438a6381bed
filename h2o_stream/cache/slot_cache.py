"""The cache of one stream in slots: its state, and the room that native forwards need. Imports no torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, Self, TypeVar

import numpy

from h2o_stream.cache.cache_state import load_state, state_of
from h2o_stream.cache.group_rules import HeadShape
from h2o_stream.cache.layer_rules import LayerRules
from h2o_stream.cache.one_thread import OneThread
from h2o_stream.cache.state import Array, check_saveable, refusing_damage, require_array
from h2o_stream.cache.window_rules import WindowRules
from h2o_stream.config import CacheConfig
from h2o_stream.errors import H2OStreamError

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _exclusive(method: _Method) -> _Method:
    """Run a method inside the `one_thread` of its cache, which then has no guesses in its slots."""

    @functools.wraps(method)
    def in_one_thread(self: SlotCache, *args: Any, **kwargs: Any) -> Any:
        with self.one_thread:
            self.take_back()
            return method(self, *args, **kwargs)

    return in_one_thread  # type: ignore[return-value]


class SlotCache(WindowRules):
    """A fixed window of slots per decoder layer, of one stream; in arrays, unless a subclass has tensors.

    Args:
        specs: what the cache must know of each decoder layer.
        max_distance: largest distance the model was trained for, or None.
        model_digest: identifies the model when a state is saved or loaded, see `cache.identity.model_digest`.

    Attributes:
        one_thread: inside it the cache is changed.
        is_called: whether it may have another digest, in states that were saved via the other loader: without torch, or
            through transformers. May take long.
        take_back: takes guesses out of the slots, see `native.lookahead`.
        engine_note: what runs the steps and why, for people: "native, avx512" or "eager: ...".
        evicts: whether it ever gives up tokens.
        stream_number: grows with every `reset` and every state that is loaded, which distinguishes streams.
    """

    take_back: Callable[[], object] = staticmethod(lambda: None)
    engine_note = ""
    stream_number = 0
    evicts = True

    def __init__(
        self,
        config: CacheConfig,
        specs: Sequence[LayerRules],
        max_distance: int | None,
        model_digest: Callable[[], str] = lambda: "",
    ) -> None:
        self.one_thread = OneThread()  # first, so that copying is refused before anything is copied
        self.model_digest = model_digest
        self._full_at = -1, -1  # revision and columns since which no slot was empty
        super().__init__(config, specs, max_distance)

    def make_layers(
        self, prompt: int, pins: tuple[range, ...] = (), transient: tuple[range, ...] = (), window: int = 0
    ) -> None:
        """Make the plan, by the length of the first prompt if the windows are ratios of it, and empty layers."""
        super().make_layers(prompt, pins, transient, window)
        self._states: list[dict[str, Array]] = [{} for _ in self.specs]

    @property
    def nbytes(self) -> int:
        """See `WindowRules`; and of recurrent states."""
        return super().nbytes + sum(array.nbytes for layer in self._states for array in layer.values())

    def allocated_bytes(self) -> int:
        """Bytes that one stream takes at most: heads that grow take what others give up, so what all take at first."""
        shaped = [(spec, self.groups_of(number)) for number, spec in enumerate(self.specs)]
        slots: int = sum(group.bytes_of(x.shape, x.dtype) for x, groups in shaped if x.shape for group in groups)
        return slots + sum(spec.state_bytes for spec in self.specs)

    # forwards

    def prepare(self, new: int) -> None:
        """Prepare for a forward of so many tokens; raises ConfigError if windows do not fit the first prompt."""
        if self._waits_for_prompt:
            self.begin(new)
        self.tokens.expect((new,), new)

    def recurrent_states(self, layer: int, shapes: Mapping[str, tuple[int, ...]], rows: int) -> list[Any]:
        """The states of a layer that native code updates in place, zero before the first token.

        Returns:
            [B, ...] float32 of each name: tensors or arrays, whichever the cache is made of.

        Raises:
            H2OStreamError: the states that are held have other shapes.
        """
        states = self._states[layer]
        for name, shape in shapes.items():
            if name not in states:
                states[name] = numpy.zeros((rows, *shape), numpy.float32)
        return list(states.values())

    def make_room(self) -> None:
        """Allocate slots for a token of each row, which a native step does not."""
        if not self._stage_ends.isdisjoint(self.tokens.lengths):
            self._fit([length + more for length in self.tokens.lengths for more in (0, 1)])

    def steps_ahead(self, limit: int) -> int:
        """How many tokens, at most so many, native steps can take before slots change otherwise."""
        if len(self.tokens.lengths) != 1:
            return 0
        length = self.tokens.lengths[0]
        ahead: int = min([limit, *(end - length for end in self._stage_ends if end >= length)])
        return ahead

    def make_room_for_prompt(self, shapes: Sequence[HeadShape], dtype: str, lengths: Sequence[int], rows: int) -> None:
        """Allocate slots for a native prompt, which does not. `lengths`: of every row, now and after each chunk."""
        for number, shape in enumerate(shapes):
            for group in self.groups_of(number):
                if group.is_initialized:
                    group.fit(lengths)
                else:
                    group.allocate(shape, dtype, rows, group.slots_needed(lengths))

    def count_forward(self) -> None:
        """Count the tokens of the forward that was prepared: all layers have taken them."""
        self.tokens.advance()

    def count_token(self) -> None:
        """A native step has taken a token of each row: give up the slots that a stage no longer needs."""
        self.count_forward()
        if self._full_at == (self.revision, self.tokens.columns - 1) or self._fill_slots():
            self._full_at = self.revision, self.tokens.columns
        if not self._stage_ends.isdisjoint(length - 1 for length in self.tokens.lengths):
            self._fit(self.tokens.lengths)

    def _fill_slots(self) -> bool:
        """Note that a slot of each group was filled; whether no group has an empty one now."""
        for group in self.head_groups:
            group.filled = min(group.filled + 1, group.num_slots)
        return all(group.filled == group.num_slots for group in self.head_groups)

    def count_prompt(self) -> None:
        """A native forward has taken several tokens of each row, which may have filled all slots."""
        self.count_forward()
        for group in self.head_groups:
            group.filled = group.num_slots
        self._fit(self.tokens.lengths)

    def _fit(self, lengths: Sequence[int]) -> None:
        for group in self.head_groups:
            group.fit(lengths)

    # streams

    pin, unpin = _exclusive(WindowRules.pin), _exclusive(WindowRules.unpin)
    evict_first, begin = _exclusive(WindowRules.evict_first), _exclusive(WindowRules.begin)

    @_exclusive
    def reset(self) -> None:
        """Forget the stream and what of it is evicted first, and release slots and states; pins stay."""
        with self.writing(anew=True):
            self.release_layers()
            self.start_stream()
            self.stream_number += 1

    def release_layers(self) -> None:
        """Release the slots and states of all layers."""
        self._states = [{} for _ in self.specs]
        for group in self.head_groups:
            group.reset()

    @_exclusive
    def state_dict(self) -> dict[str, Any]:
        """A copy of everything needed to continue exactly, by name; bfloat16 numbers are uint16.

        Raises:
            H2OStreamError: the cache is empty, or the last forward was cut off halfway.
        """
        check_saveable(self.torn, self.seen_tokens)
        return state_of(self, {f"{n}.{name}": x for n, layer in enumerate(self.states()) for name, x in layer.items()})

    def states(self) -> list[dict[str, Array]]:
        """The recurrent states of each layer, by name."""
        return self._states

    def restored(self, state: Mapping[str, Array]) -> Self:
        """A copy that holds what a state has, for looking at it; no model is attached to it. See `load_state_dict`."""
        loaded = copy(self)
        with refusing_damage():
            load_state(loaded, state)
            loaded.load_states(state, len(loaded.tokens.lengths))
        return loaded

    def load_states(self, state: Mapping[str, Array], rows: int) -> None:
        """Take the states of all layers from a state of so many rows; raises H2OStreamError if they do not fit."""
        if rows != 1:
            raise H2OStreamError(f"the state does not fit: it has {rows} streams, and one is served")
        self._states = [
            {name: _in_float32(state, f"{number}.{name}", shape) for name, shape in spec.state_shapes.items()}
            for number, spec in enumerate(self.specs)
        ]

    @_exclusive
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, in place of what is held: the next token is what it would have been.

        Raises:
            H2OStreamError: the state belongs to another model, dtype or policy, or is damaged. The cache is unchanged.
        """
        restored = self.restored(state)
        self.__dict__.update(restored.__dict__, torn=False, stream_number=self.stream_number + 1)
        self._revision.bump()


def _in_float32(state: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    """A copy of the state [1, ...] of a layer; uint16 numbers are bfloat16."""
    array = require_array(state, name)
    if array.shape != (1, *shape) or array.dtype not in (numpy.float32, numpy.uint16):
        raise H2OStreamError(f"the state does not fit: {name} is {array.dtype} {array.shape}, {(1, *shape)} is needed")
    if array.dtype == numpy.uint16:
        return (array.astype(numpy.uint32) << 16).view(numpy.float32)
    return array.copy()
