"""ROUGE of the answers to requests, in batches, under each policy."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from h2o_stream.cache.attach import attach
from h2o_stream.cache.support import context_of, home_of
from h2o_stream.compare.comparison import Comparison, Job, Notify, label_of, window_of
from h2o_stream.compare.comparisons import SummarizeOptions
from h2o_stream.compare.folder import JobResult
from h2o_stream.config import CacheConfig, SamplingConfig
from h2o_stream.errors import ConfigError, H2OStreamError
from h2o_stream.session.requests import Request, read_requests

ROUGE = ("rouge1", "rouge2", "rougeL")


class Summarize(Comparison[SummarizeOptions]):
    """Every policy and window on the same requests.

    Raises:
        H2OStreamError: rouge-score is not installed.
    """

    name = "summarize"

    def __init__(self, options: SummarizeOptions) -> None:
        super().__init__(options)
        self._requests, self._scorer = read_requests(options.requests, options.limit), rouge_scorer()
        self._settings = {name: getattr(options, name) for name in ("prefill", "sample", "seed", "batch")}
        self._prompts: list[list[int]] = []
        self._batches: list[tuple[int, ...]] = []
        self._predictions: dict[str, list[dict[str, Any]]] = {}

    def begin(self, notify: Notify) -> dict[str, Any]:
        """Load the model and tokenize the requests."""
        settings = self.load_model(notify)
        self._prompts = encode(self.tokenizer, self.model, self._requests)
        self._batches = batches(self._requests, self._prompts, self.options.batch)
        return {
            **settings,
            "source": str(self.options.requests),
            "requests": len(self._requests),
            "prompt_tokens": fmean(map(len, self._prompts)),
            **self._settings,
            "seed": self.options.seed,
        }

    def jobs(self) -> list[Job]:
        """One for each batch and policy."""
        keys = [(config, self.key(config, **self._settings)) for config in self.configs]
        return [self._job(config, batch, key) for config, key in keys for batch in self._batches]

    def _job(self, config: CacheConfig, batch: tuple[int, ...], key: Mapping[str, Any]) -> Job:
        requests = [(self._requests[index].prompt, str(self._requests[index].sampling)) for index in batch]
        key = {**key, "requests": requests}
        return Job(label_of(config), key, len(batch), partial(self._answer, config, batch), config)

    def _answer(self, config: CacheConfig, batch: tuple[int, ...]) -> Iterator[JobResult]:
        """The answers to a batch: up to their stop strings, stripped; `seconds` is each one's share of the time."""
        requests, sampling = [self._requests[index] for index in batch], self._requests[batch[0]].sampling
        start_time = time.perf_counter()
        torch.manual_seed(self.options.seed + batch[0])
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else self.tokenizer.eos_token_id
        with attach(self.model, config):
            output = generate(
                self.model,
                [self._prompts[index] for index in batch],
                pad,
                tokenizer=self.tokenizer,
                max_new_tokens=sampling.max_tokens,
                stop_strings=list(sampling.stop) or None,
                **_sampling_arguments(sampling, self.options.sample),
            )
        seconds = (time.perf_counter() - start_time) / len(batch)
        predictions = []
        for index, request, row in zip(batch, requests, output, strict=True):
            text = _truncate_at_stops(self.tokenizer.decode(row, skip_special_tokens=True), sampling.stop)
            predictions.append(
                {
                    "index": index,
                    "text": text,
                    "new_tokens": _count_new_tokens(row.tolist(), pad, self.model),
                    "seconds": seconds,
                    "rouge": self._rouge(text, request.reference),
                }
            )
        yield JobResult({"predictions": predictions})

    def _rouge(self, text: str, reference: str | None) -> list[float] | None:
        """F-measures of `ROUGE`, 0 to 1; None without a reference."""
        if reference is None:
            return None
        scores = self._scorer.score(reference, text)
        return [float(scores[name].fmeasure) for name in ROUGE]

    def records(self, results: Iterable[JobResult]) -> Iterator[dict[str, Any]]:
        """One for each policy and window."""
        remaining = iter(results)
        for config in self.configs:
            predictions = [prediction for _ in self._batches for prediction in next(remaining).figures["predictions"]]
            scored = [prediction["rouge"] for prediction in predictions if prediction["rouge"] is not None]
            means = [fmean(column) for column in zip(*scored, strict=True)] if scored else [None] * len(ROUGE)
            tokens = sum(prediction["new_tokens"] for prediction in predictions)
            yield {
                "type": self.name,
                "policy": config.policy,
                "window": window_of(config),
                "n": len(predictions),
                **dict(zip(ROUGE, means, strict=True)),
                "new_tokens": tokens,
                "tok_s": tokens / sum(prediction["seconds"] for prediction in predictions),
            }
            self._predictions[f"{config.policy}-{config.window}" if window_of(config) else config.policy] = predictions

    def files(self) -> Iterator[tuple[str, str]]:
        """The predictions of each policy and window, with prompts and references."""
        for label, predictions in self._predictions.items():
            lines = [
                {
                    **prediction,
                    "reference": self._requests[prediction["index"]].reference,
                    "prompt": self._requests[prediction["index"]].prompt,
                }
                for prediction in sorted(predictions, key=lambda prediction: int(prediction["index"]))
            ]
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            yield f"predictions/{label}.jsonl", text


