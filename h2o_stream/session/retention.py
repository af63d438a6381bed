"""Which tokens of a stream the cache still holds, and in how many heads."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenizers.decoders import DecodeStream

from h2o_stream.cache.holders import Holders, holders
from h2o_stream.engine.engine import Engine
from h2o_stream.errors import H2OStreamError
from h2o_stream.session.metadata import TurnTokens


@dataclass(frozen=True)
class RetainedText:
    """The text of a token that at least one head holds.

    Attributes:
        index: of the token in the stream.
        text: of the token; empty if it is part of a character that a later token completes.
        share: of the heads examined that hold it, above 0 and at most 1.
        recalled: whether the token was read again from an earlier turn, rather than said in this one.
    """

    index: int
    text: str
    share: float
    recalled: bool = False


@dataclass(frozen=True)
class RetainedTurn:
    """What the cache still holds of a turn.

    Attributes:
        passage: the turn's tokens.
        share: of these tokens that are held, averaged over the heads.
        pieces: the tokens that any head holds, in order.
        thinking: the share of the tokens of the turn's thinking that are held; None if it has none.
    """

    passage: TurnTokens
    share: float
    pieces: list[RetainedText]
    thinking: float | None = None


def retention(
    engine: Engine,
    passages: list[TurnTokens],
    layer: int | None = None,
    recalled: Sequence[range] = (),
    thoughts: Sequence[range] = (),
) -> list[RetainedTurn]:
    """What the cache still holds of each passage, oldest first.

    Args:
        engine: with the stream.
        passages: parts of it.
        layer: examine this layer only; None for all.
        recalled: token indices that were recalled, which is marked in the pieces.
        thoughts: token indices of thinking, in order, at most one range in each passage.

    Raises:
        H2OStreamError: there is no such layer.
    """
    num_layers = len(engine.cache.layers)
    if layer is not None and not 0 <= layer < num_layers:
        raise H2OStreamError(f"there is no layer {layer}, the model has layers 0 to {num_layers - 1}")
    held = holders(engine.cache, layer)
    return [
        RetainedTurn(
            passage,
            held.share(passage.start, passage.stop),
            list(_pieces(engine, held, passage, recalled)),
            None if (thought := _first_within(thoughts, passage)) is None else held.share(thought.start, thought.stop),
        )
        for passage in passages
    ]


def _first_within(ranges: Sequence[range], passage: TurnTokens) -> range | None:
    """The first of these ranges, which are in order, that begins within a passage."""
    place = bisect_left(ranges, passage.start, key=lambda tokens: tokens.start)
    return ranges[place] if place < len(ranges) and ranges[place].start < passage.stop else None


def _pieces(engine: Engine, held: Holders, passage: TurnTokens, recalled: Sequence[range]) -> Iterator[RetainedText]:
    """The tokens of a passage that any head holds. Those that are not neighbours are decoded apart."""
    previous, backend = -2, engine.tokenizer.backend_tokenizer
    for index, share in held.shares(passage.start, passage.stop):
        if index != previous + 1:
            stream = DecodeStream(skip_special_tokens=True)
        text = stream.step(backend, engine.tokens[index]) or ""
        yield RetainedText(index, text, share, any(index in tokens for tokens in recalled))
        previous = index
