"""The cache of one stream in numpy arrays, for models that run in the native library alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, TypeVar

from numpy.typing import NDArray

from h2o_stream.cache.cache_state import load_state, state_of
from h2o_stream.cache.group_rules import HeadShape
from h2o_stream.cache.layer_plans import sliding_plan
from h2o_stream.cache.one_thread import OneThread
from h2o_stream.cache.shared_state import Revision
from h2o_stream.cache.state import check_saveable, refusing_damage, with_prefix
from h2o_stream.cache.window_rules import WindowRules
from h2o_stream.cache.windows import HeadWindow
from h2o_stream.config import CacheConfig
from h2o_stream.runtime.recurrent import RecurrentArrays
from h2o_stream.runtime.rotations import Rotations
from h2o_stream.runtime.slots import ArrayGroup

_Method = TypeVar("_Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class RuntimeLayer:
    """What the cache must know of a decoder layer; the counterpart of `cache.layer.LayerSpec`.

    Attributes:
        shape: of its heads; None without attention.
        table: rotations of its keys; None without RoPE.
        sliding: window of a layer that slides while others do not. None: it follows the plan.
        windows: its KV heads, grouped by window size.
        states: shapes of its recurrent states, by name.
        hidden_from: in a layer that follows the plan, keys of this age and older are hidden; None for none.
    """

    shape: HeadShape | None
    table: Rotations | None
    sliding: int | None = None
    windows: tuple[HeadWindow, ...] = (HeadWindow(),)
    states: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    hidden_from: int | None = None

    @property
    def attends(self) -> bool:
        """Whether it has attention."""
        return self.shape is not None

    @property
    def evicts(self) -> bool:
        """Whether it follows the plan."""
        return self.attends and self.sliding is None

    @property
    def local_windows(self) -> tuple[HeadWindow, ...]:
        """Its heads are all in this process."""
        return self.windows


def _exclusive(method: _Method) -> _Method:
    """Run a method inside the `one_thread` of its cache."""

    @functools.wraps(method)
    def in_one_thread(self: RuntimeCache, *args: Any, **kwargs: Any) -> Any:
        with self.one_thread:
            return method(self, *args, **kwargs)

    return in_one_thread  # type: ignore[return-value]


class RuntimeCache(WindowRules[RuntimeLayer, ArrayGroup]):
    """A fixed window of slots per decoder layer, of one stream.

    Args:
        config: windows and rules.
        layers: what the cache must know of each decoder layer.
        dtype: of keys and values, ``float32`` or ``bfloat16``.
        max_distance: largest distance the model was trained for, or None.
        model_digest: identifies the model in states, see `cache.identity.model_digest`.

    Attributes:
        one_thread: inside it the cache is changed.
    """

    def __init__(
        self,
        config: CacheConfig,
        layers: Sequence[RuntimeLayer],
        dtype: str,
        max_distance: int | None,
        model_digest: Callable[[], str],
    ) -> None:
        self.one_thread = OneThread()
        self.dtype, self.model_digest, self._arriving = dtype, model_digest, 0
        super().__init__(config, layers, max_distance)

    def make_groups(self, revision: Revision) -> None:
        """See `WindowRules`."""
        self._layers = [tuple(self._groups(number, layer, revision)) for number, layer in enumerate(self.specs)]
        self._states = [RecurrentArrays(layer.states) for layer in self.specs]

    def _groups(self, number: int, layer: RuntimeLayer, revision: Revision) -> Iterator[ArrayGroup]:
        if layer.shape is None:
            return
        plan = self.plan if layer.sliding is None else sliding_plan(self.plan, layer.sliding)
        for window in layer.windows if layer.evicts else (HeadWindow(),):
            yield ArrayGroup(
                plan,
                layer.shape,
                self.dtype,
                number,
                window.heads or None,
                layer.sliding or layer.hidden_from,
                None if plan.positions == "absolute" else layer.table,
                self.tokens,
                revision,
            )

    @property
    def head_groups(self) -> list[ArrayGroup]:
        """See `WindowRules`."""
        return [group for layer in self._layers for group in layer]

    def groups_of(self, layer: int) -> Sequence[ArrayGroup]:
        """See `WindowRules`."""
        return self._layers[layer]

    def recurrent_states(self, layer: int, shapes: Mapping[str, tuple[int, ...]], rows: int) -> list[NDArray[Any]]:
        """See `WindowRules`; there is one row."""
        return self._states[layer].allocated()

    @property
    def nbytes(self) -> int:
        """See `WindowRules`."""
        return sum(group.nbytes for group in self.head_groups) + sum(states.nbytes for states in self._states)

    # forwards

    def allocated_bytes(self) -> int:
        """Bytes that the stream takes at most: what it takes at first, see `cache.windows`."""
        for group in self.head_groups:
            group.allocate(group.schedule.common + group.spare)
        for states in self._states:
            states.allocated()
        return self.nbytes

    def prepare(self, new: int) -> None:
        """Prepare for a forward of so many tokens.

        Raises:
            ConfigError: windows do not fit the first prompt.
        """
        if self._waits_for_prompt:
            self.begin(new)
        self._arriving = new

    def count_forward(self) -> None:
        """See `WindowRules`."""
        self.tokens.advance((self._arriving,), self._arriving)

    # streams

    pin, unpin = _exclusive(WindowRules.pin), _exclusive(WindowRules.unpin)
    evict_first, begin = _exclusive(WindowRules.evict_first), _exclusive(WindowRules.begin)

    @_exclusive
    def reset(self) -> None:
        """Forget the stream and what of it is evicted first, and release the slots; pins stay."""
        with self.writing(anew=True):
            for states in self._states:
                states.reset()
            self.start_stream()

    @_exclusive
    def state_dict(self) -> dict[str, NDArray[Any]]:
        """A copy of everything needed to continue exactly, by name; bfloat16 numbers are uint16.

        Raises:
            H2OStreamError: the cache is empty, or the last forward was cut off halfway.
        """
        check_saveable(self.torn, self.seen_tokens)
        return state_of(self, {f"{n}.{name}": x for n, states in enumerate(self._states) for name, x in states.items()})

    def restored(self, state: Mapping[str, NDArray[Any]]) -> RuntimeCache:
        """A copy that holds what a state has, for looking at it. Raises the same errors as `load_state_dict`."""
        loaded = copy(self)
        with refusing_damage():
            load_state(loaded, state)
            for number, states in enumerate(loaded._states):
                if self.specs[number].states:
                    states.load(with_prefix(state, f"{number}."))
        return loaded

    @_exclusive
    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from a state, in place of what is held: the next token is what it would have been.

        Raises:
            H2OStreamError: the state belongs to another model, dtype or policy, or is damaged. The cache is unchanged.
        """
        self.continue_as(self.restored(state))
