"""Answers to requests under a cache policy, in batches, and how near they come to the references (ROUGE)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from h2o_stream.cache.attach import attach
from h2o_stream.cache.support import context_of
from h2o_stream.config import AnswerConfig, CacheConfig
from h2o_stream.errors import ConfigError, H2OStreamError
from h2o_stream.session.requests import Request

ROUGE = ("rouge1", "rouge2", "rougeL")


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


def answer(
    model: Any,
    tokenizer: Any,
    config: CacheConfig,
    requests: Sequence[Request],
    prompts: Sequence[Sequence[int]],
    todo: Sequence[int],
    how: AnswerConfig,
    rouge: Rouge,
) -> Iterator[list[Prediction]]:
    """Answer requests, those of like length together.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer.
        config: the policy under test; with a chunk of 0 prompts are compressed after they were read whole.
        requests: all requests.
        prompts: their tokens.
        todo: which of them.
        how: drawn or not, and how many at once.
        rouge: the measure.

    Yields:
        The answers of each batch.
    """
    order = sorted(todo, key=lambda index: (str(requests[index].sampling), len(prompts[index])))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    for _, alike in groupby(order, key=lambda index: requests[index].sampling):
        group = list(alike)
        for start in range(0, len(group), how.batch):
            part, begun = group[start : start + how.batch], time.perf_counter()
            longest = max(len(prompts[index]) for index in part)
            ids = torch.full((len(part), longest), pad)
            for row, index in enumerate(part):
                ids[row, longest - len(prompts[index]) :] = torch.tensor(list(prompts[index]))
            lengths = torch.tensor([len(prompts[index]) for index in part])
            mask = (torch.arange(longest) >= longest - lengths[:, None]).long()
            sampling = requests[part[0]].sampling
            drawn = how.sample and bool(sampling.temperature)
            draw = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0} if drawn else {}
            torch.manual_seed(how.seed + part[0])
            with attach(model, config):
                output = model.generate(
                    input_ids=ids.to(model.device),
                    attention_mask=mask.to(model.device),
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
            yield [
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
