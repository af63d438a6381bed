"""How many tokens per second whole batches give: the largest that fit into the same memory, and equal ones."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from h2o_stream.cache.attach import attach
from h2o_stream.cache.support import context_of
from h2o_stream.config import PREFILL_STEP, CacheConfig, Shape
from h2o_stream.errors import ConfigError
from h2o_stream.graphs.steps import compiled


@dataclass(frozen=True)
class Load:
    """A batch to be answered.

    Attributes:
        shape: of every row.
        config: how the rows are cached; ``full`` is transformers' own cache.
        batch: rows.
        row_bytes: the most that the cache of a row takes.
        largest: whether this is all that fits; otherwise it has as many rows as fit with a full cache.
    """

    shape: Shape
    config: CacheConfig
    batch: int
    row_bytes: int
    largest: bool


@dataclass(frozen=True)
class Doing:
    """What is going on, for people."""

    text: str


def loads(
    model: Any, shape: Shape, configs: Sequence[CacheConfig], budget: int, tokens: Sequence[int]
) -> Iterator[Doing | Load]:
    """The largest batch of each policy, and the batch of the full cache for all.

    Args:
        model: a causal language model of transformers.
        shape: of the rows.
        configs: the policies, ``full`` first.
        budget: bytes for the cache of all rows.
        tokens: a text to measure a row with.

    Yields:
        `Doing` before whatever takes long, and the loads.

    Raises:
        ConfigError: a row does not fit into the budget, or the shape not into the context of a full cache.
    """
    context = context_of(model.config)
    if context is not None and shape.length > context:
        raise ConfigError(f"{shape} needs {shape.length} positions, the model has {context}; give smaller --shapes")
    sizes: list[tuple[CacheConfig, int, int]] = []
    for config in configs:
        yield Doing(f"{shape}: measuring a row of {config.label}")
        row = row_bytes(model, config, list(islice(cycle(tokens), shape.length)))
        if row > budget:
            raise ConfigError(
                f"a row of {shape} takes {row:,} bytes with {config.label}, --cache-budget is {budget:,}; raise it"
            )
        sizes.append((config, row, budget // row))
    for config, row, batch in sizes:
        yield Load(shape, config, batch, row, largest=True)
    for config, row, batch in sizes[1:]:
        if batch != sizes[0][2]:
            yield Load(shape, config, sizes[0][2], row, largest=False)


@torch.no_grad()
def row_bytes(model: Any, config: CacheConfig, tokens: Sequence[int]) -> int:
    """The most bytes that the cache of one row holds while these tokens go through it."""
    most = 0
    ids = torch.tensor([list(tokens)], device=model.device)
    with attach(model, config) as cache:
        for part in ids.split(PREFILL_STEP, 1):
            model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
            most = max(most, cache.nbytes)
    return most


def rows_of(tokens: Sequence[int], load: Load) -> Tensor:
    """The prompts of a load, [batch, prompt]: a text cut up, from its start again where it ends."""
    prompt = load.shape.prompt
    return torch.tensor(list(islice(cycle(tokens), load.batch * prompt))).view(load.batch, prompt)


def generate(model: Any, load: Load, prompts: Tensor, compile: bool) -> float:
    """Answer a load greedily, to its last token.

    Args:
        model: a causal language model of transformers.
        load: what is asked.
        prompts: [batch, prompt].
        compile: let single tokens go through compiled graphs; not with a full cache.

    Returns:
        The seconds it took, prompts included. What is made once, compiled graphs and the like, is made before.
    """
    prompts = prompts.to(model.device)

    def answer(new: int) -> float:
        begun = time.perf_counter()
        model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            min_new_tokens=new,
            max_new_tokens=new,
            pad_token_id=0,
        )
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    with ExitStack() as stack:
        graphs = None
        if load.config.policy != "full":
            cache = stack.enter_context(attach(model, load.config))
            graphs = stack.enter_context(compiled(model, cache)) if compile else None
        answer(2)
        if graphs:
            graphs.wait()
        return answer(load.shape.new)
