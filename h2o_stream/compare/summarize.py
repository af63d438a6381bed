"""Answers to requests under a cache policy, in batches, and how near they come to the references (ROUGE)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from statistics import fmean
from typing import Any

import torch

from h2o_stream.cache.attach import attach
from h2o_stream.cache.identity import model_digest
from h2o_stream.cache.support import context_of, home_of
from h2o_stream.compare.comparison import Comparison, Job, Notify, label_of, told, window_of
from h2o_stream.compare.comparisons import SummarizeOptions
from h2o_stream.compare.folder import Part, identity
from h2o_stream.config import CacheConfig
from h2o_stream.errors import ConfigError, H2OStreamError
from h2o_stream.models.load import LoadedModel, load
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
        self._requests, self._rouge = read_requests(options.requests, options.limit), Rouge()
        self._settings = {name: getattr(options, name) for name in ("prefill", "sample", "seed", "batch")}
        self._loaded: LoadedModel
        self._prompts: list[list[int]] = []
        self._batches: list[tuple[int, ...]] = []
        self._made: dict[str, list[dict[str, Any]]] = {}

    def begin(self, notify: Notify) -> dict[str, Any]:
        """Load the model and encode the requests."""
        self._loaded = load(self.options.model, notify=notify)
        self._prompts = encode(self._loaded.tokenizer, self._loaded.model, self._requests)
        self._batches = batches(self._requests, self._prompts, self.options.batch)
        return {
            "model": self._loaded.name,
            "identity": model_digest(self._loaded.model),
            "source": str(self.options.requests),
            "requests": len(self._requests),
            "prompt_tokens": fmean(map(len, self._prompts)),
            **self._settings,
            **told(self.configs),
            "seed": self.options.seed,
        }

    def jobs(self) -> list[Job]:
        """One for each batch and policy."""
        model = self._loaded.model
        of = [(config, identity(model, config)) for config in self.configs]
        return [self._job(config, part, own) for config, own in of for part in self._batches]

    def _job(self, config: CacheConfig, part: tuple[int, ...], own: Mapping[str, Any]) -> Job:
        asked = [(self._requests[index].prompt, str(self._requests[index].sampling)) for index in part]
        key = {"what": self.name, "requests": asked, **self._settings, **own}
        return Job(label_of(config), key, len(part), partial(self._answer, config, part))

    def _answer(self, config: CacheConfig, part: tuple[int, ...]) -> Iterator[Part]:
        model, tokenizer, prompts = self._loaded.model, self._loaded.tokenizer, self._prompts
        made = answer(model, tokenizer, config, self._requests, prompts, part, self.options, self._rouge)
        yield Part({"predictions": [asdict(prediction) for prediction in made]})

    def records(self, parts: Iterable[Part]) -> Iterator[dict[str, Any]]:
        """One for each policy and window."""
        coming = iter(parts)
        for config in self.configs:
            made = [prediction for _ in self._batches for prediction in next(coming).figures["predictions"]]
            scored = [prediction["rouge"] for prediction in made if prediction["rouge"] is not None]
            means = [fmean(column) for column in zip(*scored, strict=True)] if scored else [None] * len(ROUGE)
            tokens = sum(prediction["new_tokens"] for prediction in made)
            yield {
                "type": self.name,
                "policy": config.policy,
                "window": window_of(config),
                "n": len(made),
                **dict(zip(ROUGE, means, strict=True)),
                "new_tokens": tokens,
                "tok_s": tokens / sum(prediction["seconds"] for prediction in made),
            }
            self._made[f"{config.policy}-{config.window}" if window_of(config) else config.policy] = made

    def files(self) -> Iterator[tuple[str, str]]:
        """The answers of each policy and window, beside what they answer."""
        for label, made in self._made.items():
            lines = [
                {
                    **prediction,
                    "reference": self._requests[prediction["index"]].reference,
                    "prompt": self._requests[prediction["index"]].prompt,
                }
                for prediction in sorted(made, key=lambda prediction: int(prediction["index"]))
            ]
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            yield f"predictions/{label}.jsonl", text


@dataclass(frozen=True)
class Prediction:
    """One answer.

    Attributes:
        index: which request.
        text: the answer, up to its stop string, without blanks around it.
        new_tokens: tokens drawn for it.
        seconds: time it took, its part of the batch's.
        rouge: F-measures of `ROUGE`, 0 to 1; None without a reference.
    """

    index: int
    text: str
    new_tokens: int
    seconds: float
    rouge: tuple[float, float, float] | None


class Rouge:
    """rouge-score's F-measures with stemming, as the H2O cookbook's and HELM's tables have them.

    Raises:
        H2OStreamError: rouge-score is not installed.
    """

    def __init__(self) -> None:
        try:
            from rouge_score.rouge_scorer import RougeScorer
        except ImportError as error:
            raise H2OStreamError("ROUGE needs rouge-score; pip install 'h2o-stream[rouge]'") from error
        self._scorer = RougeScorer(list(ROUGE), use_stemmer=True)

    def __call__(self, text: str, reference: str | None) -> tuple[float, float, float] | None:
        """The three measures of a text against its reference."""
        if reference is None:
            return None
        scores = self._scorer.score(reference, text)
        one, two, longest = (float(scores[name].fmeasure) for name in ROUGE)
        return one, two, longest


def encode(tokenizer: Any, model: Any, requests: Sequence[Request]) -> list[list[int]]:
    """The prompts as tokens.

    Raises:
        ConfigError: a prompt with its answer is longer than the model's context, which the full cache cannot pass.
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
    """Which requests are answered together: those of one way to draw, of like length."""
    order = sorted(range(len(requests)), key=lambda index: (str(requests[index].sampling), len(prompts[index])))
    alike = [tuple(same) for _, same in groupby(order, key=lambda index: requests[index].sampling)]
    return [same[start : start + size] for same in alike for start in range(0, len(same), size)]


