"""A naive decoder with an evicting cache, written from the definitions, independent of h2o_stream.

One Python list of tokens per layer and KV head. For every query, all keys get new positions by the definition of the
position mode. Keys are pruned first and then rotated by the model's own rotary functions. Queries and keys come from
the model at position 0, where RoPE rotates nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface


@dataclass(eq=False)
class Kept:
    index: int
    key: Tensor
    value: Tensor
    score: float = 0.0
    long_term_score: float = 0.0


@dataclass(frozen=True)
class Asked:
    """The queries [G, D] of a token's group and the factor on their products."""

    queries: Tensor
    scaling: float


@dataclass(frozen=True)
class Evicted:
    """Key and value [D] of an evicted token; the key is rotated by the token's distance at that moment."""

    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class Visible:
    """The n tokens that a query sees: key [n, D], value [n, D], and the age and span [n] of each."""

    key: Tensor
    value: Tensor
    age: Tensor
    span: Tensor


@dataclass
class Rules:
    window: int
    heavy: int
    sinks: int = 0
    decay: float = 1.0
    positions: str = "rolling"
    span: int = 0
    rule: str = "accumulated"
    long_term: float = 0.0
    folding: str = ""
    limits: Callable[[int, int, int], int] | None = None
    recents: Callable[[int, int], int] | None = None
    """Window by layer, head and tokens seen, where windows differ; and number of recent tokens by layer and head."""
    pins: tuple[range, ...] = ()
    transient: tuple[tuple[int, range], ...] = ()
    """How many tokens were seen when tokens were said to be evicted first, and which."""

    def pinned(self, index: int) -> bool:
        return any(index in pin for pin in self.pins)

    def is_transient(self, index: int, seen: int) -> bool:
        return any(index in tokens for since, tokens in self.transient if since < seen)


