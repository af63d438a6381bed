"""Loss on long texts while tokens are masked instead of evicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from h2o_lab.masked.masking import masked_plan, policy_rule, ruled_nll
from h2o_stream.compare.comparison import JobProgress, Notify
from h2o_stream.compare.folder import JobResult
from h2o_stream.compare.nll import Nll
from h2o_stream.config import CacheConfig


class MaskedNll(Nll):
    """`Nll`, but that policies mask tokens; ``full`` is what it is there."""

    native = False

    def begin(self, notify: Notify) -> dict[str, Any]:
        """Also check that the policies can be masked."""
        for config in self.configs:
            if config.policy != "full":
                policy_rule(masked_plan(config))
        return {**super().begin(notify), "masked": True}

    def key(self, config: CacheConfig, **settings: Any) -> dict[str, Any]:
        """See `Comparison`."""
        return super().key(config, **settings, **({"masked": True} if config.policy != "full" else {}))

    def run(
        self, config: CacheConfig, tokens: Sequence[int], kept: JobResult | None = None
    ) -> Iterator[JobProgress | JobResult]:
        """The losses of a policy that masks tokens instead of dropping them."""
        if config.policy == "full":
            return super().run(config, tokens, kept)
        plan = masked_plan(config)
        return ruled_nll(self.model, plan, policy_rule(plan), tokens)
