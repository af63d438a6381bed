"""Attention in a cache that grows, with some tokens masked: h2o_hf's simulation of H2O, and tokens removed on purpose.

The model's own cache keeps everything at its true position. After each forward a rule says which tokens later queries
may still see. Scores are those of the policies, so a masked policy keeps the tokens that it keeps when it drops them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from transformers import AttentionInterface, DynamicCache

from h2o_stream.attachment.attention_interface import attention_names, using_attention
from h2o_stream.attachment.model_facts import context_of, input_device
from h2o_stream.cache.policies import Attention, Candidates, Policy, make_policy, select
from h2o_stream.cache.protection import Protection
from h2o_stream.compare.comparison import JobProgress
from h2o_stream.compare.folder import JobResult
from h2o_stream.compare.losses import Losses, chunk_of, losses_of
from h2o_stream.config import CacheConfig, CachePlan
from h2o_stream.errors import ConfigError, UnsupportedModelError

_NAME = "h2o_stream_masked"

_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Keywords of attention that is of another kind than plain."""

Rule = Callable[[int, Tensor, Tensor], Tensor]
"""From a layer's number, scores [Hkv, n] and what was visible [Hkv, n], what later queries see [Hkv, n]."""


@dataclass
class _Layer:
    """Scores [Hkv, n] float32 and visible [Hkv, n] bool of all tokens of a layer; a policy that updates the scores."""

    policy: Policy
    scores: Tensor
    visible: Tensor


