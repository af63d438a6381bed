"""Replies with guesses and without: the same texts, the same states, and how much faster, as users have them.

``python -m lab.tools.exact_guesses [MODEL]`` holds three kinds of conversations with several seeds, each of them twice:
the turns of ``h2o-stream``, code that is changed, and JSON by a schema. All options are h2o-chat's own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from statistics import median
from typing import Any, NamedTuple

from h2o_lab.speculation.comparison import MODES, ORDER, digest_of
from h2o_stream.base.progress import ignore
from h2o_stream.config import (
    CHAT_RECALL,
    DEFAULT_MODEL,
    CacheConfig,
    ModelConfig,
    RecallConfig,
    SamplingConfig,
    Settings,
)
from h2o_stream.loading.loading import load_model
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.session.questions import load_questions
from h2o_stream.session.turn import Timings, Turn
from h2o_stream.ui.interrupts import Interrupts
from h2o_stream.ui.start import converse

CLASSES = (
    "Stack",
    "Queue",
    "Matrix",
    "BankAccount",
    "Timer",
    "LinkedList",
    "Inventory",
    "Temperature",
    "Graph",
    "Cache",
)
ORDERS = (
    "Ann Example, 12 Mill Lane, orders 3 copper kettles and 12 pewter spoons.",
    "For Bo Sato at 7 Harbour Street: 2 oak tables, 6 linen napkins.",
    "Carla Diaz wants one brass lamp sent to 99 Station Road.",
    "Please send 40 candles and 4 candle holders to Dan Okoro, 3 Church Square.",
    "Eve Lindqvist of 18 Birch Avenue takes 5 wool blankets and 1 rocking chair.",
    "Farid Haddad (21 Orchard Way): 10 jam jars, 10 lids, 1 funnel.",
    "Grace Müller, 5 Rosenweg, Zürich, 8 Gläser und 2 Krüge.",
    "Hiro Tanaka orders 15 rice bowls to 1-2-3 Ginza, Tokyo.",
    "Ines Rocha, 44 Rua das Flores, asks for 6 cork trivets and 2 clay pots.",
    "100 pencils and 20 erasers for John Smith, 8 School Lane.",
)


class Kind(NamedTuple):
    """The user's messages of conversations, the first replies that are not timed, and the schema of all replies."""

    conversations: Sequence[Sequence[Any]]
    untimed: int = 0
    schema: Mapping[str, Any] | None = None


def kinds(turns: int) -> dict[str, Kind]:
    """The conversations by name."""
    questions = [message for _, message in islice(load_questions(None).prompts(loop=True), turns)]
    edits = [
        (f"Write a Python class {name} with docstrings.", "Show the whole class again with two more methods.")
        for name in CLASSES
    ]
    return {
        "turns": Kind([questions]),
        "edits": Kind(edits, untimed=1),
        "json": Kind([[f"{order} Give this order as JSON."] for order in ORDERS], schema=ORDER),
    }


class Outcome(NamedTuple):
    """The replies of a conversation, a digest of the cache after them, and what the timed ones took."""

    texts: list[str]
    state: str
    timings: Timings


def outcome(model: LoadedModel, settings: Settings, messages: Sequence[Any], untimed: int) -> Outcome:
    """Hold a conversation. Arguments: see `converse` and `Kind`."""
    conversation = converse(model, settings, Interrupts(), ignore).conversation
    with conversation.engine:
        turns = [event for message in messages for event in conversation.say(message) if isinstance(event, Turn)]
        state = digest_of(conversation.engine)
        timings = Timings()
        for turn in turns[untimed:]:
            timings.add(turn.timings)
        return Outcome([turn.text for turn in turns], state, timings)


def compared(model: LoadedModel, settings: Settings, kind: Kind, seeds: int) -> Iterator[tuple[Outcome, Outcome]]:
    """Each conversation of a kind without guesses and with them, by seed."""
    for seed in range(seeds):
        for messages in kind.conversations:
            same = replace(settings, sampling=replace(settings.sampling, seed=seed), json_schema=kind.schema)
            without, with_guesses = (
                outcome(model, replace(same, speculate=mode), messages, kind.untimed) for mode in MODES
            )
            yield without, with_guesses


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each kind; returns how many conversations differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--turns", type=int, default=36, help="of h2o-stream's questions")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=160, help="of a reply")
    chosen = parser.parse_args(arguments)
    sampling = SamplingConfig(max_tokens=chosen.max_tokens)
    settings = Settings(
        ModelConfig(chosen.model), CacheConfig(auto_window=1), sampling, recall=RecallConfig(CHAT_RECALL)
    )
    model = load_model(settings.model, settings.cache, settings.engine, print, ignore)
    differ = 0
    for name, kind in kinds(chosen.turns).items():
        pairs = [*compared(model, settings, kind, chosen.seeds)]
        replies = sum(len(without.texts) for without, _ in pairs)
        unequal = sum(without[:2] != with_guesses[:2] for without, with_guesses in pairs)
        times = median(after.timings.decode_tok_s / before.timings.decode_tok_s for before, after in pairs)
        a_pass = median(after.timings.tokens_per_pass for _, after in pairs)
        print(
            f"{name:6} {replies} replies in {len(pairs)} conversations: {unequal} differ; with guesses"
            f" {times:.2f} times as fast, {a_pass:.2f} tokens a pass",
            flush=True,
        )
        differ += unequal
    return differ


if __name__ == "__main__":
    sys.exit(main())
