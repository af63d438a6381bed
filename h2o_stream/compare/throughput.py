"""How many tokens per second whole batches give: the largest that fit into the same memory, and equal ones."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, islice
from statistics import median
from typing import Any

import torch
from torch import Tensor

from h2o_stream.cache.attach import attach
from h2o_stream.cache.identity import model_digest
from h2o_stream.cache.support import context_of, home_of
from h2o_stream.compare.comparison import Comparison, Job, Notify, told, window_of
from h2o_stream.compare.comparisons import Shape, ThroughputOptions
from h2o_stream.compare.folder import Part, identity, machine
from h2o_stream.compare.nll import digest_of, read_tokens
from h2o_stream.config import PREFILL_STEP, CacheConfig, EngineChoice
from h2o_stream.errors import ConfigError
from h2o_stream.models.load import load as load_model

_TEXT = 1 << 18
"""Tokens of a text that are used."""


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


class Throughput(Comparison[ThroughputOptions]):
    """The largest batches that fit, and batches as large as the full cache's.

    The batches of a shape are answered in turn, round by round; medians count.
    """

    name = "throughput"
    alone = True

    def __init__(self, options: ThroughputOptions) -> None:
        super().__init__(options)
        self._model: Any = None
        self._tokens: list[int] = []
        self._digest = ""
        self._loads: list[tuple[Load, ...]] = []

    def begin(self, notify: Notify) -> dict[str, Any]:
        """Load the model and find the batches that fit."""
        loaded = load_model(self.options.model, notify=notify)
        self._model = loaded.model
        self._tokens = read_tokens(self.options.text, loaded.tokenizer, _TEXT)
        self._digest = digest_of(self._tokens)
        for shape in self.options.shapes:
            notify(f"{shape}: measuring the cache of a row ...")
            configs = self.options.configs_for(shape)
            self._loads.append(tuple(loads(self._model, shape, configs, self.options.budget, self._tokens)))
        return {
            "model": loaded.name,
            "identity": model_digest(self._model),
            "machine": machine(),
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "text": str(self.options.text),
            "digest": self._digest,
            "shapes": list(map(str, self.options.shapes)),
            "cache_budget": self.options.budget,
            "rounds": self.options.rounds,
            "steps": self.options.engine,
            "weights": asdict(self.options.model),
            **told(self.configs),
        }

    def jobs(self) -> list[Job]:
        """One for each round of each load; those of a shape in turn."""
        return [
            self._job(load, number)
            for planned in self._loads
            for number in range(self.options.rounds)
            for load in planned
        ]

    def _job(self, load: Load, number: int) -> Job:
        key = {
            "what": self.name,
            "tokens": self._digest,
            "steps": self.options.engine,
            "shape": str(load.shape),
            "batch": load.batch,
            "round": number,
            "machine": machine(),
            "weights": asdict(self.options.model),
            **identity(self._model, load.config),
        }
        return Job(f"{load.shape}: {load.config.label}, batch {load.batch}", key, 1, partial(self._timed, load))

    def _timed(self, load: Load) -> Iterator[Part]:
        yield Part({"seconds": generate(self._model, load, rows_of(self._tokens, load), self.options.engine)})

    def records(self, parts: Iterable[Part]) -> Iterator[dict[str, Any]]:
        """One for each load."""
        coming = iter(parts)
        for planned in self._loads:
            seconds = [[next(coming).figures["seconds"] for _ in planned] for _ in range(self.options.rounds)]
            for load, taken in zip(planned, zip(*seconds, strict=True), strict=True):
                yield self._record(load, median(taken))

    def _record(self, load: Load, seconds: float) -> dict[str, Any]:
        return {
            "type": self.name,
            "engine": "transformers" if load.config.policy == "full" else "h2o-stream",
            "policy": load.config.policy,
            "window": window_of(load.config),
            **asdict(load.shape),
            "batch": load.batch,
            "largest": load.largest,
            "row_bytes": load.row_bytes,
            "cache_bytes": load.row_bytes * load.batch,
            "seconds": round(seconds, 3),
            "tok_s": round(load.batch * load.shape.new / seconds, 2),
            "dtype": str(self._model.dtype).removeprefix("torch."),
        }


def loads(
    model: Any, shape: Shape, configs: Sequence[CacheConfig], budget: int, tokens: Sequence[int]
) -> Iterator[Load]:
    """The largest batch of each policy, and the batch of the full cache for all.

    Args:
        model: a causal language model of transformers.
        shape: of the rows.
        configs: the policies, ``full`` first.
        budget: bytes for the cache of all rows.
        tokens: a text to measure a row with.

    Raises:
        ConfigError: a row does not fit into the budget, or the shape not into the context of a full cache.
    """
    context = context_of(model.config)
    if context is not None and shape.length > context:
        raise ConfigError(f"{shape} needs {shape.length} positions, the model has {context}; give smaller --shapes")
    sizes: list[tuple[CacheConfig, int, int]] = []
    for config in configs:
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
    ids = torch.tensor([list(tokens)], device=home_of(model))
    with attach(model, config) as cache:
        for part in ids.split(PREFILL_STEP, 1):
            model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
            most = max(most, cache.nbytes)
    return most


def rows_of(tokens: Sequence[int], load: Load) -> Tensor:
    """The prompts of a load, [batch, prompt]: a text cut up, from its start again where it ends."""
    prompt = load.shape.prompt
    return torch.tensor(list(islice(cycle(tokens), load.batch * prompt))).view(load.batch, prompt)


def generate(model: Any, load: Load, prompts: Tensor, engine: EngineChoice = "auto") -> float:
    """Answer a load greedily, to its last token.

    Args:
        model: a causal language model of transformers.
        load: what is asked.
        prompts: [batch, prompt].
        engine: what runs a step, see `attach`; not with a full cache.

    Returns:
        The seconds it took, prompts included. What the first forward alone does is done before.
    """
    prompts = prompts.to(home_of(model))

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
        if home_of(model).type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    with ExitStack() as stack:
        if load.config.policy != "full":
            stack.enter_context(attach(model, load.config, engine=engine))
        answer(2)
        return answer(load.shape.new)
