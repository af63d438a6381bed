"""ROUGE of the answers to requests, in batches, under each policy."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from h2o_stream.attachment.attach import attach
from h2o_stream.attachment.model_facts import context_of, input_device
from h2o_stream.compare.catalog import SummarizeOptions
from h2o_stream.compare.comparison import Comparison, Job, Notify, label_of, window_of
from h2o_stream.compare.folder import JobResult
from h2o_stream.compare.summarize.rouge import ROUGE, RougeScorer
from h2o_stream.config import POLICIES, CacheConfig, SamplingConfig
from h2o_stream.errors import ConfigError
from h2o_stream.resources import write_text
from h2o_stream.session.jsonl import jsonl_text
from h2o_stream.session.requests import read_requests


class Summarize(Comparison[SummarizeOptions]):
    """Every policy and window on the same requests."""

    name = "summarize"

    def __init__(self, options: SummarizeOptions) -> None:
        super().__init__(options)
        self._requests, self._scorer = read_requests(options.request_file, options.limit), RougeScorer()
        self._settings = {name: getattr(options, name) for name in ("prefill", "sample", "seed", "batch")}
        self._prompts: list[list[int]] = []
        self._context: int | None = None
        self._predictions: dict[str, list[dict[str, Any]]] = {}

    def begin(self, notify: Notify) -> dict[str, Any]:
        """Load the model and tokenize the requests."""
        settings = self.load_model(notify)
        self._prompts = [list(self.tokenizer(request.prompt)["input_ids"]) for request in self._requests]
        self._context = context_of(self.model.config)
        self._leave_out_long(notify)
        return {
            **settings,
            "source": str(self.options.request_file),
            "requests": len(self._requests),
            "prompt_tokens": fmean(map(len, self._prompts)),
            **self._settings,
            "seed": self.options.seed,
        }

    def _leave_out_long(self, notify: Notify) -> None:
        """Say which policies cannot read which requests, and drop those that can read none."""
        too_long = [number for number in range(len(self._requests)) if self._beyond_context(number)]
        bounded = [config for config in self.configs if not moves_positions(config)]
        if not (too_long and bounded):
            return
        needed = max(map(self._needed, too_long))
        reason = f"up to {needed} positions with the answer, the model has {self._context}"
        if len(too_long) == len(self._requests):
            self.configs = [config for config in self.configs if moves_positions(config)]
        if not self.configs:
            raise ConfigError(
                f"all requests are too long: {reason}; use --positions gap or rolling, or another --model"
            )
        for label in map(label_of, bounded):
            notify(f"{label} leaves out {len(too_long)} of {len(self._requests)} requests: {reason}")

    def _needed(self, number: int) -> int:
        return len(self._prompts[number]) + self._requests[number].sampling.max_tokens

    def _beyond_context(self, number: int) -> bool:
        return self._context is not None and self._needed(number) > self._context

    def _batches(self, config: CacheConfig) -> list[tuple[int, ...]]:
        """The requests of each batch: same sampling settings, similar length, one kind of prefill.

        A batch has one window, so ratios of the prompt's length need a batch for each request.
        """
        size = 1 if config.by_ratio else self.options.batch

        def group(number: int) -> tuple[str, bool]:
            return str(self._requests[number].sampling), self._beyond_context(number)

        numbers = [n for n in range(len(self._requests)) if moves_positions(config) or not self._beyond_context(n)]
        numbers.sort(key=lambda number: (group(number), len(self._prompts[number])))
        groups = [tuple(members) for _, members in groupby(numbers, key=group)]
        return [members[start : start + size] for members in groups for start in range(0, len(members), size)]

    def jobs(self) -> list[Job]:
        """One for each batch and policy."""
        keys = [(config, self.key(config, **self._settings)) for config in self.configs]
        return [self._job(config, batch, key) for config, key in keys for batch in self._batches(config)]

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
        if self._beyond_context(batch[0]):
            config = replace(config, chunk=None)  # one chunk of a whole prompt has distances beyond the context
        with attach(self.model, config) as cache:
            output = generate(
                self.model,
                [self._prompts[index] for index in batch],
                pad,
                tokenizer=self.tokenizer,
                max_new_tokens=sampling.max_tokens,
                stop_strings=list(sampling.stop) or None,
                **_sampling_arguments(sampling, self.options.sample),
            )
            window = cache.plan.window or None
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
                    "window": window,
                    "rouge": self._scorer.score(text, request.reference),
                }
            )
        yield JobResult({"predictions": predictions})

    def records(self, results: Iterable[JobResult]) -> Iterator[dict[str, Any]]:
        """One for each policy and window."""
        remaining = iter(results)
        for config in self.configs:
            predictions = [
                prediction for _ in self._batches(config) for prediction in next(remaining).figures["predictions"]
            ]
            scored = [prediction["rouge"] for prediction in predictions if prediction["rouge"] is not None]
            means = [fmean(column) for column in zip(*scored, strict=True)] if scored else [None] * len(ROUGE)
            tokens = sum(prediction["new_tokens"] for prediction in predictions)
            windows = [prediction["window"] for prediction in predictions if prediction.get("window")]
            evicting = sum(
                bool(prediction["window"]) and self._exceeds_window(prediction) for prediction in predictions
            )
            window = round(fmean(windows)) if windows else window_of(config)
            yield {
                "type": self.name,
                "policy": config.name,
                "window": window,
                "windows": [min(windows), max(windows)] if windows else None,
                "n": len(predictions),
                "evicting": evicting,
                "left_out": len(self._requests) - len(predictions),
                **dict(zip(ROUGE, means, strict=True)),
                "new_tokens": tokens,
                "tok_s": tokens / sum(prediction["seconds"] for prediction in predictions),
            }
            if self.options.output_path is not None:
                self._write_output(self.options.output_path, predictions)
            self._predictions[f"{config.name}-{window}" if window else config.name] = predictions

    def _exceeds_window(self, prediction: Mapping[str, Any]) -> bool:
        """Whether tokens were evicted before the end of a reply."""
        seen = len(self._prompts[prediction["index"]]) + prediction["new_tokens"]
        return bool(seen > prediction["window"])

    def _write_output(self, path: Path, predictions: Sequence[Mapping[str, Any]]) -> None:
        in_order = sorted(predictions, key=lambda prediction: int(prediction["index"]))
        write_text(path, jsonl_text(map(self._in_helms_form, in_order)), "--output-path")

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
            yield f"predictions/{label}.jsonl", jsonl_text(lines)
            yield f"helm/{label}.jsonl", jsonl_text(map(self._in_helms_form, lines))

    def _in_helms_form(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """A prediction as HELM imports it: the request, and a result."""
        request = self._requests[line["index"]]
        finish = "length" if line["new_tokens"] >= request.sampling.max_tokens else "stop"
        choice = {"text": line["text"], "finish_reason": finish}
        times = {"batch_time": line["seconds"], "batch_size": 1}
        return {"request": dict(request.record), "result": {"choices": [choice], "request_time": times}}


def moves_positions(config: CacheConfig) -> bool:
    """Whether a prompt may be longer than the model's context."""
    return config.policy != "full" and (config.positions or POLICIES[config.policy].positions) != "absolute"


def generate(model: Any, prompts: Sequence[Sequence[int]], pad: int, **arguments: Any) -> Tensor:
    """Token ids [B, new] that `model.generate` adds to prompts of several lengths, which are padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    home = input_device(model)
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