@dataclass
class Oracle:
    """Feeds tokens through a model; `margin` is the smallest relative gap between kept and evicted priorities."""

    model: nn.Module
    rules: Rules
    seen: int = 0
    margin: float = math.inf
    held: dict[int, list[list[Kept]]] = field(default_factory=dict)
    asked: dict[tuple[int, int], list[Asked]] = field(default_factory=dict)
    """By layer and KV head, what every token asked."""
    evicted: dict[tuple[int, int], list[Evicted]] = field(default_factory=dict)
    """By layer and KV head, what the queries still see of evicted tokens."""

    def __post_init__(self) -> None:
        text = self.model.config.get_text_config()
        window = getattr(text, "sliding_window", None)
        kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
        self.kinds = kinds
        self.windows = [window if kind == "sliding_attention" else None for kind in kinds]
        self.rotary = next((module for module in self.model.modules() if hasattr(module, "rope_type")), None)
        self.tables: dict[str, tuple[Tensor, Tensor]] = {}  # cos and sin by distance, for each layer type

    def feed(self, tokens: list[int]) -> Tensor:
        """Feed a chunk: attend to the kept tokens and causally within the chunk, then evict. Returns logits [n, V]."""
        positions = (
            torch.arange(self.seen, self.seen + len(tokens)) if self.rotary is None else torch.zeros(len(tokens))
        )
        config = self.model.config
        previous, config._attn_implementation = config._attn_implementation, "oracle"
        try:
            logits = self.model(
                torch.tensor([tokens]), position_ids=positions.long()[None], use_cache=False, oracle=self
            ).logits[0]
        finally:
            config._attn_implementation = previous
        self.seen += len(tokens)
        return logits

    def layer(self, number: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, softcap: float | None) -> Tensor:
        """Attention of one layer: q [Hq, n, D], k and v [Hkv, n, D] to [n, Hq, D]."""
        heads, new, _ = k.shape
        groups, rules = q.shape[0] // heads, self.rules
        own_window = self.windows[number] if None in self.windows else None
        lists = self.held.setdefault(number, [[] for _ in range(heads)])
        mixed = torch.zeros(new, q.shape[0], v.shape[-1])
        for head in range(heads):
            held = lists[head]
            held += [Kept(self.seen + i, k[head, i], v[head, i]) for i in range(new)]
            received = torch.zeros(len(held), dtype=torch.float64)
            found = torch.zeros(len(held), dtype=torch.float64)
            keys, values = (torch.stack([getattr(token, name) for token in held]) for name in ("key", "value"))
            indices = torch.tensor([token.index for token in held])
            spans = torch.tensor([0 if rules.pinned(token.index) else rules.span for token in held])
            for i in range(new):
                queries, count = q[head * groups : (head + 1) * groups, i], len(held) - new + i + 1
                self.asked.setdefault((number, head), []).append(Asked(queries, scaling))
                visible = Visible(keys[:count], values[:count], self.seen + i - indices[:count], spans[:count])
                extra = folded(rules.folding, self.evicted.get((number, head), []), queries * scaling)
                weights, output = self.attend(number, queries, visible, scaling, softcap, own_window, extra)
                mixed[i, head * groups : (head + 1) * groups] = output
                if rules.rule == "tova":
                    received.zero_()
                received[: weights.shape[1]] += weights.sum(0).double() * rules.decay ** min(new - 1 - i, 64)
                old = int((indices < self.seen + i // 64 * 64 - 64).sum())
                if old > 0:
                    found[:old] += weights[:, :old].double().square().sum(0) * 0.999 ** (new - 1 - i)
            for token, gained, sharply in zip(held, received.tolist(), found.tolist(), strict=True):
                token.long_term_score = token.long_term_score * 0.999**new + sharply
                token.score = gained + (0 if rules.rule == "tova" else token.score * rules.decay**new)
            if own_window is None:
                lists[head] = self.evict(held, number, head, self.seen + new)
                if rules.folding and self.windows[number] is None:
                    self.fold(held, lists[head], number, head, self.seen + new)
        return mixed

    def attend(
        self,
        number: int,
        queries: Tensor,
        visible: Visible,
        scaling: float,
        softcap: float | None,
        own_window: int | None,
        extra: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """A group's attention weights [G, n] on the visible tokens, and its outputs [G, D].

        `extra` is one more logit [G, 1] and value [G, D].
        """
        positions = "absolute" if own_window else self.rules.positions
        age = distance = visible.age
        if positions != "absolute":
            distance = torch.arange(len(age) - 1, -1, -1)  # the rank
        if positions == "gap":
            distance = torch.minimum(age, visible.span + distance)
        keys = self.rotate(number, visible.key, distance)
        logits = queries @ keys.T * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        window = self.windows[number]
        if window is not None and positions == "absolute":
            logits[:, age >= window] = -torch.inf
        if extra is not None:
            weights = torch.cat((logits, extra[0]), 1).softmax(-1)
            return weights[:, :-1], weights[:, :-1] @ visible.value + weights[:, -1:] * extra[1]
        weights = logits.softmax(-1)
        return weights, weights @ visible.value

    def rotate(self, number: int, x: Tensor, distance: Tensor) -> Tensor:
        """Rotate x [n, D] from position 0 to minus its distances."""
        if self.rotary is None:
            return x
        kind = self.kinds[number]
        if kind not in self.tables:
            which = (kind,) if isinstance(self.rotary.rope_type, dict) else ()
            self.tables[kind] = self.rotary(x, -torch.arange(512.0)[None], *which)
        cos, sin = self.tables[kind]
        turn: Any = sys.modules[type(self.rotary).__module__].apply_rotary_pos_emb
        rotary_dims, scale = cos.shape[-1], cos[0, 0, 0]  # the model applies the scale at position 0 too
        x = torch.cat((x[:, :rotary_dims] / scale, x[:, rotary_dims:]), dim=-1)
        return turn(x[None, None], x[None, None], cos[:, distance], sin[:, distance])[1][0, 0]

    def evict(self, held: list[Kept], layer: int, head: int, seen: int) -> list[Kept]:
        """Cookbook's HHCache: beyond W tokens, keep the last R, the sinks, and those with the highest priority."""
        rules = self.rules
        window = rules.limits(layer, head, seen) if rules.limits else rules.window
        if len(held) <= window:
            return held
        recent = rules.recents(layer, head) if rules.recents else rules.window - rules.heavy - rules.sinks
        old, new = held[: len(held) - recent], held[len(held) - recent :]
        kept = [token for token in old if token.index < rules.sinks or rules.pinned(token.index)]
        others = [token for token in old if token not in kept]
        rule = "recency" if rules.heavy == 0 else rules.rule
        worth = {
            "accumulated": lambda token: token.score + rules.long_term * token.long_term_score,
            "tova": lambda token: token.score,
            "recency": lambda token: token.index,
            "random": lambda token: drawn(token.index, layer, head, seen),
            "nexus": lambda token: token.score / -math.log(drawn(token.index, layer, head, 0) + 2.0**-25),
            "morphkv": lambda token: fused[token],
            "snapkv": lambda token: fused[token],
        }[rule]
        fused = {"morphkv": morphkv, "snapkv": snapkv}[rule](self, held, layer, head) if rule in OBSERVING else {}
        others.sort(key=worth, reverse=True)
        first_out = [token for token in others if rules.is_transient(token.index, seen)]
        others = [token for token in others if token not in first_out]
        room = window - recent - len(kept)
        margin_counts = 0 < room < len(others) and rule in ("accumulated", "tova", "nexus", *OBSERVING)
        others += sorted(first_out, key=lambda token: token.index, reverse=True)
        if margin_counts:
            last, first = worth(others[room - 1]), worth(others[room])
            if rule != "snapkv" or last != first:
                self.margin = min(self.margin, (last - first) / abs(last or 1))
        return sorted([*kept, *others[:room], *new], key=lambda token: token.index)

    def fold(self, held: list[Kept], kept: list[Kept], layer: int, head: int, seen: int) -> None:
        """Remember the tokens that were held and are not kept."""
        for place, token in enumerate(held):
            if token in kept or self.rules.is_transient(token.index, seen):
                continue
            age, rank = seen - 1 - token.index, len(held) - 1 - place
            distance = {"absolute": 0, "rolling": rank, "gap": min(age, self.rules.span + rank)}[self.rules.positions]
            key = self.rotate(layer, token.key[None], torch.tensor([distance]))[0]
            self.evicted.setdefault((layer, head), []).append(Evicted(key, token.value))

    def kept(self, layer: int) -> list[list[int]]:
        return [[token.index for token in head] for head in self.held[layer]]


def drawn(index: int, layer: int, head: int, seen: int) -> float:
    """Priority under the random policy: MurmurHash3's finalizer applied three times."""

    def mix(x: int) -> int:
        x &= 0xFFFFFFFF
        x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        return x ^ x >> 16

    return (mix(mix(mix(seen) + 0x10001 * layer + head) + index) & 0xFFFFFF) / 2**24


def oracle_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    *,
    oracle: Oracle,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    return oracle.layer(module.layer_idx, query[0], key[0], value[0], scaling, softcap)[None], None


AttentionInterface.register("oracle", oracle_attention)


# Policies of the newest queries.

OBSERVING = ("morphkv", "snapkv")


def observed(oracle: Oracle, held: list[Kept], layer: int, head: int) -> list[dict[Kept, Tensor]]:
    """The attention [G] of each of the newest queries, of at most 32 and of recent tokens only, to the held tokens."""
    rules, asked = oracle.rules, oracle.asked[layer, head]
    recent = rules.recents(layer, head) if rules.recents else rules.window - rules.heavy - rules.sinks
    rows = []
    for t in range(max(len(asked) - min(recent, 32), 0), len(asked)):
        visible = [token for token in held if token.index <= t]
        tensors = Visible(
            torch.stack([token.key for token in visible]),
            torch.stack([token.value for token in visible]),
            torch.tensor([t - token.index for token in visible]),
            torch.tensor([0 if rules.pinned(token.index) else rules.span for token in visible]),
        )
        weights, _ = oracle.attend(layer, asked[t].queries, tensors, asked[t].scaling, None, None)
        rows.append(dict(zip(visible, weights.T, strict=True)))
    return rows


def morphkv(oracle: Oracle, held: list[Kept], layer: int, head: int) -> dict[Kept, float]:
    """The most that a query pays, summed over the group."""
    rows = observed(oracle, held, layer, head)
    return {token: max(float(row[token].sum()) if token in row else 0.0 for row in rows) for token in held}


def snapkv(oracle: Oracle, held: list[Kept], layer: int, head: int) -> dict[Kept, float]:
    """What all queries pay, the most of three neighbours on either side; where they share it, the older stays."""
    rows = observed(oracle, held, layer, head)
    observers = range(len(oracle.asked[layer, head]) - len(rows), len(oracle.asked[layer, head]))
    sums = [
        0.0 if token.index in observers else sum(float(row[token].sum()) for row in rows if token in row)
        for token in held
    ]
    return {token: max(sums[max(place - 3, 0) : place + 4]) for place, token in enumerate(held)}


# Folding: what a query sees of the evicted tokens, besides those that are held.


def folded(folding: str, evicted: list[Evicted], queries: Tensor) -> tuple[Tensor, Tensor] | None:
    """One more logit [G, 1] and value [G, D] for scaled queries [G, D]; None while nothing is evicted."""
    if not evicted or not folding:
        return None
    keys, values = (torch.stack([getattr(token, name) for token in evicted]) for name in ("key", "value"))
    logits = queries @ keys.mean(0) + math.log(len(evicted))
    value = values.mean(0).expand(len(queries), -1)
    if folding == "moments":
        covariance = sum(torch.outer(v - values.mean(0), k - keys.mean(0)) for k, v in zip(keys, values, strict=True))
        value = value + queries @ (covariance / len(evicted)).T
    return logits[:, None], value