def answer(
    model: Any,
    tokenizer: Any,
    config: CacheConfig,
    requests: Sequence[Request],
    prompts: Sequence[Sequence[int]],
    part: Sequence[int],
    options: SummarizeOptions,
    rouge: Rouge,
) -> list[Prediction]:
    """Answer requests together.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer.
        config: the policy under test; with a chunk of 0 prompts are compressed after they were read whole.
        requests: all requests.
        prompts: their tokens.
        part: which of them, all of one way to draw.
        options: drawn or not, and the seed.
        rouge: the measure.
    """
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    begun = time.perf_counter()
    longest = max(len(prompts[index]) for index in part)
    ids = torch.full((len(part), longest), pad)
    for row, index in enumerate(part):
        ids[row, longest - len(prompts[index]) :] = torch.tensor(list(prompts[index]))
    lengths = torch.tensor([len(prompts[index]) for index in part])
    mask = (torch.arange(longest) >= longest - lengths[:, None]).long()
    sampling = requests[part[0]].sampling
    drawn = options.sample and bool(sampling.temperature)
    draw = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0} if drawn else {}
    torch.manual_seed(options.seed + part[0])
    with attach(model, config):
        output = model.generate(
            input_ids=ids.to(home_of(model)),
            attention_mask=mask.to(home_of(model)),
            do_sample=drawn,
            max_new_tokens=sampling.max_tokens,
            stop_strings=list(sampling.stop) or None,
            tokenizer=tokenizer,
            pad_token_id=pad,
            **draw,
        )[:, longest:]
    seconds = (time.perf_counter() - begun) / len(part)
    texts = [_until(tokenizer.decode(row, skip_special_tokens=True), sampling.stop) for row in output]
    counts = [_count(row.tolist(), pad, model) for row in output]
    return [
        Prediction(index, text, count, seconds, rouge(text, requests[index].reference))
        for index, text, count in zip(part, texts, counts, strict=True)
    ]


def _until(text: str, stops: Sequence[str]) -> str:
    for stop in stops:
        text = text.partition(stop)[0]
    return text.strip()


def _count(tokens: list[int], pad: int, model: Any) -> int:
    """Tokens drawn, the end-of-turn token included, without the padding behind it."""
    ends = model.generation_config.eos_token_id
    ends = {pad, *(ends if isinstance(ends, list) else [ends])}
    return next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
