"""What a cache must know of a decoder layer, and the head groups that it is given. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from h2o_stream.cache.group_rules import HeadShape
from h2o_stream.cache.shared_state import Revision, TokenCount
from h2o_stream.cache.slots import Slots
from h2o_stream.cache.windows import HeadWindow
from h2o_stream.config import CachePlan


@dataclass(frozen=True)
class LayerRules:
    """What a cache must know of a decoder layer.

    Attributes:
        shape: shape of its heads; None without attention, or if it is unknown.
        table: rotations for ``rolling`` and ``gap``; None if the model rotates by itself (``absolute``) or not at all.
        attends: whether it has attention, and so keys and values.
        sliding: window of a layer that slides while others do not. Such a layer ignores the plan. None: it follows the
            plan.
        chunked: `sliding` is the length of pieces that do not see each other, see `GroupRules`.
        hidden_from: age in tokens from which the model hides keys from this layer, or None.
        windows: the KV heads of the layer, grouped by window size.
        state_shapes: shapes of its states of constant size, by name, without the row.
    """

    shape: HeadShape | None = None
    table: Any = None
    attends: bool = True
    sliding: int | None = None
    chunked: bool = False
    hidden_from: int | None = None
    windows: tuple[HeadWindow, ...] = (HeadWindow(),)
    state_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dtype: Any = "float32"

    @property
    def evicts(self) -> bool:
        """Whether it follows the plan."""
        return self.attends and self.sliding is None

    @property
    def local_windows(self) -> tuple[HeadWindow | None, ...]:
        """`windows` of the heads in this process; None where there are none."""
        return self.windows

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one row, in float32."""
        return sum(4 * prod(shape) for shape in self.state_shapes.values())

    def make_groups(
        self, plan: CachePlan, number: int, tokens: TokenCount | None = None, revision: Revision | None = None
    ) -> Iterator[Any]:
        """Empty head groups of the `number`-th layer, none without attention."""
        hidden_from, windows = self.hidden_from, [window for window in self.local_windows if window]
        if self.sliding is not None:
            plan, hidden_from, windows = sliding_plan(plan, self.sliding), self.sliding, [HeadWindow()]
        rules = {"layer": number, "sliding": hidden_from, "chunked": self.chunked, "shape": self.shape}
        for window in windows if self.attends else ():
            table = None if plan.positions == "absolute" else self.table
            yield self._group(plan, window.heads, table=table, tokens=tokens, revision=revision, **rules)

    def _group(self, plan: CachePlan, heads: tuple[int, ...], **rules: Any) -> Slots:
        return Slots(plan, dtype=self.dtype, heads=heads or None, **rules)


def sliding_plan(plan: CachePlan, window: int) -> CachePlan:
    """A sliding layer holds exactly what its window shows, in full precision, at true distances."""
    plan = replace(plan, policy="recent", window=window - 1, sinks=0, heavy=0, recent=window - 1, kv_bits=16)
    return plan if plan.positions == "absolute" else replace(plan, positions="rolling")
