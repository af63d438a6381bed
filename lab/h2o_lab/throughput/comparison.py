"""Generated tokens per second of batches: the largest that fit into the same memory, and equally large ones."""

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

from h2o_lab.throughput.options import Shape, ThroughputOptions
from h2o_stream.attachment.attach import attach
from h2o_stream.attachment.model_facts import context_of, input_device
from h2o_stream.compare.comparison import Comparison, Job, Notify, window_of
from h2o_stream.compare.folder import JobResult, machine
from h2o_stream.compare.nll import digest_of, read_tokens
from h2o_stream.config import PREFILL_STEP, CacheConfig, EngineChoice
from h2o_stream.errors import ConfigError
from h2o_stream.native.pointers import dtype_name

_TEXT = 1 << 18
"""Tokens of a text that are used."""

_AUTO_ROWS = 5
"""Rows of a full cache, of the longest shape, that ``--cache-budget auto`` has room for."""


@dataclass(frozen=True)
class Workload:
    """A batch to generate.

    Attributes:
        shape: prompt and reply lengths of every row.
        config: the cache; ``full`` is transformers' own.
        batch: rows.
        row_bytes: peak bytes of the cache of a row.
        largest: whether no more rows fit; otherwise there are as many as fit with a full cache.
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
    exclusive = True

    _tokens: list[int]
    _workloads: list[list[Workload]]

    def begin(self, notify: Notify) -> dict[str, Any]:
        """Load the model and compute the batch sizes that fit."""
        settings = self.load_model(notify)
        self._tokens = read_tokens(self.options.text, self.tokenizer, _TEXT)
        self._workloads, budget = [], self._budget()
        for shape in self.options.shapes:
            notify(f"{shape}: measuring the cache of a row ...")
            configs = self.options.configs_for(shape)
            self._workloads.append(list(plan_workloads(self.model, shape, configs, budget, self._tokens)))
        return {
            **settings,
            "machine": machine(),
            "dtype": dtype_name(self.model.dtype),
            "text": str(self.options.text),
            "digest": digest_of(self._tokens),
            "shapes": list(map(str, self.options.shapes)),
            "cache_budget": budget,
            "rounds": self.options.rounds,
            "steps": self.options.engine,
            "weights": asdict(self.options.model),
        }

    def _budget(self) -> int:
        if self.options.budget is not None:
            return self.options.budget
        longest = max(shape.length for shape in self.options.shapes)
        return _AUTO_ROWS * row_bytes(self.model, CacheConfig("full"), list(islice(cycle(self._tokens), longest)))

    def jobs(self) -> list[Job]:
        """One for each round of each workload; the workloads of a shape take turns."""
        return [
            self._job(workload, number)
            for planned in self._workloads
            for number in range(self.options.rounds)
            for workload in planned
        ]

    def _job(self, workload: Workload, number: int) -> Job:
        key = self.key(
            workload.config,
            tokens=digest_of(self._tokens),
            steps=self.options.engine,
            shape=str(workload.shape),
            batch=workload.batch,
            round=number,
            machine=machine(),
            weights=asdict(self.options.model),
        )
        label = f"{workload.shape}: {workload.config.label}, batch {workload.batch}"
        return Job(label, key, 1, partial(self._time, workload), workload)

    def leave_out(self, subject: Any) -> None:
        """Drop a workload."""
        self._workloads = [[one for one in planned if one != subject] for planned in self._workloads]

    def _time(self, workload: Workload) -> Iterator[JobResult]:
        text = list(islice(cycle(self._tokens), workload.batch * workload.shape.prompt))
        prompts = torch.tensor(text).view(workload.batch, workload.shape.prompt)
        yield JobResult({"seconds": generate(self.model, workload, prompts, self.options.engine)})

    def records(self, results: Iterable[JobResult]) -> Iterator[dict[str, Any]]:
        """One for each workload."""
        remaining = iter(results)
        for planned in self._workloads:
            seconds = [[next(remaining).figures["seconds"] for _ in planned] for _ in range(self.options.rounds)]
            for workload, round_seconds in zip(planned, zip(*seconds, strict=True), strict=True):
                yield self._record(workload, median(round_seconds))

    def _record(self, workload: Workload, seconds: float) -> dict[str, Any]:
        return {
            "type": self.name,
            "engine": "transformers" if workload.config.policy == "full" else "h2o-stream",
            "policy": workload.config.policy,
            "window": window_of(workload.config),
            **asdict(workload.shape),
            "batch": workload.batch,
            "largest": workload.largest,
            "row_bytes": workload.row_bytes,
            "cache_bytes": workload.row_bytes * workload.batch,
            "seconds": round(seconds, 3),
            "tok_s": round(workload.batch * workload.shape.new / seconds, 2),
            "dtype": dtype_name(self.model.dtype),
        }


def plan_workloads(
    model: Any, shape: Shape, configs: Sequence[CacheConfig], budget: int, tokens: Sequence[int]
) -> Iterator[Workload]:
    """For each policy, the largest batch with caches of `budget` bytes, and a batch as large as the full cache's.

    The configs begin with ``full``; a row is measured with the tokens.

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
        yield Workload(shape, config, batch, row, largest=True)
    for config, row, batch in sizes[1:]:
        if batch != sizes[0][2]:
            yield Workload(shape, config, sizes[0][2], row, largest=False)


@torch.no_grad()
def row_bytes(model: Any, config: CacheConfig, tokens: Sequence[int]) -> int:
    """Peak bytes of the cache of one row while it is fed these tokens."""
    peak = 0
    ids = torch.tensor([list(tokens)], device=input_device(model))
    with attach(model, config) as cache:
        for chunk in ids.split(PREFILL_STEP, 1):
            model(chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)
            peak = max(peak, cache.nbytes)
    return peak


def generate(model: Any, workload: Workload, prompts: Tensor, engine: EngineChoice = "auto") -> float:
    """Generate a workload greedily from prompts [batch, prompt], always to its full length, after a warm-up.

    Returns the seconds it took, prompts included. What runs a step (`attach`) matters with a policy only.
    """
    prompts = prompts.to(input_device(model))

    def answer(new: int) -> float:
        start_time = time.perf_counter()
        model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            min_new_tokens=new,
            max_new_tokens=new,
            pad_token_id=0,
        )
        if input_device(model).type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start_time

    with ExitStack() as stack:
        if workload.config.policy != "full":
            stack.enter_context(attach(model, workload.config, engine=engine))
        answer(2)
        return answer(workload.shape.new)
