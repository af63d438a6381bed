"""ROUGE of the answers to requests under each policy."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from h2o_lab.summarize.options import SummarizeOptions
from h2o_lab.summarize.requests import read_requests
from h2o_lab.summarize.rouge import ROUGE, RougeScorer
from h2o_stream.base.resources import write_text
from h2o_stream.compare.comparison import Comparison, Job, Notify, label_of, window_of
from h2o_stream.compare.folder import JobResult
from h2o_stream.compare.models import context_of
from h2o_stream.config import POLICIES, CacheConfig
from h2o_stream.engine.events import Finished, Token
from h2o_stream.errors import ConfigError, H2OStreamError
from h2o_stream.session.jsonl import jsonl_text


class Summarize(Comparison[SummarizeOptions]):
    """Every policy and window on the same requests."""

    name = "summarize"
    native = True

    def __init__(self, options: SummarizeOptions) -> None:
        super().__init__(options)
        self._requests, self._scorer = read_requests(options.request_file, options.limit), RougeScorer()
        self._settings = {name: getattr(options, name) for name in ("prefill", "sample", "seed")}
        self._prompts: list[list[int]] = []
        self._context: int | None = None
        self._predictions: dict[str, list[dict[str, Any]]] = {}

    def begin(self, notify: Notify) -> dict[str, Any]:
        """Load the model and tokenize the requests."""
        settings = self.load_model(notify)
        self._prompts = [list(self.tokenizer(request.prompt)["input_ids"]) for request in self._requests]
        self._context = context_of(self.model)
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

    def _numbers(self, config: CacheConfig) -> list[int]:
        """The requests that a policy can read."""
        return [n for n in range(len(self._requests)) if moves_positions(config) or not self._beyond_context(n)]

    def jobs(self) -> list[Job]:
        """One for each request and policy."""
        keys = [(config, self.key(config, **self._settings)) for config in self.configs]
        return [self._job(config, number, key) for config, key in keys for number in self._numbers(config)]

    def _job(self, config: CacheConfig, number: int, key: Mapping[str, Any]) -> Job:
        request = self._requests[number]
        key = {**key, "number": number, "request": [request.prompt, str(request.sampling)]}
        return Job(label_of(config), key, 1, partial(self._answer, config, number), config)

    def _answer(self, config: CacheConfig, number: int) -> Iterator[JobResult]:
        """The answer to a request: up to its stop strings, stripped."""
        request, begun = self._requests[number], time.perf_counter()
        if self._beyond_context(number):
            config = replace(config, chunk=None)  # one chunk of a whole prompt has distances beyond the context
        sampling = replace(request.sampling, seed=self.options.seed + number)
        if not self.options.sample:
            sampling = replace(sampling, temperature=0.0)
        tokens, text = 0, ""
        with self.engine_for(config, sampling) as engine:
            for event in chain(engine.prefill(self._prompts[number]), engine.decode()):
                if isinstance(event, Finished) and event.detail:
                    raise H2OStreamError(event.detail)
                if isinstance(event, Token | Finished):
                    tokens, text = tokens + isinstance(event, Token), text + event.text
            window = engine.cache.plan.window
        prediction = {
            "index": number,
            "text": text.strip(),
            "new_tokens": tokens,
            "seconds": time.perf_counter() - begun,
            "window": None if config.policy == "full" else window,
            "rouge": self._scorer.score(text.strip(), request.reference),
        }
        yield JobResult({"prediction": prediction})

    def records(self, results: Iterable[JobResult]) -> Iterator[dict[str, Any]]:
        """One for each policy and window."""
        remaining = iter(results)
        for config in self.configs:
            predictions = [next(remaining).figures["prediction"] for _ in self._numbers(config)]
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
                "policy": config.policy,
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
            self._predictions[f"{config.policy}-{window}" if window else config.policy] = predictions

    def _exceeds_window(self, prediction: Mapping[str, Any]) -> bool:
        """Whether tokens were evicted before the end of a reply."""
        seen = len(self._prompts[prediction["index"]]) + prediction["new_tokens"]
        return bool(seen > prediction["window"])

    def _write_output(self, path: Path, predictions: Sequence[Mapping[str, Any]]) -> None:
        write_text(path, jsonl_text(map(self._in_helms_form, predictions)), "--output-path")

    def files(self) -> Iterator[tuple[str, str]]:
        """The predictions of each policy and window, with prompts and references."""
        for label, predictions in self._predictions.items():
            lines = [
                {
                    **prediction,
                    "reference": self._requests[prediction["index"]].reference,
                    "prompt": self._requests[prediction["index"]].prompt,
                }
                for prediction in predictions
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
