"""Whether facts can be recalled that were planted in a stream of text, at several distances.

A fact is a sentence that assigns a word to a name; the question is the beginning of that sentence. The word is seldom
the most likely token of a small model, so the answer is scored by its margin: the log-probability of the word minus
that of the most likely of the other words. The stream has the words of all names, so the model has to know which.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from h2o_stream.cache.attach import attach
from h2o_stream.cache.support import context_of, home_of
from h2o_stream.compare.comparison import Comparison, Job, JobProgress, Notify, label_of, window_of
from h2o_stream.compare.comparisons import RecallOptions
from h2o_stream.compare.folder import JobResult
from h2o_stream.compare.nll import STEP, digest_of, read_tokens
from h2o_stream.config import CacheConfig
from h2o_stream.errors import ConfigError, DataError

SPACING = 128
"""Approximate tokens of text between two facts."""

# fmt: off
_NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Irene", "Jack", "Kate", "Leo", "Maria",
    "Nina", "Oscar", "Paul", "Quentin", "Rose", "Sam", "Tina", "Victor", "Wendy", "Xavier", "Yvonne",
)
_WORDS = (
    "apple", "river", "candle", "garden", "silver", "tiger", "window", "bridge", "coffee", "mountain", "piano",
    "rocket", "sugar", "castle", "forest", "lemon", "button", "wagon", "anchor", "velvet", "ladder", "copper",
    "island", "feather",
)
# fmt: on

MAX_FACTS = len(_NAMES)

_MAX_TOKENS = 1 << 16
"""Tokens of a text that are used."""


class Recall(Comparison[RecallOptions]):
    """Every policy on the same stream and questions; only the questions that the full cache answers count."""

    name = "recall"

    _plan: Plan

    def begin(self, notify: Notify) -> dict[str, Any]:
        """Load the model and plant the facts."""
        settings = self.load_model(notify)
        tokens = read_tokens(self.options.text, self.tokenizer, _MAX_TOKENS)
        self._plan = plan_questions(self.tokenizer, tokens, self.options.facts, self.options.distances)
        context = context_of(self.model.config)
        if context is not None and self._plan.length > context:
            raise ConfigError(
                f"the last question stands at {self._plan.length}, beyond the model's {context} positions; "
                "lower --distances or --facts"
            )
        return {
            **settings,
            "text": str(self.options.text),
            "tokens": len(self._plan.tokens),
            "digest": digest_of(self._plan.tokens),
            "facts": self.options.facts,
            "distances": list(self.options.distances),
        }

    def jobs(self) -> list[Job]:
        """One for each policy."""
        plan = self._plan
        questions = digest_of([*plan.tokens, *itertools.chain(*plan.questions)])
        return [
            Job(
                label_of(config),
                self.key(config, questions=questions),
                len(plan.tokens),
                partial(measure_recall, self.model, config, plan),
            )
            for config in self.configs
        ]

    def records(self, results: Iterable[JobResult]) -> Iterator[dict[str, Any]]:
        """One for each policy and distance."""
        recalled_by_full: Tensor | None = None
        for config, result in zip(self.configs, results, strict=True):
            recalled_by_full = result.values > 0 if recalled_by_full is None else recalled_by_full
            for column, distance in enumerate(self.options.distances):
                margins = result.values[:, column][recalled_by_full[:, column]]
                yield {
                    "type": self.name,
                    "text": str(self.options.text),
                    "policy": config.policy,
                    "window": window_of(config),
                    "seed": config.seed,
                    "distance": distance,
                    "facts": len(margins),
                    "margin": float(margins.mean()) if len(margins) else None,
                    "recalled": float((margins > 0).float().mean()) if len(margins) else None,
                }


@dataclass(frozen=True)
class Plan:
    """A stream with facts, and the questions.

    Attributes:
        tokens: text with facts in it.
        questions: (token index, fact, index of the distance), ordered by token index.
        cues: the question of each fact.
        answers: the first token of each fact's word.
        choices: the first tokens of all words.
        distances: tokens between the end of a fact and its question.
    """

    tokens: tuple[int, ...]
    questions: tuple[tuple[int, int, int], ...]
    cues: tuple[tuple[int, ...], ...]
    answers: tuple[int, ...]
    choices: tuple[int, ...]
    distances: tuple[int, ...]

    @property
    def length(self) -> int:
        """Tokens up to the end of the last question."""
        return max(at + len(self.cues[fact]) for at, fact, _ in self.questions)


def plan_questions(tokenizer: Any, text: Sequence[int], facts: int, distances: Sequence[int]) -> Plan:
    """Plant `facts` facts in a text, and a question for each of them at every distance.

    Raises:
        ConfigError: more facts than there are names.
        DataError: the text is too short.
    """
    if facts > MAX_FACTS:
        raise ConfigError(f"facts is {facts}, there are {MAX_FACTS} names; lower --facts")

    def encode(sentence: str) -> list[int]:
        return list(tokenizer(sentence, add_special_tokens=False)["input_ids"])

    first_tokens = {word: encode(f" {word}")[0] for word in _WORDS}
    words = [word for word, first in first_tokens.items() if list(first_tokens.values()).count(first) == 1]
    if facts > len(words):
        raise ConfigError(f"facts is {facts}, this tokenizer tells {len(words)} words apart; lower --facts")
    filler, stream, ends = iter(text), list[int](), list[int]()
    for name, word in zip(_NAMES[:facts], words, strict=False):
        stream += itertools.islice(filler, SPACING)
        stream += encode(f"\n\nThe password of {name} is {word}.\n\n")
        ends.append(len(stream))
    questions = sorted((end + far, fact, i) for fact, end in enumerate(ends) for i, far in enumerate(distances))
    stream += itertools.islice(filler, questions[-1][0] - len(stream))
    if len(stream) < questions[-1][0]:
        raise DataError(
            f"--text is {len(text)} tokens, {questions[-1][0]} are needed in all for {facts} facts asked for after "
            f"{max(distances)}; lower --facts or --distances"
        )
    return Plan(
        tokens=tuple(stream),
        questions=tuple(questions),
        cues=tuple(tuple(encode(f"\n\nThe password of {name} is")) for name in _NAMES[:facts]),
        answers=tuple(first_tokens[word] for word in words[:facts]),
        choices=tuple(first_tokens[word] for word in words),
        distances=tuple(distances),
    )


@torch.no_grad()
def measure_recall(model: Any, config: CacheConfig, plan: Plan) -> Iterator[JobProgress | JobResult]:
    """Feed the stream. At each question, score the answer and restore the cache from before the question.

    Yields:
        `JobProgress` after each piece, and last the margins, [facts, distances] float32 in nats.
    """
    margins = torch.empty(len(plan.answers), len(plan.distances))
    choices = torch.tensor(plan.choices)
    fed = 0
    with attach(model, config) as cache:

        def feed(tokens: Sequence[int]) -> Tensor:
            ids = torch.tensor([list(tokens)], device=home_of(model))
            logits: Tensor = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            return logits[0, -1].float().cpu()

        for at, fact, distance in plan.questions:
            while fed < at:
                piece = plan.tokens[fed : min(fed + STEP, at)]
                feed(piece)
                fed += len(piece)
                yield JobProgress(fed)
            state = cache.state_dict()
            logits = feed(plan.cues[fact])
            cache.load_state_dict(state)
            others = logits[choices[choices != plan.answers[fact]]]
            margins[fact, distance] = logits[plan.answers[fact]] - others.max()
    yield JobResult(values=margins)
