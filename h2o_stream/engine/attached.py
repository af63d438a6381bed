"""A transformers model with an attached cache, as the engine serves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from h2o_stream.attachment.attach import attach
from h2o_stream.attachment.model_facts import context_of, input_device, learned_positions, weight_count
from h2o_stream.base.progress import ProgressCallback
from h2o_stream.cache.arrays import to_arrays, to_tensors
from h2o_stream.cache.full_cache import FullCache
from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.config import PREFILL_STEP_MAX, CacheConfig, EngineChoice, prefill_step
from h2o_stream.engine.device_logits import DeviceClock, as_logits
from h2o_stream.engine.logits import Logits
from h2o_stream.native.lookahead import Passes
from h2o_stream.native.native_model import NativeModel
from h2o_stream.native.tensor_stepper import TensorStepper
from h2o_stream.runtime.first_layers import FirstLayers, first_layers


class AttachedModel:
    """See `Served`. Arguments and errors as for `attach`."""

    def __init__(
        self, model: Any, config: CacheConfig | None, engine: EngineChoice, progress: ProgressCallback
    ) -> None:
        self._stack = ExitStack()
        cache = self._stack.enter_context(attach(model, config, engine=engine, progress=progress))
        self._serve(model, cache, model.forward.stepper)

    def _serve(self, model: Any, cache: H2OCache | FullCache, stepper: Any) -> None:
        """Serve a model with a cache, and what steps it."""
        self.cache, self._model, self._device = cache, model, input_device(model)
        self.context, self.learned_positions = context_of(model.config), learned_positions(model.config)
        on_cpu = self._device.type == "cpu"
        self.generation = model.generation_config
        self.dtype, self.device = str(model.dtype).removeprefix("torch."), str(self._device)
        self.vocabulary = model.config.get_text_config().vocab_size
        step = prefill_step(weight_count(model)) if on_cpu else PREFILL_STEP_MAX
        self.prefill_step = getattr(stepper, "prefill_step", step)
        self._passes: Passes[torch.Tensor] | None = stepper.passes() if hasattr(stepper, "passes") else None
        self._clock = DeviceClock(self._device)

    @property
    def native_model(self) -> NativeModel | None:
        """The description that native steps run by; None if steps are eager."""
        stepper = getattr(self._model.forward, "stepper", None)
        return stepper.model if isinstance(stepper, TensorStepper) else None

    @torch.no_grad()
    def forward(self, tokens: Sequence[int]) -> NDArray[numpy.float32]:
        """Feed tokens to the stream."""
        logits: NDArray[numpy.float32] = self._logits(tokens, 1)[-1].cpu().numpy()
        return logits

    @torch.no_grad()
    def step(self, token: int, guess: Callable[[], Sequence[int]]) -> tuple[Logits, int]:
        """Feed a token to the stream, with guesses where steps are fused. On a GPU, nothing waits until the next is
        sampled.
        """
        row, taken = self._step(token, guess) if self._passes else (self._logits([token], 1)[-1], 1)
        return as_logits(row), taken

    def _step(self, token: int, guess: Callable[[], Sequence[int]]) -> tuple[torch.Tensor, int]:
        cache, passes = self.cache, self._passes
        assert passes
        with cache.one_thread:
            if (logits := passes.next(token)) is not None:
                return logits, 0
            self._clock.read()
            guesses = () if cache.torn else guess()
            with self._clock:
                if guesses and (logits := passes.take(token, guesses)) is not None:
                    return logits, 1 + len(passes.tokens)
                return self._logits([token], 1)[-1], 1

    @property
    def pass_s(self) -> float | None:
        """Seconds of the last pass that is over, on a GPU."""
        return self._clock.seconds

    def take_back(self) -> None:
        """Take guesses out of the cache that were not said."""
        if self._passes:
            self._passes.take_back()

    @torch.no_grad()
    def losses(self, tokens: Sequence[int], expected: Sequence[int]) -> NDArray[numpy.float32]:
        """Feed tokens to the stream, as `forward` does."""
        targets = torch.tensor(expected, dtype=torch.int64, device=self._device)
        losses = cross_entropy(self._logits(tokens, len(tokens)), targets, reduction="none")
        return numpy.asarray(losses.cpu())

    def _logits(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        """Feed tokens. Returns the logits after the last `keep` of them, [keep, V] float32."""
        ids = torch.tensor([tokens], dtype=torch.int64, device=self._device)
        output = self._model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=keep)
        logits: torch.Tensor = output.logits[0, -keep:].float()
        return logits

    def read_embeddings(self, ids: NDArray[numpy.int64]) -> NDArray[numpy.float32]:
        """Embeddings of tokens [n], [n, hidden] float32."""
        return embeddings_of(self._model, ids)

    def first_layers(self, count: int | None = None) -> FirstLayers | None:
        """The first layers, or all, for texts that stand alone; None where they are not available."""
        native = self.native_model
        return first_layers(native.description, count) if native else None

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """A copy of the cache's state, see `H2OCache.state_dict`; bfloat16 numbers are uint16."""
        return to_arrays(self.cache.state_dict())

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Replace the stream, see `H2OCache.load_state_dict`."""
        self.cache.load_state_dict(to_tensors(state))

    def close(self) -> None:
        """Restore the model."""
        self._stack.close()


@torch.no_grad()
def embeddings_of(model: Any, ids: NDArray[numpy.int64]) -> NDArray[numpy.float32]:
    """Embeddings of tokens [n], [n, hidden] float32."""
    tokens = torch.from_numpy(ids).to(input_device(model))
    rows: NDArray[numpy.float32] = model.get_input_embeddings()(tokens).float().cpu().numpy()
    return rows
