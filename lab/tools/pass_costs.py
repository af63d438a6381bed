"""What passes of several tokens cost: their time relative to a step, and what guesses take on the heap.

``python -m lab.tools.pass_costs [MODEL]`` prints a row of the table in lab/docs/performance.md.
"""

import argparse
import time
from collections.abc import Sequence
from statistics import median

import psutil

from h2o_stream.config import DEFAULT_MODEL, CacheConfig, ModelConfig
from h2o_stream.engine.engine import Engine
from h2o_stream.loading.loading import load_model
from h2o_stream.native.lookahead import Lookahead
from h2o_stream.runtime.model import ServedRuntime

COUNTS = 2, 3, 4, 5, 6, 8, 12, 16
"""Tokens of a pass."""


def costs(model: str, window: int, rounds: int) -> tuple[int, list[float]]:
    """The bytes of guesses, and the median of the time of passes over that of the step before for each of `COUNTS`."""
    cache = CacheConfig(window=window)
    loaded = load_model(ModelConfig(model), cache, "auto", print, lambda *_: None)
    engine = Engine(loaded.model, loaded.tokenizer, cache)
    ids = [5 + 7 * i % 61 for i in range(window + 50)]
    list(engine.prefill(ids))
    served = engine.served
    assert isinstance(served, ServedRuntime), "a model that runs without torch"

    def seconds(count: int) -> float:
        while served.cache.steps_ahead(count) < count:
            served.step(ids[0], tuple)
        begun = time.perf_counter()
        _, taken = served.step(ids[0], lambda: ids[1:count])
        assert taken == count, f"{taken} of {count} tokens"
        return time.perf_counter() - begun

    seconds(1)
    heap = _heap()
    for _ in range(2):  # one guess before it is known how many there is room for
        served.step(ids[0], lambda: ids)
        served.take_back()
    heap = _heap() - heap
    Lookahead._max_guesses = max(COUNTS)  # type: ignore[assignment,method-assign]  # as far as the table goes
    ratios: list[list[float]] = [[] for _ in COUNTS]
    for _ in range(rounds):
        for count, of_count in zip(COUNTS, ratios, strict=True):
            step = seconds(1)
            of_count.append(seconds(count) / step)
            served.take_back()
    return heap, [median(of_count) for of_count in ratios]


def _heap() -> int:
    """Bytes in use, with those that are mapped."""
    info = psutil.heap_info()
    return int(info.heap_used + info.mmap_used)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
    chosen = parser.parse_args(arguments)
    heap, row = costs(chosen.model, chosen.window, chosen.rounds)
    print("| " + " | ".join([chosen.model, *(f"{cost:.2f}" for cost in row), f"{heap / 1e6:.1f} MB"]) + " |")


if __name__ == "__main__":
    main()
