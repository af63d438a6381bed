"""Launches of realistic sizes, which are compiled and not run."""

import torch

from h2o_stream.cache.attention import LogitTransform
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.protection import Protection
from h2o_stream.config import CacheConfig
from h2o_stream.gpu.kernels import GpuKernels, NewTokens
from tests.test_native_prefill import Table

KERNELS = GpuKernels(torch.device("cpu"))


def attention(policy: str = "h2o", dtype: torch.dtype = torch.bfloat16, size: int = 128, window: int = 256,
              groups: int = 4, rotary: int = 128, split: bool = False, **settings: object) -> None:  # fmt: skip
    plan = CacheConfig(policy, window=window, budgets="equal", chunk=64).plan(8192)
    table = None if plan.positions == "absolute" else Table(rotary)
    group = HeadGroup(plan, layer=1, table=table, sliding=settings.get("sliding"))
    group.protection = Protection(plan.sinks, settings.get("pins", ()), plan.recent, settings.get("transient", ()))
    heads, transform = 2, LogitTransform(0.1, settings.get("softcap"), settings.get("sinks"))
    KERNELS._processors = 132 if split else 0
    query = torch.zeros(1, heads * groups, 200, size, dtype=dtype)
    key = torch.zeros(1, heads, 200, size, dtype=dtype)
    group.queries_per_key = groups
    group.allocate_like(key, key, window + 1)
    group.tokens.lengths = (5000,)
    for count in (1, 200):
        q, k = query[:, :, :count], key[:, :, :count]
        out = torch.zeros(1, count, heads * groups, size, dtype=dtype).transpose(1, 2)
        new = NewTokens(q, k, k, out)
        (KERNELS.step(group, new, transform, (5000,)) if count == 1 else KERNELS.prompt(group, new, transform))


CASES = {
    "h2o": attention,
    "float32": lambda: attention(dtype=torch.float32),
    "float16, window 4096, split": lambda: attention(dtype=torch.float16, window=4096, split=True),
    "window 4096": lambda: attention(window=4096),
    "split": lambda: attention(split=True),
    "tova, 64 numbers": lambda: attention("tova", size=64, rotary=32, window=1000, groups=7),
    "random, everything": lambda: attention(
        "random", sliding=512, pins=(range(3),), transient=(range(9, 30),), softcap=30.0, sinks=torch.zeros(8)
    ),
    "256 numbers": lambda: attention("h2o-paper", size=256, rotary=256),
}
