"""Log-likelihoods of requests, each context read once for all of its continuations."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tqdm.auto import tqdm

from h2o_stream.config import CacheConfig


class ByContext:
    """A part of a model of the harness."""

    quiet = True
    cache_hook: Any
    rank: Any

    @abstractmethod
    def score_continuations(
        self, context: Sequence[int], continuations: Sequence[Sequence[int]]
    ) -> Iterator[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether greedy decoding gives the same tokens.

        All of the context but its last token is read at once and then evicted. That token and the continuation are fed
        one by one, so that each attends to kept tokens only.
        """

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """See the harness."""
        return super().loglikelihood(requests, disable_tqdm or self.quiet)  # type: ignore[misc]

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        answers: dict[int, tuple[float, bool]] = {}
        by_context: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, (_, context, _) in enumerate(requests):
            by_context[tuple(context)].append(number)
        disable = disable_tqdm or self.quiet or self.rank != 0
        with tqdm(total=len(requests), disable=disable, desc="log-likelihoods") as bar:
            for context, numbers in by_context.items():
                scored = self.score_continuations(context, [requests[number][2] for number in numbers])
                for number, answer in zip(numbers, scored, strict=True):
                    answers[number] = answer
                    if requests[number][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[number][0], answer)
                    bar.update()
        return [answers[number] for number in range(len(requests))]


def window_of_context(config: CacheConfig, ratio: float | None, context: int) -> CacheConfig:
    """The config for a context of so many tokens, of which the window may be a fraction."""
    return config if ratio is None else replace(config, window=max(round(ratio * context), 2))
