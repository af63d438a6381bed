"""The harness's model for policies that need no torch: `H2OLM`'s scores, computed as ``h2o-chat`` computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import chain
from typing import Any

import numpy
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from h2o_lab.harness.contexts import ByContext, window_of_context
from h2o_stream.config import CacheConfig, SamplingConfig
from h2o_stream.engine.engine import Engine
from h2o_stream.engine.events import Finished, Token
from h2o_stream.runtime.model import RuntimeModel

_MAX_NEW = 256
"""Tokens that are generated where a task does not say how many, as the harness's own model does."""


class ServedLM(ByContext, TemplateLM):
    """A model without torch under a cache policy; see `H2OLM`.

    Args:
        model: it.
        tokenizer: its tokenizer.
        config: configuration of the policy.
        ratio: the window as a fraction of each context; replaces that of `config`.
    """

    def __init__(self, model: RuntimeModel, tokenizer: Any, config: CacheConfig, ratio: float | None) -> None:
        super().__init__()
        self.model, self.tokenizer, self.cache_config, self.ratio = model, tokenizer, config, ratio

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        first = self.tokenizer.backend_tokenizer.token_to_id(self.tokenizer.special_tokens_map.get("bos_token", ""))
        return self.eot_token_id if first is None else int(first)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """See the harness."""
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens is not False)["input_ids"])

    def score_continuations(
        self, context: Sequence[int], continuations: Sequence[Sequence[int]]
    ) -> Iterator[tuple[float, bool]]:
        """See `ByContext`."""
        with closing(self.model.serve(window_of_context(self.cache_config, self.ratio, len(context)))) as served:
            if len(context) > 1:
                served.forward(context[:-1])
                before = served.state_dict()
            for continuation in continuations:
                if len(context) > 1:
                    served.load_state_dict(before)
                else:
                    served.cache.reset()
                likelihood, likeliest = 0.0, True
                for token, expected in zip([context[-1], *continuation], continuation, strict=False):
                    logits = served.forward([token])
                    likelihood += float(logits[expected] - numpy.logaddexp.reduce(logits))
                    likeliest &= int(logits.argmax()) == expected
                yield likelihood, likeliest

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """See the harness."""
        return [sum(map(self._likelihood, self._windows(request.args[0]))) for request in requests]

    def _windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
        windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.model.context, 1)
        return map(make_disjoint_window, windows)

    def _likelihood(self, window: tuple[list[int], list[int]]) -> float:
        return next(self.score_continuations(window[0], [window[1]]))[0]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """See the harness."""
        return [self._reply(*request.args) for request in requests]

    def _reply(self, context: str, settings: dict[str, Any]) -> str:
        stops, tokens = settings.get("until") or [], self.tok_encode(context)
        config = window_of_context(self.cache_config, self.ratio, len(tokens))
        sampling = SamplingConfig(
            temperature=float(settings.get("temperature") or 0.0) if settings.get("do_sample") else 0.0,
            max_tokens=int(settings.get("max_gen_toks", _MAX_NEW)),
            stop=tuple([stops] if isinstance(stops, str) else stops),
            seed=0,
        )
        with Engine(self.model, self.tokenizer, config, sampling) as engine:
            events = chain(engine.prefill(tokens), engine.decode())
            return "".join(event.text for event in events if isinstance(event, Token | Finished))
