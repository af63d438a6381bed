"""Whether a fact from a while ago can still be told: planted in a stream of text, asked for at set distances.

A fact is a sentence that gives a person a word; the question is the sentence's own beginning. A small model seldom says
the word as its first choice, so that the answer is scored by its margin: the log-probability of the word, less that of
the likeliest of all other words that could have stood there. Other people's words stand in the same stream, so that
knowing that some word was given is not enough.
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
from h2o_stream.cache.identity import model_digest
from h2o_stream.cache.support import context_of, home_of
from h2o_stream.compare.comparison import Comparison, Doing, Job, Notify, label_of, told, window_of
from h2o_stream.compare.comparisons import RecallOptions
from h2o_stream.compare.folder import Part, identity
from h2o_stream.compare.nll import STEP, digest_of, read_tokens
from h2o_stream.config import CacheConfig
from h2o_stream.errors import ConfigError, DataError
from h2o_stream.models.load import load

SPACING = 128
"""Tokens of text between two facts, about."""

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

MOST_FACTS = len(_NAMES)


_LONGEST = 1 << 16
"""Tokens of a text that are looked at."""


class Recall(Comparison[RecallOptions]):
    """Every policy on the same stream and questions; only the questions that the full cache answers count."""

    name = "recall"

    def __init__(self, options: RecallOptions) -> None:
        super().__init__(options)
        self._model: Any = None
        self._plan: Plan

    def begin(self, notify: Notify) -> dict[str, Any]:
        """Load the model and plant the facts."""
        loaded = load(self.options.model, notify=notify)
        self._model = loaded.model
        tokens = read_tokens(self.options.text, loaded.tokenizer, _LONGEST)
        self._plan = plan_questions(loaded.tokenizer, tokens, self.options.facts, self.options.distances)
        check_context(loaded.model, self._plan)
        return {
            "model": loaded.name,
            "identity": model_digest(self._model),
            "text": str(self.options.text),
            "tokens": len(self._plan.tokens),
            "digest": digest_of(self._plan.tokens),
            "facts": self.options.facts,
            "distances": list(self.options.distances),
            **told(self.configs),
        }

    def jobs(self) -> list[Job]:
        """One for each policy."""
        return [self._job(config) for config in self.configs]

    def _job(self, config: CacheConfig) -> Job:
        questions = digest_of([*self._plan.tokens, *itertools.chain(*self._plan.questions)])
        key = {"what": self.name, "questions": questions, **identity(self._model, config)}
        return Job(label_of(config), key, len(self._plan.tokens), partial(ask, self._model, config, self._plan))

    def records(self, parts: Iterable[Part]) -> Iterator[dict[str, Any]]:
        """One for each policy and distance."""
        passed: Tensor | None = None
        for config, part in zip(self.configs, parts, strict=True):
            passed = part.values > 0 if passed is None else passed
            for column, distance in enumerate(self.options.distances):
                margins = part.values[:, column][passed[:, column]]
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
    """One stream and its questions.

    Attributes:
        tokens: text with facts in it.
        questions: (tokens fed before it, fact, which distance) in the order of the stream.
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
        """The last position anything is at."""
        return max(at + len(self.cues[fact]) for at, fact, _ in self.questions)


def plan_questions(tokenizer: Any, text: Sequence[int], facts: int, distances: Sequence[int]) -> Plan:
    """Plant `facts` facts into a text and ask for each at every distance.

    Raises:
        ConfigError: more facts than there are names.
        DataError: the text is too short.
    """
    if facts > MOST_FACTS:
        raise ConfigError(f"facts is {facts}, there are {MOST_FACTS} names; lower --facts")

    def encode(sentence: str) -> list[int]:
        return list(tokenizer(sentence, add_special_tokens=False)["input_ids"])

    firsts = {word: encode(f" {word}")[0] for word in _WORDS}
    words = [word for word, first in firsts.items() if list(firsts.values()).count(first) == 1]
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
        answers=tuple(firsts[word] for word in words[:facts]),
        choices=tuple(firsts[word] for word in words),
        distances=tuple(distances),
    )


def check_context(model: Any, plan: Plan) -> None:
    """A full cache knows nothing beyond the model's context, and it is what the others are held against.

    Raises:
        ConfigError: the stream is longer.
    """
    context = context_of(model.config)
    if context is not None and plan.length > context:
        raise ConfigError(
            f"the last question stands at {plan.length}, beyond the model's {context} positions; "
            "lower --distances or --facts"
        )


@torch.no_grad()
def ask(model: Any, config: CacheConfig, plan: Plan) -> Iterator[Doing | Part]:
    """Feed the stream; at each question ask, and take the question back.

    Yields:
        `Doing` after each piece, and last the margins, [facts, distances] float32 in nats.
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
                part = plan.tokens[fed : min(fed + STEP, at)]
                feed(part)
                fed += len(part)
                yield Doing(fed)
            state = cache.state_dict()
            logits = feed(plan.cues[fact])
            cache.load_state_dict(state)
            others = logits[choices[choices != plan.answers[fact]]]
            margins[fact, distance] = logits[plan.answers[fact]] - others.max()
    yield Part(values=margins)
