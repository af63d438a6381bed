"""The two caches a model can be attached to: fixed slots, and transformers' growing one with the same face."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from h2o_stream.cache.policies import make_scorer
from h2o_stream.cache.rope import RotaryTable
from h2o_stream.cache.slots import SlotLayer
from h2o_stream.config import MIN_EVICTABLE, CachePlan
from h2o_stream.errors import ConfigError, H2OStreamError


@dataclass(frozen=True)
class CacheCounts:
    """Where the tokens of a stream are. All but `seen` and `evicted` are per layer and KV head.

    Attributes:
        seen: tokens fed since the start.
        cached: tokens held, ``sinks + pinned + heavy + recent``.
        sinks: first tokens of the stream, never evicted.
        pinned: further tokens that are never evicted, such as the system prompt.
        heavy: held for the attention they got.
        recent: held because they are new.
        window: slots there are; 0 means no limit.
        nbytes: memory of keys, values and bookkeeping, all layers.
    """

    seen: int
    cached: int
    sinks: int
    pinned: int
    heavy: int
    recent: int
    window: int
    nbytes: int

    @property
    def evicted(self) -> int:
        """Tokens no longer held."""
        return self.seen - self.cached

    @property
    def free(self) -> int:
        """Slots not used yet."""
        return max(self.window - self.cached, 0)


class H2OCache(Cache):
    """A fixed window of slots per decoder layer; memory does not grow with the stream.

    Args:
        plan: budgets and rules.
        layers: decoder layers of the model.
        table: rotations for ``rolling`` and ``gap``; None when the model rotates by itself (``absolute``).
    """

    def __init__(self, plan: CachePlan, layers: int, table: RotaryTable | None) -> None:
        scorer = make_scorer(plan)
        super().__init__(layers=[SlotLayer(plan, scorer, table) for _ in range(layers)])
        self.plan = plan

    @property
    def seen_tokens(self) -> int:
        """Tokens fed since the start of the stream."""
        return int(self.get_seq_length())

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and bookkeeping of all layers."""
        return sum(layer.nbytes for layer in self.layers)

    def kept(self, layer: int = 0) -> Tensor:
        """[B, Hkv, n] int64: indices of the tokens a layer holds, oldest first."""
        kept: Tensor = self.layers[layer].kept()
        return kept

    def pin(self, count: int) -> None:
        """Never evict the first `count` tokens of the stream; heavy and recent share what is left as before.

        Raises:
            ConfigError: fewer than `MIN_EVICTABLE` slots would be left to move in.
            H2OStreamError: some of these tokens may have been evicted already.
        """
        plan = self.plan
        pinned = max(count, plan.sinks)
        if self.seen_tokens > plan.window and pinned > self.layers[0].pinned:
            raise H2OStreamError(f"{self.seen_tokens} tokens were seen; pin before they pass the window {plan.window}")
        movable = plan.window - pinned
        if pinned > plan.sinks and movable < MIN_EVICTABLE:
            raise ConfigError(
                f"{count} pinned tokens (system prompt) leave {max(movable, 0)} of a window of {plan.window}, at least "
                f"{MIN_EVICTABLE} must be left; raise --window to {count + MIN_EVICTABLE} or shorten the system prompt"
            )
        recent = movable - movable * plan.heavy // (plan.heavy + plan.recent)
        for layer in self.layers:
            layer.pinned, layer.recent = pinned, recent

    def counts(self) -> CacheCounts:
        """Where the tokens are now."""
        layer: SlotLayer = self.layers[0]
        pinned = min(layer.pinned, layer.held)
        recent = min(layer.recent, layer.held - pinned)
        return CacheCounts(
            seen=layer.seen,
            cached=layer.held,
            sinks=min(self.plan.sinks, pinned),
            pinned=max(pinned - self.plan.sinks, 0),
            heavy=layer.held - pinned - recent,
            recent=recent,
            window=self.plan.window,
            nbytes=self.nbytes,
        )

    def prepare_forward(self, kwargs: dict[str, Any]) -> None:
        """Adapt the keyword arguments of the model's forward to this cache, in place.

        Raises:
            ConfigError: the attention mask hides tokens.
        """
        tokens = kwargs.get("input_ids")
        if tokens is None:
            tokens = kwargs["inputs_embeds"]
        mask = kwargs.get("attention_mask")
        if mask is not None and tokens.shape[1] > 1 and (mask.dim() != 2 or not bool(mask.all())):
            raise ConfigError("attention_mask hides tokens; padded batches are not served by this version")
        kwargs["h2o_cache"] = self
        if self.plan.positions != "absolute":
            kwargs["position_ids"] = torch.zeros(tokens.shape[:2], dtype=torch.int64, device=tokens.device)


class FullCache(DynamicCache):
    """transformers' own growing cache, with what the fixed window offers beside it."""

    def __init__(self, plan: CachePlan, config: Any) -> None:
        super().__init__(config=config)
        self.plan = plan

    @property
    def seen_tokens(self) -> int:
        """Tokens fed since the start of the stream."""
        return int(self.get_seq_length())

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values of all layers."""
        return sum(t.nbytes for layer in self.layers for t in (layer.keys, layer.values) if t is not None)

    def kept(self, layer: int = 0) -> Tensor:
        """[B, Hkv, n] int64: indices of the tokens a layer holds, oldest first."""
        keys = self.layers[layer].keys if layer < len(self.layers) else None
        if keys is None:
            return torch.empty(0, 0, 0, dtype=torch.int64)
        held = keys.shape[2]
        return torch.arange(self.seen_tokens - held, self.seen_tokens, device=keys.device).expand(*keys.shape[:2], held)

    def pin(self, count: int) -> None:
        """Nothing is ever evicted, so nothing is to be done."""

    def counts(self) -> CacheCounts:
        """Where the tokens are now."""
        seen = self.seen_tokens
        return CacheCounts(seen, cached=seen, sinks=0, pinned=0, heavy=0, recent=seen, window=0, nbytes=self.nbytes)

    def prepare_forward(self, kwargs: dict[str, Any]) -> None:
        """Transformers knows what to do with its own cache."""
