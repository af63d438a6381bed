"""The model ``h2o`` of ``h2o-lm-eval``: the lm-evaluation-harness's transformers model with our cache.

Needs the extra ``eval``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import model_registry
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from h2o_lab.harness.contexts import ByContext, window_of_context
from h2o_stream.attachment.attach import attach
from h2o_stream.attachment.model_facts import input_device
from h2o_stream.config import DEFAULT_CHUNK, CacheConfig, EngineChoice, ModelConfig
from h2o_stream.errors import ConfigError
from h2o_stream.loading.transformers_model import load
from h2o_stream.models.find import find

NAME = "h2o"

_OPTIONS = {field.name for field in fields(CacheConfig)} - {"device"}
"""Arguments for the cache; ``device`` is `HFLM`'s."""


class H2OLM(ByContext, HFLM):
    """`HFLM` under a cache policy.

    With ``policy=full`` this is the harness's own model.

    Args:
        pretrained: a name as in `ModelConfig.model`, or a loaded model of transformers.
        ratio: the window as a fraction of each context; replaces ``window``.
        quiet: hide progress bars.
        cache_device: see `CacheConfig.device`.
        steps: what computes them, see `attach`.
        more: other arguments of `CacheConfig` and of `HFLM`.

    Raises:
        ConfigError: there is no `pretrained`, or a setting of the cache is invalid.
        ModelNotFoundError: no model has this name.
    """

    def __init__(
        self,
        pretrained: Any = None,
        ratio: float | None = None,
        quiet: bool = False,
        cache_device: Any = "auto",
        steps: EngineChoice = "auto",
        **more: Any,
    ) -> None:
        if pretrained is None:
            raise ConfigError("no model was named; add pretrained=NAME to --model_args")
        cache = {name: more.pop(name) for name in list(more) if name in _OPTIONS}
        self.cache_config = CacheConfig(**{"chunk": 0, "device": cache_device, **cache})
        self.ratio, self.quiet, self._steps = ratio, quiet, steps
        if isinstance(pretrained, str):
            pretrained = find(pretrained, offline=False)
        if isinstance(pretrained, str) and Path(pretrained).is_file():
            config = ModelConfig(pretrained, str(more.pop("dtype", "auto")))
            loaded = load(config, notify=logging.getLogger("lm_eval").info)
            pretrained, more["tokenizer"] = loaded.model, loaded.tokenizer
        if isinstance(pretrained, str):
            super().__init__(pretrained, **more)
            return
        pretrained.tie_weights = lambda *_, **__: None  # its weights are tied, and packed ones cannot be again
        super().__init__(pretrained, **more)
        del pretrained.tie_weights

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        if self.cache_config.policy == "full":
            with self._attached(1):
                return list(HFLM._loglikelihood_tokens(self, requests, disable_tqdm, override_bs))
        return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)

    @torch.no_grad()
    def score_continuations(
        self, context: Sequence[int], continuations: Sequence[Sequence[int]]
    ) -> Iterator[tuple[float, bool]]:
        """See `ByContext`."""
        with self._attached(len(context)) as cache:

            def feed(tokens: Sequence[int]) -> Tensor:
                """[n, vocabulary] log-probabilities of the token after each of these."""
                ids = torch.tensor([list(tokens)], device=input_device(self.model))
                logits = self.model(ids, past_key_values=cache, use_cache=True).logits[0]
                return torch.log_softmax(logits.float(), -1)

            if len(context) > 1:
                feed(context[:-1])
                before = cache.state_dict()
            for continuation in continuations:
                if len(context) > 1:
                    cache.load_state_dict(before)
                else:
                    cache.reset()
                fed = [context[-1], *continuation[:-1]]
                step = 1 if len(fed) <= DEFAULT_CHUNK else DEFAULT_CHUNK
                scores = torch.cat([feed(fed[start : start + step]) for start in range(0, len(fed), step)])
                expected = torch.tensor(list(continuation), device=input_device(self.model))
                log_probs = scores.gather(-1, expected[:, None])
                yield float(log_probs.sum()), bool((scores.argmax(-1) == expected).all())

    def _attached(self, context: int) -> Any:
        return attach(self.model, window_of_context(self.cache_config, self.ratio, context), engine=self._steps)

    def _model_generate(self, *args: Any, **kwargs: Any) -> Any:
        context = args[0] if args else kwargs["context"]
        with self._attached(context.shape[1]):
            return super()._model_generate(*args, **kwargs)


def register() -> None:
    """Register the model with the harness."""
    if NAME not in model_registry:
        model_registry.register(NAME, target=H2OLM)
