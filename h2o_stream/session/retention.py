"""Which tokens of a stream the cache still holds, and in how many heads."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from h2o_stream.base.token_texts import TokenTextStream
from h2o_stream.cache.holders import Holders, holders
from h2o_stream.cache.slot_cache import SlotCache
from h2o_stream.engine.engine import Engine
from h2o_stream.engine.served import StreamCache
from h2o_stream.errors import H2OStreamError
from h2o_stream.session.conversation_state import TurnSpan


@dataclass(frozen=True)
class RetainedText:
    """The text of a token that at least one head holds, and the share of the heads that do.

    It is empty if the token is part of a character that a later one completes. A `recalled` token was read again from
    an earlier turn, rather than said in this one.
    """

    index: int
    text: str
    share: float
    recalled: bool = False


@dataclass(frozen=True)
class RetainedTurn:
    """What the cache still holds of a turn: the share of its tokens, a mean over heads, and those that any head holds.

    The same share of its thinking, if it has any.
    """

    span: TurnSpan
    share: float
    pieces: list[RetainedText]
    thinking: float | None = None


def retention(
    engine: Engine,
    spans: list[TurnSpan],
    layer: int | None = None,
    recalled: Sequence[range] = (),
    thoughts: Sequence[range] = (),
) -> list[RetainedTurn]:
    """What the cache still holds of each span, oldest first. Of one layer or of all; `recalled` is marked in the
    pieces, `thoughts` has at most one range in each span.

    Raises:
        H2OStreamError: there is no such layer.
    """
    check_layer(engine.cache, layer)
    kept = holders(engine.cache, layer)
    return [
        RetainedTurn(
            span,
            kept.share(span.start, span.stop),
            list(_pieces(engine, kept, span, recalled)),
            None if (thought := _first_within(thoughts, span)) is None else kept.share(thought.start, thought.stop),
        )
        for span in spans
    ]


def check_layer(cache: StreamCache, layer: int | None) -> None:
    """Refuse a layer that the model does not have."""
    num_layers = len(cache.specs if isinstance(cache, SlotCache) else cache.layers)
    if layer is not None and not 0 <= layer < num_layers:
        raise H2OStreamError(f"there is no layer {layer}, the model has layers 0 to {num_layers - 1}")


def _first_within(ranges: Sequence[range], span: TurnSpan) -> range | None:
    """The first of these ranges, which are in order, that begins within a span."""
    place = bisect_left(ranges, span.start, key=lambda tokens: tokens.start)
    return ranges[place] if place < len(ranges) and ranges[place].start < span.stop else None


def _pieces(engine: Engine, kept: Holders, span: TurnSpan, recalled: Sequence[range]) -> Iterator[RetainedText]:
    """The tokens of a span that any head holds. Those that are not neighbours are decoded apart."""
    previous, backend = -2, engine.tokenizer.backend_tokenizer
    for index, share in kept.shares(span.start, span.stop):
        if index != previous + 1:
            stream = TokenTextStream(backend)
        text = stream.push(engine.tokens[index])
        yield RetainedText(index, text, share, any(index in tokens for tokens in recalled))
        previous = index
