"""Verifies that a model computes the same logits through the cache as by itself.

A few random tokens go through the model's own forward, and through a cache that holds all of them: a prompt, then
single tokens. Anything a model does with its queries, keys and values that the cache does not reproduce shows in the
logits. Native code is verified with the same tokens, against the same logits.

Logits in bfloat16 may differ by rounding alone as much as by a mistake: rounding grows with outliers and massive
activations. The same weights in float32 tell them apart. Native code therefore computes with keys, values and states in
float32, too, and that decides, as it does where logits of eager code differ.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from h2o_stream.attachment.attention_interface import attention_names, using_attention, using_h2o_attention
from h2o_stream.attachment.model_facts import context_of, input_device, learned_positions, max_distance_of
from h2o_stream.attachment.probe import failing_as
from h2o_stream.attachment.trial import logits_of, undisturbed, usual_tokens
from h2o_stream.base.measurements import LONG_S, read_measurement, save_measurement
from h2o_stream.base.resources import version_of
from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.cache.identity import has_additions, model_digest
from h2o_stream.cache.kernels import Kernels
from h2o_stream.cache.layer import LayerSpec
from h2o_stream.cache.recurrent import as_class_for
from h2o_stream.cache.rope import PositionsError
from h2o_stream.cache.rounding import PRECISE, in_dtype, rounded_embedding
from h2o_stream.cache.tolerance import EXACT, ROUNDED, ROUNDINGS, Rounding, error_of, last_error, rounding_of
from h2o_stream.config import CacheConfig, CacheDevice, Positions
from h2o_stream.errors import UnsupportedModelError

PROMPT, STEPS, CHUNK = 24, 3, 16
"""Tokens of a prompt longer than a chunk, tokens that follow one by one, and tokens per chunk."""


_SAMPLES = 4
"""Ways in which an embedding is rounded, if need be: few change the expert of a token whose router nearly ties."""

_PRECISE = EXACT._replace(tolerance=1e-3)
"""What is rounding in float32 for models in fewer bits: packed weights are multiplied with vectors of about 14 bits."""

_GROSS = ROUNDED._replace(tolerance=ROUNDED.limit)
"""What is rounding in fewer bits for code that computes the same in float32."""

Make = Callable[[CacheConfig], Callable[[list[int]], NDArray[numpy.float32]]]
"""Gives the forward of a stream through a cache."""


class TrialSteps(Protocol):
    """Steps that are compared with the model; see `native.tensor_stepper`."""

    @property
    def why_not(self) -> str:
        """Why they do not run, or nothing."""

    def use_float32(self) -> None:
        """Compute in float32."""

    def run(self, tokens: Tensor) -> Tensor | None:
        """[B, 1] to [B, 1, V]; None if they do not run."""

    def run_prompt(self, tokens: Tensor) -> Tensor | None:
        """[B, Q] to [B, Q, V]; None if they take no prompts."""


_CANNOT = (UnsupportedModelError, MemoryError, RuntimeError)
"""What a model raises that cannot compute in float32, or not in this memory."""

_VERSIONS = ("h2o-stream", "transformers", "torch", "accelerate")
"""Packages on whose versions a result depends."""

_known: set[str] = set()
"""Keys of everything verified in this process."""


def verify_logits(model: Any, positions: Positions, device: CacheDevice, specs: Sequence[LayerSpec]) -> Verification:
    """Verify that a model gives its own logits through a cache with these layers.

    The model is left as it was. A result that took long is saved in the user's cache folder.

    Raises:
        UnsupportedModelError: it does not, with the numbers.
    """
    verification = Verification(model, positions, device, specs)
    if reason := verification.cached("eager", verification.why_not):
        if verification.sees_later():
            raise UnsupportedModelError(f"tokens of {type(model).__name__} attend to later ones; no cache can serve it")
        message = f"{type(model).__name__} computes something else through this cache than by itself: {reason}"
        if positions != "absolute":
            raise PositionsError(message)
        raise UnsupportedModelError(f"{message}; only --policy full can serve it")
    return verification


class Verification:
    """The check of one model with the layers of one cache.

    Args:
        model: transformers model with its own forward, and its own attention when this is created.
        device: device of the stored keys and values.
        specs: what the cache knows of each layer.
    """

    def __init__(self, model: Any, positions: Positions, device: CacheDevice, specs: Sequence[LayerSpec]) -> None:
        self._model, self._specs = model, specs
        self._attention = attention_names(model)
        self._expected: Tensor | None = None
        self._max_distance, self._learned = max_distance_of(model.config), learned_positions(model.config)
        limit = context_of(model.config) if positions == "absolute" else self._max_distance
        chunk = CHUNK if limit is None else max(1, min(CHUNK, limit // 4))
        self._count = PROMPT + STEPS if limit is None else min(PROMPT + STEPS, limit - chunk)
        self._prompt = max(1, self._count - STEPS)
        self._config = CacheConfig(
            "recent", self._count, sinks=0, span=0, positions=positions, chunk=chunk, device=device
        )
        self._tokens = usual_tokens(model, self._count)
        self._key = self._identify()

    def _identify(self) -> str | None:
        """Everything the result depends on; None if that is unknown."""
        model = self._model
        if has_additions(model):
            return None
        names = [name for _, name in self._attention]
        environment = f"{input_device(model).type} {model.dtype} {rounding_of(model)} {names}"
        return f"{model_digest(model)} {environment} {self._config} {[*map(version_of, _VERSIONS)]}"

    def cached(self, engine: str, why_not: Callable[[], str]) -> str:
        """The result of `why_not`; nothing, without a call, if the same model and `engine` passed before."""
        if self._key is None or torch.distributed.is_initialized():  # all processes must do the same
            return why_not()
        key = f"{engine} {self._key}"
        if key in _known or read_measurement("proved", key):
            _known.add(key)
            return ""
        begun = time.perf_counter()
        if reason := why_not():
            return reason
        _known.add(key)
        if time.perf_counter() - begun > LONG_S:
            save_measurement("proved", key, True)
        return ""

    def why_not(
        self, kernels: Kernels | None = None, make_steps: Callable[[H2OCache], TrialSteps] | None = None
    ) -> str:
        """Why logits through the cache differ from the model's own, or nothing.

        Args:
            kernels: used instead of the eager ones.
            make_steps: makes native steps for a cache; they run the last tokens.

        Raises:
            UnsupportedModelError: the model cannot compute these tokens, by itself or through the cache.
        """
        with undisturbed(self._model):
            if self._expected is None:
                self._expected = self._logits()
            cache = as_class_for(self._model, self._new_cache())
            cache.kernels = kernels
            steps = make_steps(cache) if make_steps else None
            ours = self._through(cache, steps)
            if ours is None:
                return steps.why_not if steps else ""
            return self._verdict(ours, lambda: self._in_float32(kernels, make_steps), native=kernels is not None)

    def _in_float32(
        self, kernels: Kernels | None, make_steps: Callable[[H2OCache], TrialSteps] | None
    ) -> Tensor | None:
        """[1, n, V] through the cache, computed in float32; None if native steps cannot run."""
        cache = as_class_for(self._model, self._new_cache(PRECISE))
        cache.kernels = kernels
        steps = make_steps(cache) if make_steps else None
        if steps:
            steps.use_float32()
        return self._through(cache, steps, PRECISE)

    @functools.cached_property
    def _exact(self) -> Tensor | None:
        """[1, n, V], the model's own logits in float32; None if it cannot compute in it."""
        if any(x.is_meta for x in self._model.parameters()):
            return None
        try:
            with in_dtype(self._model, PRECISE):
                return self._logits().float()
        except _CANNOT:
            return None

    def why_not_served(self, make: Make, make_in_float32: Make) -> str:
        """Why the logits of a model of the runtime differ from the model's own, or nothing.

        Args:
            make: gives the forward of a stream through a cache: from tokens to the logits [V] after the last one.
            make_in_float32: the same with keys and values in float32.

        Raises:
            UnsupportedModelError: the model cannot compute these tokens.
        """

        def served(make: Make) -> Tensor:
            forward, tokens = make(self._config), self._tokens[0].tolist()
            parts = tokens[: self._prompt], *([token] for token in tokens[self._prompt :])
            return torch.from_numpy(numpy.stack([forward(list(part)) for part in parts]))[None]

        with undisturbed(self._model):
            self._expected = self._logits()
            return self._verdict(served(make), lambda: served(make_in_float32), native=True)

    def _verdict(self, ours: Tensor, in_float32: Callable[[], Tensor | None], native: bool) -> str:
        """Why logits differ from the model's own, or nothing.

        Args:
            ours: [1, n, V], of the last tokens.
            in_float32: computes the same in float32.
            native: whether native code computes them, which is compared in float32 in any case.
        """
        assert self._expected is not None, "the model's own logits come first"
        # Native code is compared by the last ones only, so that no others are kept.
        expected, self._expected = self._expected, self._expected[:, -STEPS - 1 :].clone()
        if rounding_of(self._model) is EXACT:
            return self._difference(ours, expected, EXACT)
        if not native and last_error(ours, expected) < ROUNDED.tolerance:
            return ""
        try:
            exact = self._exact
            precise = None if exact is None else in_float32()
        except _CANNOT:
            precise = None
        if exact is None or precise is None:
            return self._difference(ours, expected, ROUNDED)
        reason = self._difference(precise, exact, _PRECISE, PRECISE)
        return reason or (self._difference(ours, expected, _GROSS) if native else "")

    def _difference(self, ours: Tensor, expected: Tensor, rounding: Rounding, dtype: torch.dtype | None = None) -> str:
        """Why logits differ by more than rounding, or nothing; computed in this dtype, by default that of the model."""
        error, tolerance = last_error(ours, expected), rounding.tolerance
        for seed in range(_SAMPLES):
            if error < tolerance:
                return ""
            with in_dtype(self._model, dtype), rounded_embedding(self._model, rounding.step, seed):
                rounding_error = last_error(self._logits(), expected)
            tolerance = min(max(tolerance, ROUNDINGS * rounding_error), rounding.limit)
        where = "in float32 " if dtype else ""
        return (
            ""
            if error < tolerance
            else f"{where}its logits are off by {error:.1e} of their rms, {tolerance:.0e} is rounding"
        )

    def continues(self) -> bool:
        """Whether several tokens at once continue a stream; in some models they begin recurrent states anew."""
        if not any(spec.states for spec in self._specs):
            return True

        def why_not() -> str:
            return "" if self._agree(halves) else "it begins anew"

        def halves(dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
            cache = as_class_for(self._model, self._new_cache(dtype))
            _, last = (self._fed(cache, part) for part in self._tokens.tensor_split(2, 1))
            assert last is not None, "no native steps"
            return last, self._logits()[:, -last.shape[1] :]

        return not self.cached("continues", why_not)

    def sees_later(self) -> bool:
        """Whether the model's own logits of a token depend on later tokens."""
        agree = self._agree(lambda dtype: (self._logits(self._prompt), self._logits()[:, : self._prompt]))
        return agree is False

    def _agree(self, compute: Callable[[torch.dtype | None], tuple[Tensor, Tensor]]) -> bool | None:
        """Whether two ways to the same logits agree, None if that is not known.

        A model in fewer bits computes both in float32 if they do not agree in those; not all can.

        Args:
            compute: gives both; gets the dtype of states if it is another one than usual.
        """
        with undisturbed(self._model):
            if error_of(*compute(None)) < rounding_of(self._model).tolerance:
                return True
            if rounding_of(self._model) is EXACT:
                return False
            try:
                with in_dtype(self._model, PRECISE):
                    return error_of(*compute(PRECISE)) < EXACT.limit
            except _CANNOT:
                return None

    def _logits(self, count: int | None = None) -> Tensor:
        """[1, n, V] from the model's own forward of the first n tokens, by default of all."""
        name = type(self._model).__name__
        with using_attention(self._model, self._attention), failing_as(f"the forward of {name}"):
            logits = logits_of(self._model(input_ids=self._tokens[:, :count], use_cache=False))
        if logits.isnan().any():
            raise UnsupportedModelError(f"logits of {name} are NaN, whatever its cache does; check its weights")
        return logits

    def _through(self, cache: H2OCache, steps: TrialSteps | None, dtype: torch.dtype | None = None) -> Tensor | None:
        """[1, n, V] through the cache; None if native steps cannot run."""
        tokens, parts = self._tokens, []
        for number, part in enumerate((tokens[:, : self._prompt], *tokens[:, self._prompt :].split(1, 1))):
            # Once, the first token after the prompt goes through the model and the kernels of its layers.
            native = None if number == 1 and dtype is None else steps
            logits = self._fed(cache, part, native, dtype)
            if logits is None:
                return None
            parts.append(logits)
        return torch.cat(parts, 1)

    def _fed(
        self, cache: H2OCache, tokens: Tensor, steps: TrialSteps | None = None, dtype: torch.dtype | None = None
    ) -> Tensor | None:
        """[1, n, V] of tokens [1, n] that continue a stream: by `steps`, which need not take prompts, or the model."""
        kwargs = {"input_ids": tokens, "past_key_values": cache, "use_cache": True}
        cache.prepare_forward(kwargs)
        if steps and cache.tokens.lengths:
            return steps.run(tokens)
        if steps and (logits := steps.run_prompt(tokens)) is not None:
            return logits
        cache.use_own_dtypes()
        failing = failing_as(f"{type(self._model).__name__} through this cache")
        with in_dtype(self._model, dtype), using_h2o_attention(self._model), failing:
            logits = logits_of(self._model(**kwargs))
        cache.count_forward()
        return logits

    def _new_cache(self, dtype: torch.dtype | None = None) -> H2OCache:
        """An empty cache; with states in this dtype, if it is not None."""
        specs = self._specs
        if dtype is not None:
            specs = [replace(x, state_dtypes=dict.fromkeys(x.state_dtypes, dtype)) for x in specs]
        return H2OCache(self._config, specs, self._max_distance, self._learned)
