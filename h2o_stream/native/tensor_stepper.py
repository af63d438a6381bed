"""`Stepper` between tensors, in place of the forward of an attached model."""

from __future__ import annotations

from typing import Any, cast

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.cache.rounding import rounded_embedding
from h2o_stream.cache.tolerance import ROUNDINGS, error_of, rounding_of
from h2o_stream.errors import H2OStreamError
from h2o_stream.native.stepper import Stepper


class TensorStepper:
    """A stepper that takes and gives tensors, around one of arrays; see `h2o_stream.attachment.forward.Steps`."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self.cache, self.model, self.takes_prompts = stepper.cache, stepper.model, stepper.takes_prompts

    @property
    def why_not(self) -> str:
        """See `Stepper`."""
        return self._stepper.why_not

    def use_float32(self) -> None:
        """Keep keys and values in float32 and take prompts, whatever the model's weights are."""
        self._stepper.dtype, self._stepper.takes_prompts = "float32", True

    def logits(self, kwargs: dict[str, Any]) -> Tensor | None:
        """See `h2o_stream.attachment.forward.Steps`."""
        tokens = kwargs["input_ids"]
        if tokens.shape[1] == 1 and self.cache.tokens.lengths:
            logits = self.run(tokens)
        else:
            logits = self.run_prompt(tokens, kwargs.get("logits_to_keep", 0))
        return None if logits is None else self.as_models_own(logits)

    def as_models_own(self, logits: Tensor) -> Tensor:
        """Logits in the dtype that the model's are in."""
        return logits.to(getattr(torch, self.model.description.logits_dtype))

    def run(self, tokens: Tensor, trace: Tensor | None = None) -> Tensor | None:
        """See `Stepper.step`: tokens [B, 1] int64 or int32 to [B, 1, V] float32."""
        ids = _ids(tokens)
        logits = None if ids is None else self._stepper.step(ids[:, 0], trace)
        return None if logits is None else torch.from_numpy(logits)

    def run_prompt(self, tokens: Tensor, keep: int = 0) -> Tensor | None:
        """See `Stepper.prompt`: tokens [B, Q] int64 or int32 to [B, keep or Q, V] float32."""
        ids = _ids(tokens)
        logits = None if ids is None else self._stepper.prompt(ids, keep)
        return None if logits is None else torch.from_numpy(logits)


def _ids(tokens: Tensor) -> NDArray[numpy.int64] | None:
    """Token ids on the CPU as an array of numpy; None if these are none."""
    if tokens.device.type != "cpu" or tokens.dtype not in (torch.int64, torch.int32):
        return None
    return tokens.numpy().astype(numpy.int64, copy=False)


class CheckedStepper:
    """Does every step eagerly, too, and raises where they differ."""

    takes_prompts = False

    def __init__(self, stepper: TensorStepper, model: Any) -> None:
        self._stepper, self._model, self._forward = stepper, model, model.forward

    def logits(self, kwargs: dict[str, Any]) -> Tensor | None:
        """See `TensorStepper.logits`; raises H2OStreamError with the first layer after which streams differ."""
        cache, tokens = cast(H2OCache, self._stepper.cache), kwargs["input_ids"]
        if not cache.tokens.lengths:
            return None
        model = self._stepper.model
        number, before = cache.stream_number, cache.state_dict()

        def restored(result: Any) -> Any:
            cache.load_state_dict(before)
            cache.stream_number = number  # it is the same stream
            cache.tokens.expect((1,) * len(tokens), 1)
            return result

        expected = restored(self._eager(kwargs))
        shape = len(model.layers) + 1, len(tokens), model.struct.hidden_size
        trace = torch.empty(shape, dtype=torch.float32, device="cpu")
        logits = self._stepper.run(tokens, trace)
        if logits is None:
            return None
        outputs = [*trace[:-1], logits[:, -1]]
        if self._off(outputs, expected, [0.0] * len(outputs)):
            restored(None)
            with rounded_embedding(self._model, rounding_of(self._model).step):
                rounded = restored(self._eager(kwargs))
            own = [ROUNDINGS * error_of(*both) for both in zip(rounded, expected, strict=True)]
            if reason := self._off(outputs, expected, own):
                raise H2OStreamError(f"{reason}; use --engine eager")
            self._stepper.run(tokens)
        return self._stepper.as_models_own(logits)

    def _eager(self, kwargs: dict[str, Any]) -> list[Tensor]:
        """[B, n] of the last token: the residual stream before every layer, then the logits."""
        cast(H2OCache, self._stepper.cache).use_own_dtypes()
        eager = self._forward(**kwargs, output_hidden_states=True)
        streams = eager.hidden_states[: len(self._stepper.model.layers)]
        return [*(stream[:, -1] for stream in streams), eager.logits[:, -1]]

    def _off(self, computed: list[Tensor], expected: list[Tensor], rounding: list[float]) -> str:
        """The first of these that differ by more than rounding, or nothing."""
        for number, (ours, theirs, own) in enumerate(zip(computed, expected, rounding, strict=True)):
            error, limit = error_of(ours, theirs), max(rounding_of(self._model).tolerance, own)
            if not error < limit:
                layer = f"layer {number - 1}" if number else "the embedding"
                where = (
                    "logits of the native step are"
                    if number == len(computed) - 1
                    else f"after {layer} the native step is"
                )
                return f"{where} off by {error:.1e} of the rms, at most {limit:.0e} is rounding"
        return ""
