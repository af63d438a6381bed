"""Checks the arguments of a forward against the stream that it continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from h2o_stream.cache.padding import Padding
from h2o_stream.errors import ConfigError, H2OStreamError


def tokens_in(kwargs: Mapping[str, Any]) -> Tensor:
    """``input_ids`` [B, Q] or ``inputs_embeds`` [B, Q, hidden]; raises H2OStreamError if there is neither."""
    for name in ("input_ids", "inputs_embeds"):
        if kwargs.get(name) is not None:
            tokens: Tensor = kwargs[name]
            return tokens
    raise H2OStreamError("a forward needs input_ids or inputs_embeds")


def check_rows(rows: int, batch: int) -> None:
    """Raise H2OStreamError if a forward of `batch` rows cannot continue a stream of `rows`, 0 for an empty one."""
    if rows and rows != batch:
        raise H2OStreamError(
            f"the stream has {rows} row(s), the forward brings {batch}; feed as many, or start a new stream"
        )


def check_forward(kwargs: Mapping[str, Any], lengths: Sequence[int], columns: int, exact: bool) -> Padding | None:
    """Check that a forward continues a stream, and return its padding.

    Args:
        kwargs: keyword arguments of the model's forward.
        lengths: tokens of each row before this forward.
        columns: columns of the stream before this forward.
        exact: positions must not count padding, because they are looked up. They must not with a hole either.

    Raises:
        ConfigError: the mask is not one of padding, or positions are not those of one text.
        H2OStreamError: the stream has another number of rows, or there are no tokens.
    """
    batch, new = tokens_in(kwargs).shape[:2]
    check_rows(len(lengths), batch)
    mask = kwargs.get("attention_mask")
    padding = Padding.of(mask, batch, new)
    _check_past(mask, lengths, columns, new)
    _check_positions(kwargs.get("position_ids"), lengths, columns, (batch, new), padding, exact)
    return padding


def _check_past(mask: Tensor | None, lengths: Sequence[int], columns: int, new: int) -> None:
    """Check that a mask [B, columns + Q] shows all past tokens of the stream and none of its padding."""
    if not columns or mask is None or mask.shape[1] != columns + new:
        return
    shown = mask[:, :columns].bool().sum(1).tolist()
    if shown != list(lengths):
        raise ConfigError(
            f"attention_mask shows {shown} tokens of the past, the stream has seen {list(lengths)}; "
            "what was seen cannot be hidden, and padding stays padding"
        )


def _check_positions(
    positions: Tensor | None,
    lengths: Sequence[int],
    columns: int,
    shape: tuple[int, int],
    padding: Padding | None,
    exact: bool,
) -> None:
    """Check that positions [..., B or 1, Q] are those of one text: each token's index in its row."""
    batch, new = shape
    exact = exact or (padding is not None and padding.has_holes)
    if positions is None:
        if padding is not None and padding.has_holes:
            raise ConfigError(
                "attention_mask hides tokens between others, which then stand further apart than they are fed; move "
                "the padding to an end of its row, or pass position_ids that do not count it"
            )
        return
    if positions.dim() < 2 or positions.shape[-1] != new or positions.shape[-2] not in (1, batch):
        raise ConfigError(f"position_ids have shape {tuple(positions.shape)}; [{batch}, {new}] is served")
    if new == 1 and padding is None and positions.flatten().tolist() == list(lengths):
        return  # as `generate` passes them with every token: a fast path
    seen, column = torch.tensor(lengths, device=positions.device), torch.arange(new, device=positions.device)
    hidden = False if padding is None else padding.hidden(positions.device)
    valid = ((positions == (seen[:, None] + column if padding is None else padding.positions(seen))) | hidden).all(-1)
    if not exact:
        valid |= ((positions == columns + column) | hidden).all(-1)
    if not bool(valid.all()):
        raise ConfigError(
            "position_ids are not those of one text that goes on from what was seen (packed texts are not served); "
            "leave them out"
        )
