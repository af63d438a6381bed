"""The forward of an attached model: passes the cache in, and lets a native step run single tokens if there is one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from h2o_stream.attachment.attention_interface import attention_names, using_attention
from h2o_stream.attachment.stream_handle import StreamHandle, cache_of
from h2o_stream.cache.arguments import tokens_in
from h2o_stream.cache.full_cache import FullCache
from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.errors import H2OStreamError
from h2o_stream.native.gradients import without_gradient

_HANDLED = {
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
"""Keywords that do not change the logits of a single token, or that the cache has handled."""


_BY_COLUMN = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache_position", "logits_to_keep"}
"""Keywords that follow the columns of a forward."""


class Steps(Protocol):
    """Runs the whole model for one token of each row.

    Attributes:
        takes_prompts: and for several.
    """

    takes_prompts: bool

    def logits(self, kwargs: dict[str, Any]) -> Tensor | None:
        """Run tokens through the model and, in `H2OCache.writing`, the cache, and count them.

        Args:
            kwargs: arguments of the model's forward, after `H2OCache.prepare_forward`: ``input_ids`` [B, Q], and
                nothing that asks for more than logits.

        Returns:
            [B, Q or ``logits_to_keep``, vocabulary]; None, with nothing touched, if the model's own forward has to run.
        """


class AttachedForward:
    """Stands in for `model.forward`.

    Args:
        model: its forward is replaced, and called for whatever is no native step.
        cache: passed to every forward that wants a cache.
        stepper: runs single tokens where it can; None: the model does.
        attention: the model's own, see `attention_names`, for forwards without a cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: H2OCache | FullCache,
        stepper: Steps | None,
        attention: list[tuple[Any, str]],
    ) -> None:
        # transformers and others inspect the signature: they see that of the original forward.
        functools.update_wrapper(self, model.forward)
        self.forward, self.cache, self.stepper = model.forward, cache, stepper
        self._model, self._attention = model, attention
        self._config, self._text = model.config, model.config.get_text_config()
        self._attached = attention_names(model)
        self._names = list(inspect.signature(model.forward).parameters)
        self._replaced: WeakSet[Any] = WeakSet()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # runs as it is within a compiled model
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See the model's own forward.

        Raises:
            H2OStreamError: the cache is not the attached one, or its stream was replaced; the attention is not ours any
                more; the last forward was cut off halfway, or a hook is in one; another thread is; see
                `H2OCache.prepare_forward`.
        """
        with self.cache.one_thread:
            return self._run({**dict(zip(self._names, args, strict=False)), **kwargs})

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse."""
        return self.cache.one_thread.__reduce_ex__(protocol)

    def _run(self, kwargs: dict[str, Any]) -> Any:
        past = kwargs.get("past_key_values")
        is_attached = cache_of(past) is self.cache
        self._check_attention()
        if not is_attached and not self._wants_cache(kwargs):
            return self._without_cache(kwargs)
        if not is_attached:
            self._start_stream(past, kwargs)
            past = StreamHandle(self.cache)
        self._check_outputs(kwargs)
        cache = self.cache
        if cache.torn:
            raise H2OStreamError(
                "the last forward was cut off halfway, or this one is called by a hook; reset() to start a new stream"
            )
        kwargs["past_key_values"] = cache
        if isinstance(mask := kwargs.get("attention_mask"), dict):  # by kinds of attention, for a cache of fixed size
            kwargs["attention_mask"] = mask.get("full_attention", next(iter(mask.values())))
        cache.prepare_forward(kwargs)
        begun = bool(cache.get_seq_length())
        try:
            output = self._in_pieces(kwargs) if self._needs_pieces(kwargs) else self._output(kwargs)
        except BaseException:
            if not begun:
                cache.reset()
            raise
        cache.torn = False
        return _with_stream(output, cache, past)

    def _check_attention(self) -> None:
        for config, name in self._attached:
            if config._attn_implementation != name and self.cache.evicts:
                raise H2OStreamError(
                    f"the attention of an attached model was set to {config._attn_implementation}; "
                    f"choose it before the block, or set it back to {name}"
                )

    def _check_outputs(self, kwargs: dict[str, Any]) -> None:
        asked = kwargs.get("output_attentions")
        asked = getattr(self._text, "output_attentions", False) if asked is None else asked
        if asked and (self._text, "eager") in self._attention and self.cache.evicts:
            raise H2OStreamError("an attached model does not give out its attentions; ask for them outside the block")

    def _wants_cache(self, kwargs: dict[str, Any]) -> bool:
        """Whether the model's own forward would make a cache."""
        wanted = kwargs.get("use_cache")
        if wanted is None:
            wanted = getattr(self._text, "use_cache", True)
        if wanted and self._model.training:
            return not any(getattr(module, "gradient_checkpointing", False) for module in self._model.modules())
        return bool(wanted)

    def _without_cache(self, kwargs: dict[str, Any]) -> Any:
        """The model's own forward; the stream is left alone."""
        if not self.cache.evicts:
            return self.forward(**kwargs)
        with using_attention(self._model, self._attention):
            return self.forward(**kwargs)

    def _start_stream(self, past: Any, kwargs: dict[str, Any]) -> None:
        """Start a new stream; the ``past_key_values`` that it replaces must be empty."""
        if past is not None:
            if num_tokens := past.get_seq_length():
                raise H2OStreamError(
                    f"past_key_values holds {num_tokens} tokens of another cache; "
                    "pass the attached cache, or none to start a new stream"
                )
            mask = kwargs.get("attention_mask")
            if past in self._replaced and (mask is None or mask.shape[-1] > tokens_in(kwargs).shape[1]):
                raise H2OStreamError(
                    "past_key_values stayed empty, an attached model fills its own cache; "
                    "go on with the past_key_values of the output"
                )
            self._replaced.add(past)
        self.cache.reset()

    def _output(self, kwargs: dict[str, Any]) -> Any:
        with torch.cuda.device_of(tokens_in(kwargs)):  # on which Triton launches kernels
            logits = self.stepper.logits(kwargs) if self.stepper and self._is_for(self.stepper, kwargs) else None
            if logits is None:
                self.cache.use_own_dtypes()
                output = self.forward(**self._with_all_queries(kwargs))
                self.cache.count_forward()
                return output
        if torch.is_grad_enabled():
            logits = without_gradient(logits, next((p for p in self._model.parameters() if p.requires_grad), None))
        return self._as_asked(logits, kwargs)

    def _with_all_queries(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keywords with positions in place of a number of logits, for which layers that share keys drop queries."""
        keep, new = kwargs.get("logits_to_keep"), tokens_in(kwargs).shape[1]
        if not getattr(self._text, "num_kv_shared_layers", 0) or not keep or not isinstance(keep, int):
            return kwargs
        return kwargs | {"logits_to_keep": torch.arange(max(new - keep, 0), new, device="cpu")}

    def _needs_pieces(self, kwargs: dict[str, Any]) -> bool:
        """Whether recurrent layers would take a prepared forward wrongly in one piece."""
        cache, new = self.cache, tokens_in(kwargs).shape[1]
        if not cache.recurrent_layers:
            return False
        begun, padding = bool(cache.seen_tokens), cache.padding
        if begun and new > 1 and not cache.continues:
            return True
        if padding is None or not any(0 < count < new for count in padding.counts):
            return False
        return begun or not padding.leads

    def _in_pieces(self, kwargs: dict[str, Any]) -> Any:
        """The forward in pieces, each with equally many tokens in its rows while the other rows wait.

        Recurrent layers take padding for tokens; and some models begin anew with every piece of several tokens.
        """
        if any(kwargs.get(name) for name in ("output_hidden_states", "output_attentions")):
            raise H2OStreamError("this forward is fed in pieces, which give out nothing but logits")
        cache, tokens = self.cache, tokens_in(kwargs)
        assert isinstance(cache, H2OCache)
        columns, (rows, new) = cache.tokens.columns, tokens.shape[:2]
        packed = torch.arange(new, device="cpu").expand(rows, -1) if cache.padding is None else cache.padding.order
        packed = packed.to(tokens.device)
        counts = torch.tensor(cache.padding.counts if cache.padding else [new] * rows, device="cpu")
        name = "input_ids" if tokens.dim() == 2 else "inputs_embeds"
        shared = {key: value for key, value in kwargs.items() if key not in _BY_COLUMN} | {"return_dict": True}
        logits: Tensor | None = None
        for chosen, start, stop in _pieces(counts, cache.continues):
            part, length = packed[:, start:stop], stop - start
            mask = chosen[:, None].long().expand(-1, length).to(tokens.device)
            arguments = shared | {name: _columns(tokens, part), "attention_mask": mask}
            cache.prepare_forward(arguments)
            part_logits = self._output(arguments).logits
            logits = part_logits.new_zeros(rows, new, part_logits.shape[-1]) if logits is None else logits
            for row in chosen.nonzero().flatten().tolist():
                logits[row, part[row]] = part_logits[row]
        assert logits is not None
        cache.tokens.columns = columns + new
        keep = kwargs.get("logits_to_keep", 0)
        kept = slice(-keep, None) if isinstance(keep, int) else keep
        return self._as_asked(logits[:, kept], kwargs)

    def _as_asked(self, logits: Tensor, kwargs: dict[str, Any]) -> Any:
        """Logits in the form that a forward returns."""
        output = CausalLMOutputWithPast(logits=logits, past_key_values=self.cache)
        as_dict = kwargs.get("return_dict")
        return output if (self._config.return_dict if as_dict is None else as_dict) else output.to_tuple()

    def _is_for(self, stepper: Steps, kwargs: dict[str, Any]) -> bool:
        """Whether only logits are wanted, of tokens without padding that the stepper takes."""
        ids = kwargs.get("input_ids")
        if self.cache.padding is not None:
            return False
        if ids is not None and torch.is_autocast_enabled(ids.device.type):  # asks for other products than a step's
            return False
        if ids is None or ids.dim() != 2 or not isinstance(kwargs.get("logits_to_keep", 0), int):
            return False
        if ids.shape[1] > 1 and not stepper.takes_prompts:
            return False
        if any(getattr(self._config, name, False) for name in ("output_hidden_states", "output_attentions")):
            return False
        return all(value is None or value is False for name, value in kwargs.items() if name not in _HANDLED)


def _pieces(counts: Tensor, continues: bool) -> Iterator[tuple[Tensor, int, int]]:
    """Which rows [B] bool go together, and from which to which of their tokens: all of them, or one by one."""
    if continues:
        yield from ((counts == count, 0, count) for count in sorted(set(counts.tolist()) - {0}))
    else:
        yield from ((counts > start, start, start + 1) for start in range(int(counts.max())))


def _columns(tokens: Tensor, order: Tensor) -> Tensor:
    """Columns [B, n] of ids [B, Q] or embeddings [B, Q, hidden]."""
    if tokens.dim() == 3:
        order = order[..., None].expand(-1, -1, tokens.shape[-1])
    return tokens.gather(1, order)


def _with_stream(output: Any, cache: Any, stream: Any) -> Any:
    """The output of a forward, with the stream in place of the cache."""
    if isinstance(output, tuple):
        return tuple(stream if item is cache else item for item in output)
    if getattr(output, "past_key_values", None) is cache:
        output.past_key_values = stream
    return output


@contextmanager
def replaced_forward(model: PreTrainedModel, forward: AttachedForward) -> Iterator[None]:
    """Set the forward of a model and restore it afterwards, even if it had been replaced before.

    Copies and pickles are refused at once, rather than after all weights: plain pickle writes the storage that packed
    weights share once for each of them.
    """
    before = vars(model).get("forward")
    model.forward = forward
    model.__reduce_ex__ = forward.__reduce_ex__
    try:
        yield
    finally:
        del model.__reduce_ex__
        if before is None:
            del model.forward
        else:
            model.forward = before
