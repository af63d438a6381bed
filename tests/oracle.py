"""A naive decoder with an evicting cache, written from the definitions, independent of h2o_stream.

One Python list of tokens per layer and KV head. For every query, all keys get new positions by the definition of the
position mode. Keys are pruned first and then rotated by the model's own rotary functions. Queries and keys come from
the model at position 0, where RoPE rotates nothing.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache

from tests.literature import PRIORITIES, Head, drawn

STATES = {"linear_attention", "conv", "moe", "mlp"}
"""Layers without attention. Those named hybrid have both."""

ALONE = ("gemma4_text", "gemma3n_text")
"""Families that rotate queries and keys by a call for each."""


def learned_nothing(text: Any) -> bool:
    """Whether a model without RoPE has no positions at all, because other layers carry the order of tokens."""
    return bool({"linear_attention", "conv"}.intersection(getattr(text, "layer_types", None) or ()))


def cache_of(model: Any) -> Any:
    return getattr(sys.modules[type(model).__module__], "MiniMaxCache", lambda: DynamicCache(config=model.config))()


@dataclass(eq=False)
class Kept:
    index: int
    key: Tensor
    value: Tensor
    score: float = 0.0
    long_term_score: float = 0.0


@dataclass(frozen=True)
class Visible:
    """What a query sees, itself last: key [n, D] and value [n, D] of n tokens, and their age, span and index [n]."""

    key: Tensor
    value: Tensor
    age: Tensor
    span: Tensor
    index: Tensor


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
    chunk: int = 0
    margin: float = math.inf
    held: dict[int, list[list[Kept]]] = field(default_factory=dict)
    queries: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    """By layer and head: [G, D] of every token, scaled."""

    def __post_init__(self) -> None:
        text = self.model.config.get_text_config()
        window = getattr(text, "sliding_window", None)
        kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
        self.kinds = kinds
        self.windows = [window if kind == "sliding_attention" else None for kind in kinds]
        self.chunks = [text.attention_chunk_size if kind == "chunked_attention" else None for kind in kinds]
        self.latent = hasattr(text, "qk_rope_head_dim")  # rotary dimensions come last
        self.rotates = getattr(text, "no_rope_layers", None) or [
            text.model_type not in ("cohere2", "exaone4") or kind == "sliding_attention" for kind in kinds
        ]
        self.rotary = next((module for module in self.model.modules() if hasattr(module, "rope_type")), None)
        self.moves = self.rotary is not None or learned_nothing(text)
        carries = {*STATES, "hybrid"}.intersection(kinds)
        self.states = cache_of(self.model) if carries else None  # transformers' own, for what is no attention
        self.tables: dict[str, tuple[Tensor, Tensor]] = {}  # cos and sin by distance, for each layer type

    def feed(self, tokens: list[int], chunk: int = 0) -> Tensor:
        """Feed tokens. Of each chunk: attend to the kept tokens and causally within it, then evict.

        Returns logits [n, V]. All chunks go through the model together, 0 is one chunk.
        """
        self.chunk = chunk or len(tokens)
        positions = torch.zeros(len(tokens)) if self.moves else torch.arange(self.seen, self.seen + len(tokens))
        config = self.model.config
        previous, config._attn_implementation = config._attn_implementation, "oracle"
        try:
            logits = self.model(
                torch.tensor([tokens]),
                position_ids=positions.long()[None],
                past_key_values=self.states,
                use_cache=self.states is not None,
                oracle=self,
            ).logits[0]
        finally:
            config._attn_implementation = previous
        self.seen += len(tokens)
        return logits

    def layer(self, number: int, q: Tensor, k: Tensor, v: Tensor, *transform: Any) -> Tensor:
        """Attention of one layer, chunk by chunk; see `attend_chunk`."""
        before, outputs = self.seen, []
        for start in range(0, q.shape[1], self.chunk):
            self.seen = before + start
            part = (x[:, start : start + self.chunk] for x in (q, k, v))
            outputs.append(self.attend_chunk(number, *part, *transform))
        self.seen = before
        return torch.cat(outputs)

    def attend_chunk(
        self, number: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Attention of a chunk: q [Hq, n, D], k and v [Hkv, n, D], sinks [Hq] to [n, Hq, D]."""
        heads, new, _ = k.shape
        groups, rules = q.shape[0] // heads, self.rules
        attending = [window for window, kind in zip(self.windows, self.kinds, strict=True) if kind not in STATES]
        own_window = self.chunks[number] or (self.windows[number] if None in attending else None)
        sinks = torch.full((q.shape[0],), -torch.inf) if sinks is None else sinks
        lists = self.held.setdefault(number, [[] for _ in range(heads)])
        mixed = torch.zeros(new, q.shape[0], v.shape[-1])
        for head in range(heads):
            held = lists[head]
            asked = self.queries.setdefault((number, head), [])
            asked += (q[head * groups : (head + 1) * groups] * scaling).unbind(1)
            held += [Kept(self.seen + i, k[head, i], v[head, i]) for i in range(new)]
            received = torch.zeros(len(held), dtype=torch.float64)
            found = torch.zeros(len(held), dtype=torch.float64)
            keys, values = (torch.stack([getattr(token, name) for token in held]) for name in ("key", "value"))
            indices = torch.tensor([token.index for token in held])
            spans = torch.tensor([0 if rules.pinned(token.index) else rules.span for token in held])
            of_head = q[head * groups : (head + 1) * groups]
            for i in range(new):
                queries, count = of_head[:, i], len(held) - new + i + 1
                ages = self.seen + i - indices[:count]
                visible = Visible(keys[:count], values[:count], ages, spans[:count], indices[:count])
                sink = sinks[head * groups : (head + 1) * groups, None]
                weights, output = self.attend(number, queries, visible, scaling, softcap, own_window, sink)
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
        return mixed

    def attend(
        self,
        number: int,
        queries: Tensor,
        visible: Visible,
        scaling: float,
        softcap: float | None,
        own_window: int | None,
        sink: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """A group's attention weights [G, n] on the visible tokens, and its outputs [G, D].

        `sink` is one more logit [G, 1] without a value.
        """
        positions = "absolute" if own_window else self.rules.positions
        age = visible.age
        keys = self.rotate(number, visible.key, place(positions, age, visible.span))
        logits = queries @ keys.T * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        window = self.windows[number]
        if window is not None and positions == "absolute":
            logits[:, age >= window] = -torch.inf
        if chunk := self.chunks[number]:
            logits[:, visible.index // chunk < visible.index[-1] // chunk] = -torch.inf
        weights = torch.cat((logits, sink), 1).softmax(-1)[:, :-1]
        return weights, weights @ visible.value

    def table(self, number: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1, n, Drot] of a layer by distance, backwards."""
        if thetas := getattr(self.model.config, "layer_rope_theta", None):
            (rotary,) = (
                x for x in self.model.base_model.rotary_embs if x.config.rope_parameters["rope_theta"] == thetas[number]
            )
            return rotary(torch.zeros(1), -torch.arange(1024.0)[None])
        kind = self.kinds[number]
        if kind not in self.tables:
            which = (kind,) if isinstance(self.rotary.rope_type, dict) else ()
            self.tables[kind] = self.rotary(torch.zeros(1), -torch.arange(1024.0)[None], *which)
        return self.tables[kind]

    def rotary_dims(self, number: int) -> int:
        """Dimensions of a head that are rotated; these families have one number for two of them in their tables."""
        size = self.table(number)[0].shape[-1]
        return size * 2 if self.model.config.model_type in ("gpt_oss", "llama4_text") else size

    def rotate(self, number: int, x: Tensor, distance: Tensor) -> Tensor:
        """Rotate x [n, D] from position 0 to minus its distances."""
        if self.rotary is None or not self.rotates[number]:
            return x
        code: Any = sys.modules[type(self.rotary).__module__]
        if hasattr(code, "apply_rotary_emb"):
            turned: Tensor = code.apply_rotary_emb(x[None, :, None], x[None, :, None], self.table(number)[:, distance])[
                1
            ]
            return turned[0, :, 0]
        cos, sin = self.table(number)
        turn = code.apply_rotary_pos_emb
        if self.model.config.model_type == "gpt_oss":
            return turn(x[None, None], x[None, None], *(c[:, distance] / cos[0, 0, 0] for c in (cos, sin)))[1][0, 0]
        rotary_dims, scale = cos.shape[-1], cos[0, 0, 0]  # the model applies the scale at position 0 too
        before = x[:, : x.shape[-1] - rotary_dims] if self.latent else x[:, :0]
        x = x[:, before.shape[-1] :]
        x = torch.cat((x[:, :rotary_dims] / scale, x[:, rotary_dims:]), dim=-1)
        cos, sin, x = cos[:, distance], sin[:, distance], x[None, None]
        x = (turn(x, cos, sin) if self.model.config.model_type in ALONE else turn(x, x, cos, sin)[1])[0, 0]
        return torch.cat((before, x), dim=-1)

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
        by_token = {}
        if rule in PRIORITIES:
            by_token = dict(zip(held, PRIORITIES[rule](self.head(held, layer, head, seen)), strict=True))
        worth = {
            **dict.fromkeys(PRIORITIES, by_token.get),
            "accumulated": lambda token: token.score + rules.long_term * token.long_term_score,
            "tova": lambda token: token.score,
            "recency": lambda token: token.index,
            "random": lambda token: drawn(token.index, layer, head, seen),
            "nexus": lambda token: token.score / -math.log(drawn(token.index, layer, head, 0) + 2.0**-25),
        }[rule]
        others.sort(key=worth, reverse=True)
        first_out = [token for token in others if rules.is_transient(token.index, seen)]
        others = [token for token in others if token not in first_out]
        room = window - recent - len(kept)
        margin_counts = 0 < room < len(others) and rule in ("accumulated", "tova", "nexus", *PRIORITIES)
        others += sorted(first_out, key=lambda token: token.index, reverse=True)
        if margin_counts:
            last, first = worth(others[room - 1]), worth(others[room])
            scale = max(abs(worth(token)) for token in others) if by_token else abs(last or 1)
            if rule != "snapkv" or last != first:
                self.margin = min(self.margin, (last - first) / scale)
        return sorted([*kept, *others[:room], *new], key=lambda token: token.index)

    def head(self, held: list[Kept], layer: int, head: int, seen: int) -> Head:
        """What a head holds, for the policies from the literature."""
        rules, keys = self.rules, torch.stack([token.key for token in held])
        indices = [token.index for token in held]
        spans = torch.tensor([0 if rules.pinned(index) else rules.span for index in indices])
        distance = place(rules.positions, seen - 1 - torch.tensor(indices), spans)
        rotates = self.rotary is not None and self.rotates[layer] and rules.positions != "absolute"
        return Head(
            self.in_halves(layer, keys).double(), torch.stack([token.value for token in held]).double(),
            torch.tensor([token.score for token in held], dtype=torch.float64), indices, rules.sinks,
            rules.window - rules.heavy - rules.sinks,
            self.in_halves(layer, torch.stack(self.queries[layer, head])).double(),
            lambda steps: self.ahead(layer, keys, distance, steps), self.rotary_dims(layer) if rotates else 0,
            rules.span if rules.positions == "gap" else rules.window,
        )  # fmt: skip

    def ahead(self, layer: int, keys: Tensor, distance: Tensor, steps: list[int]) -> Tensor:
        """Keys [s, n, D], rotated by their distances and so many steps."""
        distances = torch.cat([distance + step for step in steps])
        rotated = self.rotate(layer, keys.repeat(len(steps), 1), distances)
        return self.in_halves(layer, rotated).view(len(steps), *keys.shape).double()

    def in_halves(self, layer: int, x: Tensor) -> Tensor:
        """Dimensions of x [..., D] in the order in which RoPE rotates two halves."""
        if self.rotary is None or not self.rotates[layer]:
            return x
        size, kind = self.rotary_dims(layer), self.model.config.model_type
        x = torch.cat((x[..., -size:], x[..., :-size]), -1) if self.latent else x
        rotary, others = x[..., :size], x[..., size:]
        if kind in ("glm", "cohere", "cohere2", "ernie4_5", "helium", "llama4_text"):
            rotary = torch.cat((rotary[..., ::2], rotary[..., 1::2]), -1)
        elif kind == "nanochat":
            rotary = rotary.roll(size // 2, -1)
        return torch.cat((rotary, others), -1)

    def kept(self, layer: int) -> list[list[int]]:
        return [[token.index for token in head] for head in self.held[layer]]


def place(positions: str, age: Tensor, span: Tensor) -> Tensor:
    """The distances of keys from a query, by their ages and spans, oldest key first."""
    rank = torch.arange(len(age) - 1, -1, -1)
    return {"absolute": age, "rolling": rank, "gap": torch.minimum(age, span + rank)}[positions]


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
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    new = query.shape[2]  # transformers' own cache may have put earlier keys before the new ones
    key, value = key[0, :, -new:], value[0, :, -new:]
    return oracle.layer(module.layer_idx, query[0], key, value, scaling, softcap, s_aux)[None], None


AttentionInterface.register("oracle", oracle_attention)
