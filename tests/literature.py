"""The policies from the literature for the oracle, one head at a time, written from their definitions."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Head:
    """The n tokens that a head holds, oldest first, before an eviction.

    Attributes:
        keys: [n, D] float64, before RoPE.
        values: [n, D] float64.
        scores: [n] float64, attention received.
        indices: token indices.
        sinks: first tokens that stay.
        recent: number of newest tokens that stay.
        queries: [m, G, D] float64, all that were ever asked, before RoPE and scaled.
        rotated: keys [s, n, D] float64 as s queries see them that come so many tokens after the newest.
        rotary_dims: dimensions that RoPE rotates.
        farthest: largest distance at which TriAttention looks.
    """

    keys: Tensor
    values: Tensor
    scores: Tensor
    indices: list[int]
    sinks: int
    recent: int
    queries: Tensor
    rotated: Callable[[list[int]], Tensor]
    rotary_dims: int
    farthest: int

    @property
    def count(self) -> int:
        return len(self.indices)

    def is_recent(self, i: int) -> bool:
        return i >= self.count - self.recent

    def is_sink(self, i: int) -> bool:
        return self.indices[i] < self.sinks


def cosines(x: Tensor) -> list[list[float]]:
    """Of every two rows of x [n, D]."""
    directions = torch.stack([row / row.norm() for row in x])
    return (directions @ directions.T).tolist()


def softmax(logits: dict[int, float]) -> dict[int, float]:
    weights = {i: math.exp(logit - max(logits.values())) for i, logit in logits.items()}
    return {i: weight / sum(weights.values()) for i, weight in weights.items()}


def keydiff(head: Head) -> list[float]:
    """Unlike the mean of the directions."""
    anchor = torch.stack([key / key.norm() for key in head.keys]).mean(0)
    return cosines(torch.stack([-anchor, *head.keys]))[0][1:]


def lagkv(head: Head) -> list[float]:
    """Deviation over the channels, each scaled by its range among the recent tokens."""
    found = [0.0] * head.count
    for x in (head.keys, head.values):
        lag = x[head.count - head.recent :]
        low = [min(channel) for channel in lag.T.tolist()]
        high = [max(channel) for channel in lag.T.tolist()]
        deviations = {}
        for i in range(head.count):
            if not head.is_recent(i) and not head.is_sink(i):
                scaled = [(v - a) / max(b - a, 1e-6) for v, a, b in zip(x[i].tolist(), low, high, strict=True)]
                mean = sum(scaled) / len(scaled)
                deviations[i] = math.sqrt(sum((v - mean) ** 2 for v in scaled) / (len(scaled) - 1))
        for i, weight in softmax(deviations).items():
            found[i] += weight / 2
    return found


def r_kv(head: Head) -> list[float]:
    """A tenth of importance, less nine tenths of redundancy."""
    n = head.count
    similar = cosines(head.keys)
    for i, row in enumerate(similar):
        row[i] = 0.0
        newest = max((j for j in range(n) if row[j] > 0.5), default=None)
        if newest is not None:
            row[newest] = 0.0
    redundancy = softmax({j: sum(row[j] for row in similar) / n for j in range(n)})
    shares = (head.scores / head.scores.sum()).tolist()
    return [0.1 * max(shares[max(i - 3, 0) : i + 4]) - 0.9 * redundancy[i] for i in range(n)]


def value_redundancy(head: Head) -> list[float]:
    """The score, halved if the value is that of a better token."""
    found, scores, similar = [], head.scores.tolist(), cosines(head.values)
    for i, score in enumerate(scores):
        better = [
            similar[i][j]
            for j in range(head.count)
            if j != i and (head.is_recent(j) or head.is_sink(j) or scores[j] > score)
        ]
        found.append(score * (1 - 0.5 * max([0.0, *better])))
    return found


def triattention(head: Head) -> list[float]:
    """The centre's product over distances, and norms; standardized over the tokens, the largest of the query heads."""
    steps = [2**n for n in range(32) if 2**n <= head.farthest]
    ahead = head.rotated(steps) if head.rotary_dims else head.keys[None]
    half, size = head.rotary_dims // 2, head.keys.shape[-1]
    bands = [[d, d + half] for d in range(half)] + [[d] for d in range(2 * half, size)]
    scores = []
    for asked in head.queries.unbind(1):
        centre = asked.mean(0)
        products = (ahead @ centre).mean(0)
        for band in bands:
            longer = float(asked[:, band].square().sum(1).mean().sqrt() - centre[band].norm())
            products = products + longer * head.keys[:, band].norm(dim=1)
        scores.append((products - products.mean()) / products.std(correction=0))
    return torch.stack(scores).amax(0).tolist()


def expected_attention(head: Head) -> list[float]:
    """Logarithm of the mean of exp(q k) over Gaussian queries and 512 positions to come, times the value's norm."""
    keys = head.rotated(list(range(1, 513))).mean(0) if head.rotary_dims else head.keys
    found = [0.0] * head.count
    for asked in head.queries.unbind(1):
        mean, variance = asked.mean(0), asked.var(0, correction=0)
        logits = {
            i: float(keys[i] @ mean + (keys[i].square() @ variance) / 2)
            for i in range(head.count)
            if not head.is_sink(i)
        }
        for i, weight in softmax(logits).items():
            found[i] += weight * float(head.values[i].norm()) / head.queries.shape[1]
    return [math.log(x) if x else -math.inf for x in found]


def observed(head: Head) -> list[list[float]]:
    """What each of the newest 32 queries, or of as many as there are recent tokens, pays to every token, group summed.

    The oldest query comes first.
    """
    found = []
    for later in reversed(range(min(32, head.recent, len(head.queries)))):
        keys = head.rotated([-later])[0]
        asked = head.queries[len(head.queries) - 1 - later]
        visible = [i for i in range(head.count) if head.indices[i] <= head.indices[-1] - later]
        weights = (asked @ keys[visible].T).softmax(-1)
        found.append([*weights.sum(0).tolist(), *[0.0] * (head.count - len(visible))])
    return found


def morphkv(head: Head) -> list[float]:
    """The most that a query pays."""
    return [max(column) for column in zip(*observed(head), strict=True)]


def snapkv(head: Head) -> list[float]:
    """What all queries pay, the most of three neighbours on either side; where they share it, the older stays."""
    rows = observed(head)
    sums = [
        0.0 if head.indices[i] > head.indices[-1] - len(rows) else sum(column)
        for i, column in enumerate(zip(*rows, strict=True))
    ]
    return [max(sums[max(i - 3, 0) : i + 4]) for i in range(head.count)]


def drawn(index: int, layer: int, head: int, seen: int) -> float:
    """Priority under the random policy: MurmurHash3's finalizer applied three times."""

    def mix(x: int) -> int:
        x &= 0xFFFFFFFF
        x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        return x ^ x >> 16

    return (mix(mix(mix(seen) + 0x10001 * layer + head) + index) & 0xFFFFFF) / 2**24


PRIORITIES: dict[str, Callable[[Head], list[float]]] = {
    "keydiff": keydiff, "lagkv": lagkv, "r-kv": r_kv, "value-redundancy": value_redundancy,
    "triattention": triattention, "expected-attention": expected_attention, "morphkv": morphkv, "snapkv": snapkv,
}  # fmt: skip
"""By policy: the priority of every token, the lowest of which is evicted first."""
