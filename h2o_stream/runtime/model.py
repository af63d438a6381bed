"""A model that runs in the native library alone: described from a file, served without torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from ctypes import CDLL
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy
from numpy.typing import NDArray

from h2o_stream.base.memory import free_bytes
from h2o_stream.cache.layer_rules import LayerRules
from h2o_stream.cache.sizing import sized
from h2o_stream.cache.slot_cache import SlotCache
from h2o_stream.cache.windows import HeadWindow
from h2o_stream.config import DEFAULT_WINDOW, CacheConfig, CachePlan, prefill_step
from h2o_stream.errors import H2OStreamError
from h2o_stream.native import library, packing
from h2o_stream.native.batch import BatchStepper, rules
from h2o_stream.native.description import DENSE, Description
from h2o_stream.native.lookahead import Lookahead
from h2o_stream.native.native_model import NativeModel
from h2o_stream.native.slots import POLICIES
from h2o_stream.native.stepper import Stepper
from h2o_stream.runtime.first_layers import FirstLayers, first_layers
from h2o_stream.runtime.heads import NeverChanges, layer_rules, num_weights
from h2o_stream.runtime.rotations import Floats
from h2o_stream.runtime.weights import as_floats


@dataclass(frozen=True, eq=False)
class RuntimeModel:
    """The weights of a model and what is known about it; caches are made for it one after another.

    Attributes:
        windows: KV heads grouped by window size, for each layer, where budgets are measured; nothing if unknown.
        is_called: whether it may have another digest, see `cache.slot_cache.SlotCache`.
        context: positions it was trained for.
        max_distance: largest distance it was trained for.
        sliding: the windows of layers that do not follow the plan of a cache, None for others.
        generation: how it is recommended to sample, and the tokens that end a turn; as `GenerationConfig`.
        refused_positions: where RoPE cannot see the kept tokens.
    """

    description: Description
    windows: Sequence[tuple[HeadWindow, ...]]
    digest: str
    is_called: Callable[[str], bool]
    context: int
    max_distance: int
    sliding: Sequence[int | None]
    generation: Any
    refused_positions: Collection[str] = ()

    def serve(self, config: CacheConfig) -> ServedRuntime:
        """Serve the model with a cache; raises ConfigError if its windows do not fit the model."""
        every = zip(self._rules, self.sliding, self._windows(config), strict=True)
        layers = [replace(rules, sliding=sliding, windows=windows) for rules, sliding, windows in every]
        config = sized(
            config,
            self.max_distance,
            lambda sized: self._cache(sized, layers).allocated_bytes(),
            lambda: self.description.nbytes,
            [layer.shape for layer in layers],
        )
        return ServedRuntime(self, self._cache(config, layers))

    def make_batch(self) -> BatchStepper:
        """What steps several streams together."""
        return BatchStepper(_library(), self.description)

    @property
    def free_bytes(self) -> int:
        """Memory that caches can still take."""
        return free_bytes()

    def read_embeddings(self, ids: NDArray[numpy.int64]) -> Floats:
        """Embeddings of tokens [n], [n, hidden] float32."""
        matrix, ids = self.description.embedding, numpy.ascontiguousarray(ids, numpy.int64)
        if matrix.kind in DENSE:
            return as_floats(matrix.weights[ids], "embedding")
        rows: Floats = packing.gather(matrix.weights, matrix.kind, matrix.rows, matrix.columns, ids, "float32")
        return rows

    @cached_property
    def native(self) -> NativeModel:
        """The description as structures, to be copied for each cache."""
        return NativeModel(self.description)

    @cached_property
    def _rules(self) -> list[LayerRules]:
        """As `layer_rules`: caches share tables of rotations."""
        return layer_rules(self.description)

    def _windows(self, config: CacheConfig) -> Sequence[tuple[HeadWindow, ...]]:
        return (
            self.windows
            if measures_heads(config, self.max_distance)
            else [(HeadWindow(),)] * len(self.description.layers)
        )

    def _cache(self, config: CacheConfig, layers: Sequence[LayerRules]) -> SlotCache:
        cache = SlotCache(config, layers, self.max_distance, lambda: self.digest)
        cache.is_called = self.is_called
        return cache


def measures_heads(config: CacheConfig, max_distance: int | None) -> bool:
    """Whether the windows of heads are measured for a cache; the rest as in `RuntimeModel`."""
    return plan_of(config, max_distance).budgets == "measured"


def why_not_served(config: CacheConfig, max_distance: int | None, refused_positions: Collection[str]) -> str:
    """Why a model needs torch to be served with a cache, or nothing; the rest as in `RuntimeModel`."""
    if config.policy == "full":
        return "policy full keeps transformers' own cache"
    if config.device != "auto":
        return f"the cache is on {config.device}"
    plan = plan_of(config, max_distance)
    if plan.positions in refused_positions:
        return f"{plan.positions} positions are for torch to refuse or to compute"
    if plan.rule not in POLICIES:
        return f"policy {config.policy} is written in Python"
    return ""


def plan_of(config: CacheConfig, max_distance: int | None) -> CachePlan:
    """The plan of a cache, if it depends on the first prompt for one of `DEFAULT_WINDOW` tokens."""
    return config.for_prompt(DEFAULT_WINDOW).plan(max_distance)


def _library() -> CDLL:
    native = library.loaded()
    assert native is not None, "it has packed the weights"
    return native


class ServedRuntime:
    """A model of the runtime with a cache; see `engine.served.Served`.

    Attributes:
        stepper: steps the stream, alone or, by `native.batch`, with others.
        lookahead: takes guesses along.
    """

    context: int | None
    learned_positions: int | None = None
    device = "cpu"
    pass_s: float | None = None
    stepper: Stepper

    def __init__(self, model: RuntimeModel, cache: SlotCache) -> None:
        description = model.description
        self.cache, self.context, self.generation = cache, model.context, model.generation
        self.dtype, self._model, self.vocabulary = description.dtype, model, description.output.rows
        self.prefill_step = prefill_step(num_weights(description))
        self.stepper = Stepper(_library(), model.native.copied(), NeverChanges(), cache, dense_prompts=True)
        self.lookahead = Lookahead(self.stepper)
        cache.engine_note = f"native, {library.name()}, without torch"

    @property
    def rules(self) -> bytes:
        """Streams with the same can be stepped together, and read together if their prompts have begun."""
        return rules(self.stepper)

    def forward(self, tokens: Sequence[int]) -> Floats:
        """Feed tokens to the stream."""
        last: Floats = self._logits(tokens, 1)[-1]
        return last

    def step(self, token: int, guess: Callable[[], Sequence[int]]) -> tuple[Floats, int]:
        """Feed a token to the stream, and perhaps guesses; see `Served`."""
        cache = self.cache
        with cache.one_thread:
            if (logits := self.lookahead.next(token)) is not None:
                return logits, 0
            guesses = () if cache.torn else guess()
            if guesses and (logits := self.lookahead.take(token, guesses)) is not None:
                return logits, 1 + len(self.lookahead.tokens)
            return self._logits([token], 1, self.lookahead.logits[:1, None])[-1], 1

    def take_back(self) -> None:
        """Take guesses out of the cache that were not said."""
        self.lookahead.take_back()

    def losses(self, tokens: Sequence[int], expected: Sequence[int]) -> Floats:
        """Feed tokens to the stream, as `forward` does."""
        logits = self._logits(tokens, len(tokens))
        ours = numpy.take_along_axis(logits, numpy.array(expected)[:, None], 1)[:, 0]
        largest = logits.max(1, keepdims=True)
        logits -= largest
        losses: Floats = numpy.log(numpy.exp(logits, out=logits).sum(1)) + largest[:, 0] - ours
        return losses

    def _logits(self, tokens: Sequence[int], keep: int, out: Floats | None = None) -> Floats:
        """Feed tokens. Returns the logits after the last `keep` of them, [keep, V]; of one token perhaps in `out`."""
        cache = self.cache
        with cache.one_thread:
            cache.check_whole()
            begun = bool(cache.seen_tokens)
            try:
                return self._run(numpy.array([tokens], numpy.int64), keep, out)
            except BaseException:
                if not begun:
                    cache.reset()
                raise

    def _run(self, tokens: NDArray[numpy.int64], keep: int, out: Floats | None) -> Floats:
        """[keep, V] logits after the last of tokens [1, Q]."""
        self.cache.prepare(tokens.shape[1])
        is_step = tokens.shape[1] == 1 and bool(self.cache.tokens.lengths)
        logits = self.stepper.step(tokens[:, 0], out=out) if is_step else self.stepper.prompt(tokens, keep)
        if logits is None:
            raise H2OStreamError(f"these tokens cannot be fed: {self.stepper.why_not or 'the model has no such token'}")
        kept: Floats = logits[0]
        return kept

    def read_embeddings(self, ids: NDArray[numpy.int64]) -> Floats:
        """Embeddings of tokens [n], [n, hidden] float32."""
        return self._model.read_embeddings(ids)

    def first_layers(self, count: int | None = None) -> FirstLayers | None:
        """The first layers, or all, for texts that stand alone; None where they are not available."""
        return first_layers(self._model.description, count)

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """A copy of the cache's state, see `H2OCache.state_dict`; bfloat16 numbers are uint16."""
        return self.cache.state_dict()

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Replace the stream, see `H2OCache.load_state_dict`."""
        self.cache.load_state_dict(state)

    def close(self) -> None:
        """Restore the model."""
        self.cache.reset()
