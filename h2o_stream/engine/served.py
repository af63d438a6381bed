"""What the engine needs of a model with a cache; a transformers model or one of the runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy
from numpy.typing import NDArray

from h2o_stream.base.progress import ProgressCallback
from h2o_stream.config import CacheConfig, EngineChoice
from h2o_stream.engine.logits import Logits
from h2o_stream.native.stepper import PromptPlan

if TYPE_CHECKING:
    from h2o_stream.cache.full_cache import FullCache
    from h2o_stream.cache.h2o_cache import H2OCache
    from h2o_stream.cache.slot_cache import SlotCache
    from h2o_stream.runtime.first_layers import FirstLayers

StreamCache: TypeAlias = "H2OCache | FullCache | SlotCache"


class Served(Protocol):
    """A model that is served with a cache, until it is closed.

    Attributes:
        context: positions the model was trained for, or None when its config names no limit.
        learned_positions: number of positions with a learned embedding, or None.
        prefill_step: prompt tokens per forward, see `config.prefill_step`.
        generation: how it is recommended to sample, and its `eos_token_id`; as transformers' `GenerationConfig`.
        dtype: dtype of its activations, such as ``bfloat16``.
        device: device of its inputs, such as ``cpu``.
    """

    context: int | None
    learned_positions: int | None
    prefill_step: int
    generation: Any
    dtype: str
    device: str
    vocabulary: int

    @property
    def pass_s(self) -> float | None:
        """Seconds of the last pass that is over, where `step` does not wait for it; None where it does."""

    @property
    def cache(self) -> StreamCache:
        """Holds one stream."""

    def forward(self, tokens: Sequence[int]) -> NDArray[numpy.float32]:
        """Feed tokens to the stream.

        Returns:
            [V] float32, logits after the last one.

        Raises:
            MemoryError, RuntimeError: memory ran out, see `means_out_of_memory`.
        """

    def step(self, token: int, guess: Callable[[], Sequence[int]]) -> tuple[Logits, int]:
        """Feed a token to the stream, as `forward` does, and with it perhaps some of what `guess` says may follow.

        Returns:
            Logits, valid until the next step, and how many tokens went through the model: none if it was guessed.
        """

    def take_back(self) -> None:
        """Take guesses out of the cache that were not said."""

    def losses(self, tokens: Sequence[int], expected: Sequence[int]) -> NDArray[numpy.float32]:
        """Feed tokens to the stream, as `forward` does.

        Returns:
            [n] float32, in nats: minus the log-likelihood of each expected token after the token at its place.
        """

    def read_embeddings(self, ids: NDArray[numpy.int64]) -> NDArray[numpy.float32]:
        """Embeddings of tokens [n], [n, hidden] float32."""

    def first_layers(self, count: int | None = None) -> FirstLayers | None:
        """The first layers, or all, for texts that stand alone; None where they are not available."""

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """A copy of the cache's state, see `H2OCache.state_dict`; bfloat16 numbers are uint16."""

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Replace the stream, see `H2OCache.load_state_dict`."""

    def close(self) -> None:
        """Restore the model."""


class BatchedSteps(Protocol):
    """Steps several streams of a model together; see `native.batch.BatchStepper`."""

    def step(self, steppers: Sequence[Any]) -> Iterable[Logits]:
        """Take a token of each stream through the model. Returns logits after each, valid until the next step."""

    def read(
        self, steppers: Sequence[Any], tokens: Sequence[Sequence[int]], plans: Sequence[PromptPlan]
    ) -> Iterator[Iterable[Logits] | None]:
        """Take several tokens of each stream through the model in parts, between which others may be stepped.

        Yields None while there is more to do, and logits after the last token of each at last.
        """

    def release(self) -> None:
        """Free what was allocated for steps."""


@runtime_checkable
class ManyStreams(Protocol):
    """A model that serves several streams at the same time."""

    def serve(self, config: CacheConfig) -> Served:
        """Serve the model with a cache; raises ConfigError if it does not fit the model."""

    def make_batch(self) -> BatchedSteps:
        """What steps several of its streams together."""


def serve(model: Any, config: CacheConfig | None, engine: EngineChoice, progress: ProgressCallback) -> Served:
    """Serve a model with a cache. Arguments and errors as for `attach`, which serves models of transformers."""
    if isinstance(model, ManyStreams):
        return model.serve(config or CacheConfig())
    from h2o_stream.engine.attached import AttachedModel

    return AttachedModel(model, config, engine, progress)