class MaskedStream:
    """A stream of one row through a model in which tokens are masked, not dropped; used within `masked_attention`.

    The plan says how scores are summed, the rule what stays visible; without one all does.
    """

    def __init__(self, model: Any, plan: CachePlan, rule: Rule | None = None) -> None:
        self._model, self._plan, self._rule = model, plan, rule
        self._cache = DynamicCache(config=model.config)
        self._layers: dict[int, _Layer] = {}

    @torch.no_grad()
    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Feed tokens in one forward, then apply the rule. Returns their logits [n, V]."""
        ids = torch.tensor([list(tokens)], device=input_device(self._model))
        output = self._model(ids, past_key_values=self._cache, use_cache=True, masked_stream=self)
        logits: Tensor = output.logits[0]
        return logits

    def kept(self, layer: int = 0) -> Tensor:
        """[1, Hkv, n] int64: indices of the tokens that later queries see, oldest first; as many for every head."""
        visible = self._layers[layer].visible
        return visible.nonzero()[:, 1].view(1, len(visible), -1)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, which grow."""
        return sum(x.nbytes for layer in self._cache.layers for x in (layer.keys, layer.values) if x is not None)

    def attend(self, number: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend with the query [1, Hq, Q, D] to what is visible of key [1, Hkv, K, D] and value [1, Hkv, K, Dv], which
        have all tokens, and then choose. Returns [1, Q, Hq, Dv].
        """
        heads, new, seen = key.shape[1], query.shape[2], key.shape[2]
        if number not in self._layers:
            empty = torch.empty(heads, 0, device=key.device)
            self._layers[number] = _Layer(make_policy(self._plan, number), empty, empty.bool())
        layer = self._layers[number]
        added = seen - layer.scores.shape[1]
        layer.scores, layer.visible = pad(layer.scores, (0, added)), pad(layer.visible, (0, added), value=True)
        grouped = query.view(1, heads, -1, new, query.shape[-1])
        logits = scaling * (grouped @ key[:, :, None].mT).float()
        index = torch.arange(seen, device=key.device)
        causal = index <= index[-new:, None]
        probs = logits.masked_fill(~(causal & layer.visible[:, None, None]), -torch.inf).softmax(-1)
        later = torch.arange(new - 1, -1, -1, device=key.device).float()
        layer.scores = layer.policy.update_scores(layer.scores[None], Attention(probs, later, new))[0]
        if self._rule is not None:
            layer.visible = self._rule(number, layer.scores, layer.visible)
        output = probs.to(value.dtype) @ value[:, :, None]
        return output.reshape(1, -1, new, value.shape[-1]).transpose(1, 2).contiguous()


def policy_rule(plan: CachePlan) -> Rule:
    """What a policy keeps stays visible.

    Raises:
        ConfigError: the policy looks at more than scores and positions in the stream.
    """
    policies: dict[int, Policy] = {}
    sample = make_policy(plan)
    further = sample.long_term or sample.needs_keys or sample.head_state(1, 1, 1)
    if further or plan.budgets != "equal":
        raise ConfigError(
            f"policy {plan.policy} keeps more than a score of each token; --masked takes h2o-paper, recent, sink, "
            "random and tova, and full for comparison"
        )

    def choose(number: int, scores: Tensor, visible: Tensor) -> Tensor:
        policy = policies.setdefault(number, make_policy(plan, number))
        index = torch.arange(scores.shape[1], device=scores.device).where(visible, -1)
        rank = visible.flip(-1).cumsum(-1).flip(-1) - 1
        seen = torch.full((1, 1, 1), scores.shape[1], device=scores.device)
        candidates = Candidates(scores.where(visible, -torch.inf)[None], index[None], rank[None], seen)
        worth = policy.worth(candidates, Protection(plan.sinks, (), plan.recent))
        kept, _ = select(worth, candidates.index, min(plan.window, scores.shape[1]))
        return torch.zeros_like(visible).scatter_(1, kept[0], True)

    return choose


def masked_plan(config: CacheConfig) -> CachePlan:
    """The plan of a policy that is masked, at true positions.

    Raises:
        ConfigError: it asks for other positions, or for fewer bits.
    """
    plan = config.plan()
    if config.positions not in (None, "absolute"):
        raise ConfigError(f"positions is {config.positions!r}; --masked takes --positions absolute only")
    if plan.kv_bits != 16:
        raise ConfigError(f"kv_bits is {plan.kv_bits}; --masked takes --kv-bits 16 only")
    return plan


def ruled_nll(
    model: Any, plan: CachePlan, rule: Rule | None, tokens: Sequence[int]
) -> Iterator[JobProgress | JobResult]:
    """The losses of a text while a rule says what queries see; see `MaskedStream`. Yields what `stream_nll` does."""
    start_time, total, context = time.perf_counter(), len(tokens) - 1, context_of(model.config)
    chunk = chunk_of(plan)
    if context is not None and total > context:
        raise ConfigError(f"tokens is {total}, the model has {context} positions, which are true here; lower --tokens")
    with masked_attention(model):
        stream = MaskedStream(model, plan, rule)

        def feed(tokens: Sequence[int], expected: Sequence[int]) -> Losses:
            logits = stream.feed(tokens).float()
            targets = torch.tensor(expected, device=logits.device)
            return numpy.asarray(cross_entropy(logits, targets, reduction="none").cpu())

        losses = yield from losses_of(tokens, chunk, feed)
        figures = {"window": plan.window, "cache_bytes": stream.nbytes, "steps": "eager: tokens are masked"}
    yield JobResult({**figures, "tok_s": total / (time.perf_counter() - start_time)}, losses)


@contextmanager
def masked_attention(model: Any) -> Iterator[None]:
    """Within the block, the forward of a `MaskedStream` of this model attends through it."""
    with using_attention(model, attention_names(model)):
        model.set_attn_implementation(_NAME)
        yield


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    masked_stream: MaskedStream | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls; see `MaskedStream.attend`."""
    name: str | None = next((name for name in _UNSUPPORTED if kwargs.get(name) is not None), None)
    if masked_stream is None or name:
        raise UnsupportedModelError(f"{type(module).__name__} cannot be masked: {name or 'keywords do not reach it'}")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    number: int = module.layer_idx  # type: ignore[assignment]
    return masked_stream.attend(number, query, key, value, scaling), None


AttentionInterface.register(_NAME, _attention)
