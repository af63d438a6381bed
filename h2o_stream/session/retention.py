"""Which tokens of a stream the cache still holds, and in how many heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers.decoders import DecodeStream

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
    """

    passage: TurnTokens
    share: float
    pieces: list[RetainedText]


def retention(
    engine: Engine, passages: list[TurnTokens], layer: int | None = None, recalled: tuple[range, ...] = ()
) -> list[RetainedTurn]:
    """What the cache still holds of each passage, oldest first.

    Args:
        engine: with the stream.
        passages: parts of it.
        layer: examine this layer only; None for all.

    Raises:
        H2OStreamError: there is no such layer.
    """
    cache, seen = engine.cache, len(engine.tokens)
    num_layers = len(cache.layers)
    if layer is not None and not 0 <= layer < num_layers:
        raise H2OStreamError(f"there is no layer {layer}, the model has layers 0 to {num_layers - 1}")
    num_heads, holders = 0, torch.zeros(seen)  # holders: [seen], how many heads hold each token
    for number in range(num_layers) if layer is None else [layer]:
        kept = cache.kept(number)[:1].cpu()
        num_heads += kept.shape[1]
        holders += torch.bincount(kept[kept >= 0], minlength=seen)[:seen]
    shares = holders / max(num_heads, 1)
    return [
        RetainedTurn(
            passage,
            float(shares[passage.start : passage.stop].mean()) if passage.stop > passage.start else 0.0,
            _pieces(engine, shares, passage),
        )
        for passage in passages
    ]


def _pieces(engine: Engine, shares: torch.Tensor, passage: TurnTokens) -> list[RetainedText]:
    pieces, previous = list[RetainedText](), -2
    backend = engine.tokenizer.backend_tokenizer
    for index in range(passage.start, passage.stop):
        share = float(shares[index])
        if not share:
            continue
        if index != previous + 1:
            stream = DecodeStream(skip_special_tokens=True)
        pieces.append(RetainedText(index, stream.step(backend, engine.tokens[index]) or "", share))
        previous = index
    return pieces
