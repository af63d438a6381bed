"""What the cache must know of a decoder layer, and how it makes one from that."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from h2o_stream.cache.budgets import HeadBudget
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.layer import EvictingLayer
from h2o_stream.cache.policies import make_policy
from h2o_stream.cache.rope import RotaryTable
from h2o_stream.cache.shared_state import Revision, TokenCount
from h2o_stream.config import CachePlan


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer.

    Attributes:
        table: rotations for ``rolling`` and ``gap``; None if the model rotates by itself (``absolute``).
        sliding: the window of a sliding layer among layers that have none: it does not follow the plan. None for the
            other layers.
        hidden_from: age in tokens from which the model hides keys from this layer, or None.
        device: where the layer computes; None for the CPU.
        budgets: its KV heads, grouped by window size.
        shard: the KV heads that are in this process, where several share the layer (tensor parallel); None for all.
    """

    table: RotaryTable | None = None
    sliding: int | None = None
    hidden_from: int | None = None
    device: torch.device | None = None
    budgets: tuple[HeadBudget, ...] = (HeadBudget(),)
    shard: range | None = None

    @property
    def local_budgets(self) -> tuple[HeadBudget | None, ...]:
        """`budgets` of the heads in this process, counted from the first one here; None where there are none."""
        if self.shard is None:
            return self.budgets
        start, shard = self.shard.start, self.shard
        heads = [tuple(head - start for head in budget.heads if head in shard) for budget in self.budgets]
        return tuple(
            replace(budget, heads=local) if local or not budget.heads else None
            for budget, local in zip(self.budgets, heads, strict=True)
        )

    def make_layer(
        self, plan: CachePlan, number: int, tokens: TokenCount | None = None, revision: Revision | None = None
    ) -> EvictingLayer:
        """An empty layer, the `number`-th of its model."""
        if self.sliding is None:
            policy, hidden_from = make_policy(plan, number), self.hidden_from
            budgets = [budget for budget in self.local_budgets if budget]
        else:
            plan, hidden_from, budgets = _sliding_plan(plan, self.sliding), self.sliding, [HeadBudget()]
            policy = make_policy(plan)
        groups = []
        for budget in budgets:
            heads = torch.tensor(budget.heads, device=self.device) if budget.heads else None
            groups.append(
                HeadGroup(plan, policy, self.table, hidden_from, heads=heads, tokens=tokens, revision=revision)
            )
        return EvictingLayer(groups)


def _sliding_plan(plan: CachePlan, window: int) -> CachePlan:
    """A sliding layer holds exactly what its window shows, in full precision, at true distances."""
    plan = replace(plan, policy="recent", window=window - 1, sinks=0, heavy=0, recent=window - 1, kv_bits=16)
    return plan if plan.positions == "absolute" else replace(plan, positions="rolling")
