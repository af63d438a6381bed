"""The policies and their defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from h2o_stream.base.registry import Registry
from h2o_stream.errors import ConfigError

Positions = Literal["gap", "rolling", "absolute"]
Budgets = Literal["measured", "equal"]

DEFAULT_POLICY = "h2o"

LONG_TERM_DISTANCE = 64
"""Distance in tokens from which attention counts for the long-term score."""

LONG_TERM_DECAY = 0.999
"""Factor on the long-term score per token seen."""


@dataclass(frozen=True)
class PolicyDefaults:
    """Default budgets and rules of a policy.

    Attributes:
        heavy_share: fraction of the unpinned window for heavy hitters, 0 to 1.
        sinks: first tokens of the stream that are never evicted.
        decay: factor on the accumulated scores per token seen; 1 is the papers' plain sum.
        positions: rule for the positions at which RoPE sees the kept tokens.
        rule: ``module:class`` of the `Policy` that chooses among the unprotected tokens; a `Policy` class with these as
            its ``defaults`` leaves it out.
        draws: whether the rule is random and needs a seed.
        budgets: ``equal`` windows for all heads, or ``measured``: larger ones for retrieval heads, with the same mean.
        long_term: weight of the long-term score beside the decaying one.
    """

    heavy_share: float
    sinks: int
    decay: float
    positions: Positions
    rule: str = ""
    draws: bool = False
    budgets: Budgets = "equal"
    long_term: float = 0.0


_RULES = "h2o_stream.cache.policies"

_POLICIES = {
    "h2o": PolicyDefaults(0.5, 4, 0.99, "gap", f"{_RULES}.long_term:LongTerm", budgets="measured", long_term=2.0),
    "h2o-paper": PolicyDefaults(0.5, 0, 1.0, "rolling", f"{_RULES}.accumulated:Accumulated"),
    "tova": PolicyDefaults(1.0, 0, 1.0, "rolling", f"{_RULES}.tova:Tova"),
    "random": PolicyDefaults(0.5, 4, 1.0, "rolling", f"{_RULES}.random:Random", draws=True),
    "sink": PolicyDefaults(0.0, 4, 1.0, "rolling", f"{_RULES}.recency:Recency"),
    "recent": PolicyDefaults(0.0, 0, 1.0, "rolling", f"{_RULES}.recency:Recency"),
    "full": PolicyDefaults(0.0, 0, 1.0, "absolute", f"{_RULES}.recency:Recency"),
}


def _policy_defaults(named: Any) -> PolicyDefaults:
    """The defaults that an entry point names: `PolicyDefaults`, or the ``defaults`` of a `Policy` class."""
    if isinstance(named, PolicyDefaults):
        return named
    defaults: PolicyDefaults = named.defaults
    return replace(defaults, rule=f"{named.__module__}:{named.__qualname__}")


class _Policies(Registry[PolicyDefaults]):
    def __getitem__(self, name: str) -> PolicyDefaults:
        policy, colon, _ = name.partition(":")
        if colon and policy in _POLICIES:
            raise ConfigError(f"policy {name!r}: {policy} has no parameters after a colon, only options")
        return super().__getitem__(policy)


POLICIES = _Policies("h2o_stream.policies", _POLICIES, _policy_defaults)
"""Defaults of all policies, by name; parameters of a policy in Python follow it, as in ``snapkv:pooled=15``."""
