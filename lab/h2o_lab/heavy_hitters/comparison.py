"""The observations behind H2O: how sparse attention is, which tokens get it, and how much of it a policy keeps.

Each policy first reads the text, and the tokens that every layer and head holds are recorded after every chunk. Then
the text is read once without eviction, to measure how much of each query's attention falls on the recorded tokens, and
how it goes with the words of the text. Last, the text is read while a part of the tokens is masked: the heavy hitters,
or as many at random, in each case with and without the first tokens, which are heavy hitters of their own kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from h2o_lab.heavy_hitters.options import HeavyHittersOptions
from h2o_lab.heavy_hitters.removal import REMOVED, Removal
from h2o_lab.heavy_hitters.statistics import power_law, share_of_top, sparsity
from h2o_lab.heavy_hitters.words import word_attention
from h2o_lab.masked.masking import ruled_nll
from h2o_stream.attachment.attach import attach
from h2o_stream.attachment.model_facts import context_of, input_device
from h2o_stream.compare.comparison import Comparison, Job, JobProgress, Notify
from h2o_stream.compare.folder import JobResult, identity
from h2o_stream.compare.nll import digest_of, paired_difference, read_tokens
from h2o_stream.config import CacheConfig
from h2o_stream.errors import ConfigError

BEST = "best"
"""The upper bound: the tokens that a query attends to most, as many as fit the window."""

_TOP = 0.1
"""The share of all attention of this fraction of the tokens is reported."""

REMOVAL = "heavy-hitters-removal"
"""The type of a record that says what happens when tokens are removed."""

_RANKS = 60
"""Approximate number of points of the power law in a record."""


class HeavyHitters(Comparison[HeavyHittersOptions]):
    """The statistics of `measure_attention` on a text."""

    name = "heavy-hitters"

    _stream: list[int]

    def begin(self, notify: Notify) -> dict[str, Any]:
        """Load the model and read the text."""
        settings = self.load_model(notify)
        self._stream = read_tokens(self.options.text, self.tokenizer, self.options.tokens - 1)
        return {
            **settings,
            "text": str(self.options.text),
            "digest": digest_of(self._stream),
            "tokens": len(self._stream),
            "window": self.options.window,
            "seed": None,
        }

    def jobs(self) -> list[Job]:
        """One for all policies, which are measured in the same pass, and one for each way to remove tokens."""
        key = {
            "what": f"{self.name}, words",
            "tokens": digest_of(self._stream),
            "chunk": self.options.chunk,
            "policies": [identity(self.model, config) for config in self.configs],
        }
        whole = {"what": f"{self.name} removal", "tokens": key["tokens"], "chunk": key["chunk"]}
        whole |= {"model": identity(self.model, CacheConfig("full"))}
        removals = [
            Job(str(removal), {**whole, **asdict(removal)}, len(self._stream) - 1, partial(self._remove, removal))
            for removal in self._removals
        ]
        return [Job("attention", key, len(self._stream) * (len(self.configs) + 1), self._measure), *removals]

    @property
    def _removals(self) -> list[Removal]:
        """Nothing removed, and then every way with every percentage."""
        percentages = self.options.remove
        return [Removal("nothing", 0), *(Removal(by, n) for n in percentages for by in REMOVED)] if percentages else []

    def _remove(self, removal: Removal) -> Iterator[JobProgress | JobResult]:
        config = CacheConfig("h2o-paper", len(self._stream), positions="absolute", chunk=self.options.chunk)
        return ruled_nll(self.model, config.plan(), removal.rule, self._stream)

    def _measure(self) -> Iterator[JobProgress | JobResult]:
        for event in measure_attention(self.model, self._stream, self.configs, self.options.chunk):
            if isinstance(event, JobProgress):
                yield event
                continue
            ranks = sorted({round(len(event[0].scores) ** (n / _RANKS)) for n in range(_RANKS + 1)})
            yield JobResult(
                {
                    "layers": [
                        {
                            **{name: value for name, value in asdict(layer).items() if name != "received"},
                            "words": asdict(word_attention(self._stream, layer.received)),
                            "ranks": ranks,
                            "scores": [round(float(layer.scores[rank - 1]), 4) for rank in ranks],
                        }
                        for layer in event
                    ]
                }
            )

    def records(self, results: Iterable[JobResult]) -> Iterator[dict[str, Any]]:
        """One for each layer, and one for each way to remove tokens."""
        measured, *removed = results
        for layer in measured.figures["layers"]:
            yield {"type": self.name, "text": str(self.options.text), "window": self.options.window, **layer}
        for removal, result in zip(self._removals, removed, strict=True):
            losses = result.values
            assert losses is not None
            yield {
                "type": REMOVAL,
                **asdict(removal),
                "nll": float(losses.mean(dtype=float)),
                "to_full": paired_difference(losses, removed[0].values)._asdict(),
            }


@dataclass
class LayerAttention:
    """Statistics of the full attention of a layer.

    Attributes:
        layer: its number.
        sparsity: fraction of the visible tokens with less than 1% of a query's largest attention, mean over queries
            and heads.
        scores: [N] float32, attention each token received, mean over KV heads of the sorted sums, largest first.
        exponent: exponent of the power law of these sums.
        top_share: fraction of all attention that the `_TOP` most attended tokens receive.
        mass: for each policy, the share of later queries' attention that falls on the tokens it holds.
        received: [N] float32, the sums in the order of the tokens, mean over KV heads.
    """

    layer: int
    sparsity: float
    scores: Tensor
    exponent: float
    top_share: float
    mass: dict[str, float]
    received: Tensor


@torch.no_grad()
def measure_attention(
    model: Any, tokens: Sequence[int], configs: Sequence[CacheConfig], chunk: int
) -> Iterator[JobProgress | list[LayerAttention]]:
    """Measure the attention of every layer on a text within the context of a model without sliding windows.

    All configs have the same window; `chunk` tokens are fed between two evictions. Yields `JobProgress`, and last one
    `LayerAttention` for each layer that is not a sliding one.

    Raises:
        ConfigError: the text does not fit the model, or is no longer than the window.
    """
    context, window = context_of(model.config), max((config.window for config in configs), default=0)
    if context is not None and len(tokens) > context:
        raise ConfigError(f"tokens is {len(tokens)}, the model has {context} positions; lower --tokens")
    if len(tokens) <= window + chunk:
        raise ConfigError(f"{len(tokens)} tokens are no more than window {window} + chunk {chunk}; raise --tokens")
    kept: dict[str, list[list[Tensor]]] = {}
    for number, config in enumerate(configs):
        with attach(model, config) as cache:
            layers = cache.evicting_layers
            kept[config.policy] = steps = []
            for done in _feed_chunks(model, cache, tokens, chunk):
                steps.append([cache.kept(layer)[0].to(torch.int32) for layer in layers])
                yield JobProgress(number * len(tokens) + done, config.policy)
    everything = CacheConfig("h2o-paper", window=len(tokens), positions="absolute", chunk=chunk)
    with attach(model, everything) as cache:
        layers = cache.evicting_layers
        statistics = [
            _AttentionStatistics(window, {name: [step[i] for step in steps] for name, steps in kept.items()})
            for i in layers
        ]
        for layer, number in zip(statistics, layers, strict=True):
            cache.layers[number].head_groups[0].watch = layer
        for done in _feed_chunks(model, cache, tokens, chunk):
            yield JobProgress(len(configs) * len(tokens) + done, "full attention")
    yield [layer.result(number) for layer, number in zip(statistics, layers, strict=True)]


def _feed_chunks(model: Any, cache: Any, tokens: Sequence[int], chunk: int) -> Iterator[int]:
    ids = torch.tensor([list(tokens)], device=input_device(model))
    for start in range(0, len(tokens), chunk):
        piece = ids[:, start : start + chunk]
        model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
        yield start + piece.shape[1]


@dataclass
class _AttentionStatistics:
    """Statistics of the attention of a layer, accumulated chunk by chunk.

    `kept` has the token indices [Hkv, n] held after each chunk, by policy, padded with -1.
    """

    window: int
    kept: dict[str, list[Tensor]]
    received: Tensor | None = None
    sparsity: float = 0.0
    queries: int = 0
    measured: int = 0
    chunks: int = 0
    mass: dict[str, float] = field(default_factory=dict)

    def __call__(self, probs: Tensor, visible: Tensor) -> None:
        """See `HeadGroup.watch`: probs [1, Hkv, G, Q, K] of a cache that has evicted nothing, K in token order."""
        *_, new, seen = probs.shape
        query_index = torch.arange(seen - new, seen, device=probs.device)
        causal = torch.arange(seen, device=probs.device) <= query_index[:, None]
        self.sparsity += float(sparsity(probs, causal).mean((0, 1, 2)).sum())
        self.queries += new
        received = probs[0].sum((1, 2))
        if self.received is not None:
            received[:, : self.received.shape[1]] += self.received
        self.received = received
        if seen - new > self.window:
            self._add_mass(probs[0], seen - new)
        self.chunks += 1

    def _add_mass(self, probs: Tensor, start: int) -> None:
        """Add the attention [Hkv, G, Q, K] on the tokens held before `start` and on the chunk itself."""
        for name, steps in self.kept.items():
            kept, places = steps[self.chunks - 1].long(), probs.shape[-1]
            held = torch.zeros(probs.shape[0], places + 1, device=probs.device)
            held = held.scatter_(1, kept.where(kept >= 0, places), 1.0)[:, :places]
            held[:, start:] = 1.0
            self._add(name, (probs * held[:, None, None]).sum(-1))
        chunk_mass = probs[..., start:].sum(-1)
        self._add(BEST, probs[..., :start].topk(self.window, dim=-1).values.sum(-1) + chunk_mass)
        self.measured += probs.shape[2]

    def _add(self, name: str, mass: Tensor) -> None:
        self.mass[name] = self.mass.get(name, 0.0) + float(mass.mean((0, 1)).sum())

    def result(self, layer: int) -> LayerAttention:
        assert self.received is not None
        scores = self.received.sort(-1, descending=True).values.mean(0).cpu()
        return LayerAttention(
            layer=layer,
            sparsity=self.sparsity / self.queries,
            scores=scores,
            exponent=power_law(scores),
            top_share=share_of_top(scores, _TOP),
            mass={name: mass / self.measured if self.measured else math.nan for name, mass in self.mass.items()},
            received=self.received.mean(0).cpu(),
        )
