"""Why a word is still in the cache, or is not: what it is worth to the heads, now and after earlier turns.

Nothing is recorded for this. What a word was worth earlier is computed from the states that a conversation keeps of its
last turns anyway.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from h2o_stream.cache.slot_cache import SlotCache
from h2o_stream.cache.worths import Holding, Worths
from h2o_stream.errors import H2OStreamError
from h2o_stream.recall.located import decode
from h2o_stream.session.history import ConversationHistory
from h2o_stream.session.retention import check_layer

MAX_PLACES = 8
"""Places where a word was said, the newest of them, that are explained."""

_AROUND = 24
"""Characters that are shown on both sides of it."""


@dataclass(frozen=True)
class Kept:
    """A word that some head holds."""

    now: Holding


@dataclass(frozen=True)
class Gone:
    """A word that no head holds any more.

    Attributes:
        turn: turn in which the last head evicted it; None if that was before `since`.
        since: a turn after which no head held it, as far back as states are kept.
        before: how it was held after the turn before `turn`; None if it was said in that turn or is not known.
        needed: the least that stayed after `turn` in the heads that held it before; 0 without `before`.
    """

    turn: int | None
    since: int
    before: Holding | None = None
    needed: float = 0.0


@dataclass(frozen=True)
class Explanation:
    """A place where a word was said, and what became of it."""

    turn: int
    text: str
    num_heads: int
    fate: Kept | Gone


def explain(history: ConversationHistory, word: str, layer: int | None = None) -> list[Explanation]:
    """What became of a word, at the newest places where it was said; the newest first.

    Raises:
        H2OStreamError: nobody said the word, nothing is ever evicted, or there is no such layer.
    """
    cache = history.conversation.engine.cache
    if not isinstance(cache, SlotCache):
        raise H2OStreamError("the policy full keeps every word; /policy h2o evicts")
    check_layer(cache, layer)
    places = list(_places(history, word))
    if not places:
        raise H2OStreamError(f"{word!r} was not said in this conversation")
    now, past = Worths.of(cache, layer), list[tuple[int, Worths]]()
    if not now.num_heads:
        raise H2OStreamError(f"layer {layer} has no attention, so no words are kept there")
    earlier = _earlier(history, cache, layer)
    explanations = []
    for turn, text, tokens in places:
        holding = now.holding(tokens)
        fate = Kept(holding) if holding else _gone(turn, tokens, (history.entries[-1].turn, now), past, earlier)
        explanations.append(Explanation(turn, text, now.num_heads, fate))
    return explanations


def _places(history: ConversationHistory, word: str) -> Iterator[tuple[int, str, range]]:
    """The newest places where a word was said: turn, text and tokens. Parts of words count if it is nowhere whole."""
    engine = history.conversation.engine
    spans = [
        (span, decode(engine.tokenizer, engine.tokens[span.start : span.stop]))
        for span in reversed(history.conversation.turn_spans)
    ]
    for pattern in (rf"(?<!\w){re.escape(word)}(?!\w)", re.escape(word)):
        count = 0
        for span, decoded in spans:
            for match in reversed(list(re.finditer(pattern, decoded.text, re.IGNORECASE))):
                tokens = decoded.tokens(range(match.start(), match.end()))
                yield (
                    span.turn,
                    _around(decoded.text, match),
                    range(span.start + tokens.start, span.start + tokens.stop),
                )
                count += 1
                if count == MAX_PLACES:
                    return
        if count:
            return


def _around(text: str, match: re.Match[str]) -> str:
    """The word with some of the text around it, on one line."""
    start, stop = max(match.start() - _AROUND, 0), match.end() + _AROUND
    return " ".join(text[start:stop].split())


def _earlier(history: ConversationHistory, cache: SlotCache, layer: int | None) -> Iterator[tuple[int, Worths]]:
    """What tokens were worth after the turns before the last one, as far back as states are kept."""
    for turn, state in history.earlier_states():
        yield turn, Worths.of(cache.restored(state), layer)


def _gone(
    turn: int,
    tokens: range,
    after: tuple[int, Worths],
    past: list[tuple[int, Worths]],
    earlier: Iterator[tuple[int, Worths]],
) -> Gone:
    """When tokens said in a turn went. `past` has what was taken from `earlier` so far."""
    number = 0
    while after[0] > turn:
        if number == len(past):
            if (item := next(earlier, None)) is None:
                return Gone(None, after[0])
            past.append(item)
        before, worths = past[number]
        if holding := worths.holding(tokens):
            return Gone(after[0], after[0], holding, after[1].least(holding.heads))
        after, number = (before, worths), number + 1
    return Gone(after[0], after[0])
