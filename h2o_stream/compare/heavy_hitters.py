"""The observations behind H2O on a text: how sparse attention is, who gets it, and how much of it a policy keeps.

A policy is first run for real, and what each layer and head holds is written down after every chunk. Then the text is
read once with nothing evicted, and for each query it is measured how much of its attention falls on what the policy
held at that moment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from h2o_stream.cache.attach import attach
from h2o_stream.cache.identity import model_digest
from h2o_stream.cache.statistics import power_law, share_of_top, sparsity
from h2o_stream.cache.support import context_of, home_of
from h2o_stream.compare.comparison import Comparison, Doing, Job, Notify, told
from h2o_stream.compare.comparisons import HeavyHittersOptions
from h2o_stream.compare.folder import Part, identity
from h2o_stream.compare.nll import digest_of, read_tokens
from h2o_stream.config import CacheConfig
from h2o_stream.errors import ConfigError
from h2o_stream.models.load import load

BEST = "best"
"""The name of the bound: for each query the tokens it attends to most, as many as the window has."""

TOP = 0.1
"""Part of the tokens whose share of all attention is told."""


_RANKS = 60
"""Points of the power law in a record, about."""


class HeavyHitters(Comparison[HeavyHittersOptions]):
    """What `observe` measures on a text."""

    name = "heavy-hitters"

    def __init__(self, options: HeavyHittersOptions) -> None:
        super().__init__(options)
        self._model: Any = None
        self._stream: list[int] = []

    def begin(self, notify: Notify) -> dict[str, Any]:
        """Load the model and read the text."""
        loaded = load(self.options.model, notify=notify)
        self._model = loaded.model
        self._stream = read_tokens(self.options.text, loaded.tokenizer, self.options.tokens - 1)
        return {
            "model": loaded.name,
            "identity": model_digest(self._model),
            "text": str(self.options.text),
            "digest": digest_of(self._stream),
            "tokens": len(self._stream),
            **told(self.configs),
            "window": self.options.window,
            "seed": None,
        }

    def jobs(self) -> list[Job]:
        """A single one, since what the policies held is judged together."""
        key = {
            "what": self.name,
            "tokens": digest_of(self._stream),
            "chunk": self.options.chunk,
            "policies": [identity(self._model, config) for config in self.configs],
        }
        return [Job("attention", key, len(self._stream) * (len(self.configs) + 1), self._observed)]

    def _observed(self) -> Iterator[Doing | Part]:
        before: list[str] = []
        for event in observe(self._model, self._stream, self.configs, self.options.chunk):
            if isinstance(event, Progress):
                before += [event.name] if event.name not in before else []
                yield Doing((len(before) - 1) * event.total + event.done, event.name)
                continue
            ranks = sorted({round(len(event[0].scores) ** (n / _RANKS)) for n in range(_RANKS + 1)})
            yield Part(
                {
                    "layers": [
                        {
                            **asdict(layer),
                            "ranks": ranks,
                            "scores": [round(float(layer.scores[rank - 1]), 4) for rank in ranks],
                        }
                        for layer in event
                    ]
                }
            )

    def records(self, parts: Iterable[Part]) -> Iterator[dict[str, Any]]:
        """One for each layer."""
        for part in parts:
            for layer in part.figures["layers"]:
                yield {"type": self.name, "text": str(self.options.text), "window": self.options.window, **layer}


@dataclass
class LayerAttention:
    """What a layer's full attention looks like.

    Attributes:
        layer: its number.
        sparsity: part of what a query sees that gets less than 1% of its largest attention, mean over queries, heads.
        scores: [N] float32, attention each token received, mean over KV heads of the sorted sums, largest first.
        exponent: of the power law of these sums.
        top_share: part of all attention that the `TOP` most attended tokens received.
        mass: by policy, part of the attention of queries beyond the window that falls on what it holds.
    """

    layer: int
    sparsity: float
    scores: Tensor
    exponent: float
    top_share: float
    mass: dict[str, float]


@dataclass(frozen=True)
class Progress:
    """Tokens read so far in one of the passes, which is named after a policy, or "full attention"."""

    name: str
    done: int
    total: int


@torch.no_grad()
def observe(
    model: Any, tokens: Sequence[int], configs: Sequence[CacheConfig], chunk: int
) -> Iterator[Progress | list[LayerAttention]]:
    """Measure the attention of every layer on a text.

    Args:
        model: a causal language model of transformers, all of whose layers see everything.
        tokens: the text, within the model's context.
        configs: policies, all of one window.
        chunk: tokens between two evictions.

    Yields:
        `Progress`, and last the result, one `LayerAttention` for each layer that is not a sliding one.

    Raises:
        ConfigError: the text does not fit the model, or is no longer than the window.
    """
    context, window = context_of(model.config), max((config.window for config in configs), default=0)
    if context is not None and len(tokens) > context:
        raise ConfigError(f"tokens is {len(tokens)}, the model has {context} positions; lower --tokens")
    if len(tokens) <= window + chunk:
        raise ConfigError(f"{len(tokens)} tokens are no more than window {window} + chunk {chunk}; raise --tokens")
    kept: dict[str, list[list[Tensor]]] = {}
    for config in configs:
        with attach(model, config) as cache:
            layers = cache.evicting_numbers
            kept[config.policy] = steps = []
            for done in _fed(model, cache, tokens, chunk):
                steps.append([cache.kept(number)[0].to(torch.int32) for number in layers])
                yield Progress(config.policy, done, len(tokens))
    everything = CacheConfig("h2o-paper", window=len(tokens), positions="absolute", chunk=chunk)
    with attach(model, everything) as cache:
        layers = cache.evicting_numbers
        watches = [_Watch(window, {name: [step[i] for step in steps] for name, steps in kept.items()}) for i in layers]
        for watch, number in zip(watches, layers, strict=True):
            cache.layers[number].watch = watch
        for done in _fed(model, cache, tokens, chunk):
            yield Progress("full attention", done, len(tokens))
    yield [watch.result(number) for watch, number in zip(watches, layers, strict=True)]


def _fed(model: Any, cache: Any, tokens: Sequence[int], chunk: int) -> Iterator[int]:
    ids = torch.tensor([list(tokens)], device=home_of(model))
    for start in range(0, len(tokens), chunk):
        part = ids[:, start : start + chunk]
        model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        yield start + part.shape[1]


@dataclass
class _Watch:
    """Adds up what the attention of one layer shows, chunk after chunk.

    Attributes:
        window: of the policies.
        kept: by policy and chunk, [Hkv, n] token indices held after that chunk, -1 where a head holds fewer.
    """

    window: int
    kept: dict[str, list[Tensor]]
    received: Tensor | None = None
    ignored: float = 0.0
    queries: int = 0
    judged: int = 0
    chunks: int = 0
    mass: dict[str, float] = field(default_factory=dict)

    def __call__(self, probs: Tensor, visible: Tensor, step: int) -> None:
        """See `SlotLayer.watch`: probs [1, Hkv, G, Q, K] of a cache that has evicted nothing, K in token order."""
        *_, new, seen = probs.shape
        asked_at = torch.arange(seen - new, seen, device=probs.device)
        causal = torch.arange(seen, device=probs.device) <= asked_at[:, None]
        self.ignored += float(sparsity(probs, causal).mean((0, 1, 2)).sum())
        self.queries += new
        received = probs[0].sum((1, 2))
        if self.received is not None:
            received[:, : self.received.shape[1]] += self.received
        self.received = received
        if seen - new > self.window:
            self._judge(probs[0], seen - new)
        self.chunks += 1

    def _judge(self, probs: Tensor, start: int) -> None:
        """How much of the attention [Hkv, G, Q, K] falls on what was held before `start`, and on the chunk itself."""
        for name, steps in self.kept.items():
            kept, places = steps[self.chunks - 1].long(), probs.shape[-1]
            held = torch.zeros(probs.shape[0], places + 1, device=probs.device)
            held = held.scatter_(1, kept.where(kept >= 0, places), 1.0)[:, :places]
            held[:, start:] = 1.0
            self._add(name, (probs * held[:, None, None]).sum(-1))
        own = probs[..., start:].sum(-1)
        self._add(BEST, probs[..., :start].topk(self.window, dim=-1).values.sum(-1) + own)
        self.judged += probs.shape[2]

    def _add(self, name: str, mass: Tensor) -> None:
        self.mass[name] = self.mass.get(name, 0.0) + float(mass.mean((0, 1)).sum())

    def result(self, layer: int) -> LayerAttention:
        """What all chunks together show."""
        assert self.received is not None
        scores = self.received.sort(-1, descending=True).values.mean(0).cpu()
        return LayerAttention(
            layer=layer,
            sparsity=self.ignored / self.queries,
            scores=scores,
            exponent=power_law(scores),
            top_share=share_of_top(scores, TOP),
            mass={name: mass / self.judged if self.judged else math.nan for name, mass in self.mass.items()},
        )
