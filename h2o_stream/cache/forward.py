"""The forward of an attached model: puts the cache in, and lets a native step take single tokens where there is one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from h2o_stream.cache.full import FullCache
from h2o_stream.cache.window import H2OCache
from h2o_stream.errors import H2OStreamError

_UNDERSTOOD = {
    "input_ids",
    "past_key_values",
    "attention_mask",
    "position_ids",
    "cache_position",
    "use_cache",
    "logits_to_keep",
    "return_dict",
    "h2o_cache",
}
"""Keywords of a forward that change nothing about the logits of a single token, or that the cache has seen to."""


class Stepper(Protocol):
    """Runs the whole model for one token of each row."""

    def logits(self, kwargs: dict[str, Any]) -> Tensor | None:
        """Take the token through the model and the cache, and count it there: `H2OCache.begin_token` before the slots
        are touched, `H2OCache.count_token` afterwards.

        Args:
            kwargs: of the model's forward, by name, after `H2OCache.prepare_forward`: ``input_ids`` [B, 1], and nothing
                that asks for more than logits.

        Returns:
            [B, 1, vocabulary], or None if the model's own forward has to do it; then nothing was touched.
        """


class AttachedForward:
    """Stands in for `model.forward`.

    Args:
        model: whose forward it is.
        cache: goes into every forward.
        stepper: is asked first about single tokens; None for none.
    """

    def __init__(self, model: PreTrainedModel, cache: H2OCache | FullCache, stepper: Stepper | None) -> None:
        # transformers and others ask for the signature: they see that of the forward within.
        functools.update_wrapper(self, model.forward)
        self.forward, self.cache, self.stepper = model.forward, cache, stepper
        self._config = model.config
        self._names = list(inspect.signature(model.forward).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See the model's own forward.

        Raises:
            H2OStreamError: another cache is given that holds tokens; and see `H2OCache.prepare_forward`.
        """
        kwargs = {**dict(zip(self._names, args, strict=False)), **kwargs}
        given = kwargs.get("past_key_values")
        if given is not self.cache:
            if given is not None and given.get_seq_length() > 0:
                raise H2OStreamError(
                    f"past_key_values holds {given.get_seq_length()} tokens of another cache; "
                    "pass the attached cache, or none to start a new stream"
                )
            self.cache.reset()
            kwargs["past_key_values"] = self.cache
        self.cache.prepare_forward(kwargs)
        logits = self.stepper.logits(kwargs) if self.stepper and self._asks_for_logits_of_a_token(kwargs) else None
        if logits is None:
            return self.forward(**kwargs)
        output = CausalLMOutputWithPast(logits=logits, past_key_values=self.cache)
        as_dict = kwargs.get("return_dict")
        return output if (self._config.return_dict if as_dict is None else as_dict) else output.to_tuple()

    def _asks_for_logits_of_a_token(self, kwargs: dict[str, Any]) -> bool:
        ids = kwargs.get("input_ids")
        if ids is None or ids.dim() != 2 or ids.shape[1] != 1 or not isinstance(kwargs.get("logits_to_keep", 0), int):
            return False
        if any(getattr(self._config, name, False) for name in ("output_hidden_states", "output_attentions")):
            return False
        return all(value is None or value is False for name, value in kwargs.items() if name not in _UNDERSTOOD)


@contextmanager
def replaced_forward(model: PreTrainedModel, forward: AttachedForward) -> Iterator[None]:
    """Let `forward` be the model's; afterwards the model is as it was, whoever else had replaced its forward before."""
    before = vars(model).get("forward")
    model.forward = forward
    try:
        yield
    finally:
        if before is None:
            del model.forward
        else:
            model.forward = before
