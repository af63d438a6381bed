"""The cache that keeps everything: transformers' own, with the interface of the fixed window."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import numpy
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from h2o_stream.cache.arguments import check_rows, tokens_in
from h2o_stream.cache.arrays import to_array, to_arrays, to_tensor, to_tensors
from h2o_stream.cache.counts import CacheCounts
from h2o_stream.cache.one_thread import OneThread, Tearable
from h2o_stream.cache.recurrent import load_states, release_states, states_of
from h2o_stream.cache.state import (
    FINGERPRINT,
    Array,
    check_fingerprint,
    check_saveable,
    checksummed,
    dtype_of,
    encode_json,
    refusing_damage,
    require_array,
    verify_checksums,
    whole_numbers,
    with_prefix,
)
from h2o_stream.cache.tearing import marks_tears
from h2o_stream.config import CachePlan
from h2o_stream.errors import H2OStreamError


@marks_tears
class FullCache(Tearable, DynamicCache):
    """transformers' own growing cache, with the further methods of `H2OCache`.

    Args:
        model_digest: identifies the model when a state is saved or loaded.
        in_host_memory: whether keys and values are in host memory while their layer is not used.
    """

    evicts, continues, engine_note, stream_number = False, True, "", 0
    padding = None
    recurrent_layers: tuple[()] = ()
    """See `H2OCache`; recurrent layers take what comes."""

    def __init__(
        self,
        plan: CachePlan,
        config: Any,
        device: torch.device,
        model_digest: Callable[[], str] = lambda: "",
        in_host_memory: bool = False,
    ) -> None:
        self.one_thread = OneThread()
        super().__init__(config=config, offloading=in_host_memory)
        self.plan = plan
        self._device, self.model_digest = device, model_digest

    @property
    def seen_tokens(self) -> int:
        """Tokens fed since the start of the stream."""
        return int(self.get_seq_length())

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and states of all layers; a sliding layer also holds what its window was cut from."""
        tensors = (tensor for layer in self.layers for tensor in tensors_of(layer).values())
        return sum({s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}.values())

    def kept(self, layer: int = 0) -> Tensor:
        """[B, Hkv, n] int64: indices of the tokens a layer holds, oldest first."""
        keys = tensors_of(self.layers[layer]).get("keys") if layer < len(self.layers) else None
        if keys is None:
            return torch.empty(0, 0, 0, dtype=torch.int64, device="cpu")
        num_tokens = keys.shape[2]
        return torch.arange(self.seen_tokens - num_tokens, self.seen_tokens, device=keys.device).expand(
            *keys.shape[:2], num_tokens
        )

    @property
    def pins(self) -> tuple[range, ...]:
        """No pins are needed."""
        return ()

    def pin(self, start: int, stop: int) -> None:
        """Nothing to do: nothing is ever evicted."""

    def check_pin(self, count: int) -> None:
        """Nothing to check: there is no window."""

    def unpin(self, start: int = 0, stop: int | None = None) -> None:
        """Nothing to do: nothing is ever evicted."""

    @property
    def transient(self) -> tuple[range, ...]:
        """Nothing is ever evicted."""
        return ()

    def evict_first(self, start: int, stop: int) -> None:
        """Nothing to do: nothing is ever evicted."""

    def use_own_dtypes(self) -> None:
        """No other code than the model's writes states."""

    def begin(self, prompt: int) -> None:
        """Nothing depends on the first prompt."""

    def counts(self) -> CacheCounts:
        """Where the tokens are now."""
        seen = self.seen_tokens
        return CacheCounts(seen, cached=seen, sinks=0, pinned=0, heavy=0, recent=seen, window=0, nbytes=self.nbytes)

    def state_dict(self) -> dict[str, Tensor]:
        """See `H2OCache.state_dict`."""
        check_saveable(self.torn, self.seen_tokens)
        state = {
            f"{number}.{name}": to_array(tensor).copy()
            for number, layer in enumerate(self.layers)
            for name, tensor in tensors_of(layer).items()
        }
        state["progress"] = numpy.array([self.seen_tokens], numpy.int64)
        state[FINGERPRINT] = encode_json(self._fingerprint(state))
        return to_tensors(checksummed(state))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """See `H2OCache.load_state_dict`."""
        with refusing_damage():
            arrays = to_arrays(state)
            check_fingerprint(arrays, self._fingerprint(arrays))
            verify_checksums(arrays)
            (seen,) = whole_numbers(arrays, "progress", 1)
            layers = [self._loaded(copy(layer), arrays, number, seen) for number, layer in enumerate(self.layers)]
        with self.writing(anew=True):
            self.layers: list[Any] = layers
            self.stream_number += 1

    def _loaded(self, layer: Any, state: Mapping[str, Array], number: int, seen: int) -> Any:
        """A layer that continues from its arrays."""
        first, before = require_array(state, self._first_keys), self.layers[number]
        device = getattr(before, "device", None) or self._device
        release_states(layer)
        known = {name: tuple(tensor.shape[1:]) for name, tensor in states_of(before).items()}
        load_states(layer, to_tensors(with_prefix(state, f"{number}.")), len(first), known, device)
        if not isinstance(layer, CacheLayerMixin):
            return layer
        keys, values = (require_array(state, f"{number}.{name}") for name in ("keys", "values"))
        num_tokens = min(seen, layer.sliding_window - 1 or seen) if layer.is_sliding else seen
        shapes = [(x.shape[:3], dtype_of(x)) for x in (keys, values)]
        wanted = (first.shape[0], keys.shape[1], num_tokens), dtype_of(first)
        if shapes != [wanted, wanted] or keys.ndim != 4 or values.ndim != 4:
            raise H2OStreamError(
                f"the state does not fit: keys and values of layer {number} are {shapes}, not {wanted}"
            )
        sizes = [x.shape[1::2] for x in (layer.keys, layer.values)] if layer.is_initialized else None
        if sizes not in (None, [x.shape[1::2] for x in (keys, values)]):
            raise H2OStreamError(f"the state does not fit: heads of layer {number} are of another size")
        loaded = [to_tensor(x).to(device, copy=True) for x in (keys, values)]
        layer.lazy_initialization(*loaded)
        layer.keys, layer.values = loaded
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = seen
        return layer

    @property
    def _first_keys(self) -> str:
        """What the keys of the first layer that has any are called in a state."""
        return f"{next(n for n, layer in enumerate(self.layers) if isinstance(layer, CacheLayerMixin))}.keys"

    def _fingerprint(self, state: Mapping[str, Array]) -> dict[str, Any]:
        dtype = dtype_of(require_array(state, self._first_keys))
        return {"dtype": dtype, "model": self.model_digest(), "policy": "full"}

    def reset(self) -> None:
        """See `H2OCache.reset`."""
        with self.writing(anew=True):
            super().reset()
            for layer in self.layers:
                release_states(layer)
            self.stream_number += 1

    def count_forward(self) -> None:
        """Nothing to do: transformers' layers count by themselves."""

    def prepare_forward(self, kwargs: dict[str, Any]) -> None:
        """Check that the forward continues the stream.

        Raises:
            H2OStreamError: the stream has another number of rows, or the mask is made for a cache of fixed size.
        """
        mask, tokens = kwargs.get("attention_mask"), tokens_in(kwargs)
        new = tokens.shape[1]
        if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[-1] != self.seen_tokens + new:
            raise H2OStreamError(
                f"attention_mask is made for a cache of {mask.shape[-1]} tokens; leave cache_implementation out"
            )
        if any(self.is_linear) and kwargs.get("position_ids") is None:  # some hybrids would begin at 0 again
            kwargs["position_ids"] = torch.arange(self.seen_tokens, self.seen_tokens + new, device=tokens.device)[None]
        tensors = (tensor for layer in self.layers for tensor in tensors_of(layer).values())
        check_rows(len(next(tensors, ())), len(tokens))


def tensors_of(layer: Any) -> dict[str, Tensor]:
    """Keys, values and states of a layer, by name."""
    attended = {name: getattr(layer, name, None) for name in ("keys", "values")}
    return {name: tensor for name, tensor in attended.items() if tensor is not None} | states_of(layer)