def rouge_scorer() -> Any:
    """rouge-score with stemming, as for the tables of the H2O cookbook and of HELM.

    Raises:
        H2OStreamError: rouge-score is not installed.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise H2OStreamError("ROUGE needs rouge-score; pip install 'h2o-stream[rouge]'") from error
    return RougeScorer(list(ROUGE), use_stemmer=True)


def encode(tokenizer: Any, model: Any, requests: Sequence[Request]) -> list[list[int]]:
    """Tokenize the prompts.

    Raises:
        ConfigError: a prompt with its answer is longer than the model's context.
    """
    prompts = [list(tokenizer(request.prompt)["input_ids"]) for request in requests]
    context = context_of(model.config)
    for number, (prompt, request) in enumerate(zip(prompts, requests, strict=True), 1):
        needed = len(prompt) + request.sampling.max_tokens
        if context is not None and needed > context:
            raise ConfigError(
                f"request {number} needs {needed} positions with its answer, the model has {context}; "
                "leave it out, or use another --model"
            )
    return prompts


def batches(requests: Sequence[Request], prompts: Sequence[Sequence[int]], size: int) -> list[tuple[int, ...]]:
    """The requests of each batch: those with the same sampling settings, of similar length."""
    by_length = sorted(range(len(requests)), key=lambda index: (str(requests[index].sampling), len(prompts[index])))
    groups = [tuple(group) for _, group in groupby(by_length, key=lambda index: requests[index].sampling)]
    return [group[start : start + size] for group in groups for start in range(0, len(group), size)]


def generate(model: Any, prompts: Sequence[Sequence[int]], pad: int, **arguments: Any) -> Tensor:
    """Token ids [B, new] that `model.generate` adds to prompts of several lengths, which are padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    home = home_of(model)
    output: Tensor = model.generate(input_ids=ids.to(home), attention_mask=mask.to(home), pad_token_id=pad, **arguments)
    return output[:, longest:]


def _sampling_arguments(sampling: SamplingConfig, sample: bool) -> dict[str, Any]:
    if not (sample and sampling.temperature):
        return {"do_sample": False}
    return {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}


def _truncate_at_stops(text: str, stops: Sequence[str]) -> str:
    for stop in stops:
        text = text.partition(stop)[0]
    return text.strip()


def _count_new_tokens(tokens: list[int], pad: int, model: Any) -> int:
    """Tokens generated, the end-of-turn token included and the padding after it excluded."""
    ends = model.generation_config.eos_token_id
    ends = {pad, *(ends if isinstance(ends, list) else [ends])}
    return next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
