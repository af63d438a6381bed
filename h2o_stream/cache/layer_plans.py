"""The plan of a layer that does not follow the plan of its cache."""

from __future__ import annotations

from dataclasses import replace

from h2o_stream.config import CachePlan


def sliding_plan(plan: CachePlan, window: int) -> CachePlan:
    """A sliding layer holds exactly what its window shows, in full precision, at true distances."""
    plan = replace(plan, policy="recent", window=window - 1, sinks=0, heavy=0, recent=window - 1, kv_bits=16)
    return plan if plan.positions == "absolute" else replace(plan, positions="rolling")
