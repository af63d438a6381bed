"""NaN keys: native attention gives NaN where torch does, and protected tokens are never evicted."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from h2o_stream.cache.attention import LogitTransform
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.protection import Protection
from h2o_stream.config import CachePlan
from h2o_stream.native import library
from h2o_stream.native.kernels import NativeKernels
from tests.slots import attend
from tests.test_native_prefill import Table, plan

NEW = (40, 1, 1, 9, *[1] * 20)


def outputs(native: bool, plan: CachePlan, poisoned: int) -> Iterator[tuple[Tensor, HeadGroup]]:
    """Results of a layer whose first head gets a NaN key in one forward."""
    layer = HeadGroup(plan, table=None if plan.positions == "absolute" else Table(16))
    layer.protection = Protection(plan.sinks, (range(7, 9),), 4)
    kernels = NativeKernels(library.loaded()) if native else None
    seeded = torch.Generator().manual_seed(1)
    for number, new in enumerate(NEW):
        query, key, value = (torch.randn(1, heads, new, 16, generator=seeded) for heads in (4, 2, 2))
        if number == poisoned:
            key[:, 0, -1] = torch.nan
        yield attend(layer, query, key, value, LogitTransform(0.25), kernels=kernels), layer


@pytest.mark.skipif(bool(library.why_not()), reason="there is no compiled library")
@pytest.mark.every(4)
@pytest.mark.parametrize("policy", ["h2o", "h2o-paper", "tova", "random", "sink"])
@pytest.mark.parametrize("poisoned", [0, 1, 3])
@pytest.mark.parametrize("positions", ["gap", "absolute"])
def test_as_in_torch(policy: str, poisoned: int, positions: str) -> None:
    case = plan(policy, positions=positions)
    both = zip(outputs(True, case, poisoned), outputs(False, case, poisoned), strict=True)
    for number, ((native, layer), (eager, other)) in enumerate(both):
        assert not native[:, :, 2:].isnan().any(), "the other KV head"
        if number <= poisoned:
            assert torch.equal(native.isnan(), eager.isnan())
            assert native.isnan().any() == (number == poisoned)
        for one in (layer, other):
            kept = one.kept()
            assert all(set(range(7, 9)) <= set(kept[0, head].tolist()) for head in range(2))
            assert (kept[..., : case.sinks] == torch.arange(case.sinks)).all()
            assert (kept[..., -1] == one.tokens.lengths[0] - 1).all()
