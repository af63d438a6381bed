"""Which of the words of a stream the cache still holds, and in how many heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers.decoders import DecodeStream

from h2o_stream.engine.engine import Engine
from h2o_stream.errors import H2OStreamError
from h2o_stream.session.facts import Passage


@dataclass(frozen=True)
class HeldText:
    """A piece of text that some heads hold.

    Attributes:
        index: of its token in the stream.
        text: of the token; empty where it is a part of a character that a later token ends.
        share: of the heads of the layers looked at that hold it, above 0 and at most 1.
    """

    index: int
    text: str
    share: float


@dataclass(frozen=True)
class HeldPassage:
    """What is left of a turn.

    Attributes:
        passage: which.
        share: of its tokens that are held, a mean over the heads.
        pieces: those that any head holds, in order.
    """

    passage: Passage
    share: float
    pieces: list[HeldText]


def holdings(engine: Engine, passages: list[Passage], layer: int | None = None) -> list[HeldPassage]:
    """What the cache holds of each passage, oldest first.

    Args:
        engine: with the stream.
        passages: parts of it.
        layer: look at this layer only; None for all.

    Raises:
        H2OStreamError: there is no such layer.
    """
    cache, seen = engine.cache, len(engine.tokens)
    count = len(cache.layers)
    if layer is not None and not 0 <= layer < count:
        raise H2OStreamError(f"there is no layer {layer}, the model has layers 0 to {count - 1}")
    heads, held = 0, torch.zeros(seen)
    for number in range(count) if layer is None else [layer]:
        kept = cache.kept(number)[:1].cpu()
        heads += kept.shape[1]
        held += torch.bincount(kept[kept >= 0], minlength=seen)[:seen]
    shares = held / max(heads, 1)
    return [
        HeldPassage(
            passage,
            float(shares[passage.start : passage.stop].mean()) if passage.stop > passage.start else 0.0,
            _pieces(engine, shares, passage),
        )
        for passage in passages
    ]


def _pieces(engine: Engine, shares: torch.Tensor, passage: Passage) -> list[HeldText]:
    pieces, before = list[HeldText](), -2
    backend = engine.tokenizer.backend_tokenizer
    for index in range(passage.start, passage.stop):
        share = float(shares[index])
        if not share:
            continue
        if index != before + 1:
            stream = DecodeStream(skip_special_tokens=True)
        pieces.append(HeldText(index, stream.step(backend, engine.tokens[index]) or "", share))
        before = index
    return pieces
