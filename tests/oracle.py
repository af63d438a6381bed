"""A naive decoder with an evicting cache, written from the definitions and from nothing in h2o_stream.cache.

One Python list of tokens per layer and KV head. Every query places every key anew by the definition of its
position mode, keys are pruned first and rotated after, and the scores are summed one number at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Kept:
    index: int
    key: Tensor
    value: Tensor
    score: float = 0.0


@dataclass
class Rules:
    window: int
    heavy: int
    sinks: int = 0
    decay: float = 1.0
    positions: str = "rolling"
    span: int = 0
    by_age: bool = False


@dataclass
class Oracle:
    """Feeds tokens through a Llama; `margin` is how close any choice between two tokens came to a tie."""

    model: torch.nn.Module
    rules: Rules
    seen: int = 0
    margin: float = math.inf
    held: list[list[list[Kept]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.model.config
        self.heads, self.size = config.num_key_value_heads, config.head_dim
        self.groups = config.num_attention_heads // self.heads
        theta = config.rope_parameters["rope_theta"]
        self.frequency = torch.tensor([theta ** (-2 * i / self.size) for i in range(self.size // 2)])
        self.held = [[[] for _ in range(self.heads)] for _ in range(config.num_hidden_layers)]

    def feed(self, tokens: list[int]) -> Tensor:
        """One chunk: attend to what is held and causally to each other, then evict. Returns logits [n, V]."""
        base = self.model.model
        x = base.embed_tokens(torch.tensor(tokens))
        for number, layer in enumerate(base.layers):
            h, attention = layer.input_layernorm(x), layer.self_attn
            q, k, v = (
                p(h).view(len(tokens), -1, self.size) for p in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            mixed = torch.zeros(len(tokens), self.heads * self.groups, self.size)
            for head in range(self.heads):
                held = self.held[number][head]
                held += [Kept(self.seen + i, k[i, head], v[i, head]) for i in range(len(tokens))]
                received = [0.0] * len(held)
                for i in range(len(tokens)):
                    for group in range(self.groups):
                        query_head = head * self.groups + group
                        weights, mixed[i, query_head] = self.attend(q[i, query_head], held, self.seen + i)
                        for at, weight in enumerate(weights):
                            received[at] += weight * self.rules.decay ** (len(tokens) - 1 - i)
                for token, gained in zip(held, received, strict=True):
                    token.score = token.score * self.rules.decay ** len(tokens) + gained
                self.held[number][head] = self.evict(held)
            x = x + attention.o_proj(mixed.flatten(1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self.seen += len(tokens)
        return self.model.lm_head(base.norm(x))

    def attend(self, query: Tensor, held: list[Kept], now: int) -> tuple[list[float], Tensor]:
        visible = [token for token in held if token.index <= now]
        logits = []
        for token in visible:
            age = now - token.index
            rank = sum(token.index < other.index <= now for other in visible)
            distance = {"rolling": rank, "absolute": age, "gap": min(age, self.rules.span + rank)}
            rotated = self.rotate(token.key, -distance[self.rules.positions])
            logits.append(float(query @ rotated) / math.sqrt(self.size))
        top = max(logits)
        powers = [math.exp(logit - top) for logit in logits]
        weights = [power / sum(powers) for power in powers]
        output = sum(weight * token.value for weight, token in zip(weights, visible, strict=True))
        return weights, output

    def rotate(self, x: Tensor, position: int) -> Tensor:
        first, second = x[: self.size // 2], x[self.size // 2 :]
        cos, sin = torch.cos(position * self.frequency), torch.sin(position * self.frequency)
        return torch.cat((first * cos - second * sin, second * cos + first * sin))

    def evict(self, held: list[Kept]) -> list[Kept]:
        """Cookbook's HHCache: of more than W keep the last R and, before them, the sinks and the top scores."""
        rules = self.rules
        if len(held) <= rules.window:
            return held
        recent = rules.window - rules.heavy - rules.sinks
        old, new = held[: len(held) - recent], held[len(held) - recent :]
        sinks = [token for token in old if token.index < rules.sinks]
        others = [token for token in old if token.index >= rules.sinks]
        others.sort(key=lambda token: token.index if rules.by_age else token.score, reverse=True)
        room = rules.window - recent - len(sinks)
        if not rules.by_age and 0 < room < len(others):
            self.margin = min(self.margin, others[room - 1].score - others[room].score)
        return sorted([*sinks, *others[:room], *new], key=lambda token: token.index)

    def kept(self, layer: int) -> list[list[int]]:
        return [[token.index for token in head] for head in self.held[layer]]
