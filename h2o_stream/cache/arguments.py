"""What a forward is called with, checked against the stream that it goes on with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from h2o_stream.cache.padding import Padding
from h2o_stream.errors import ConfigError, H2OStreamError


def tokens_in(kwargs: Mapping[str, Any]) -> Tensor:
    """``input_ids`` [B, Q] or ``inputs_embeds`` [B, Q, hidden].

    Raises:
        H2OStreamError: there are neither.
    """
    for name in ("input_ids", "inputs_embeds"):
        if kwargs.get(name) is not None:
            tokens: Tensor = kwargs[name]
            return tokens
    raise H2OStreamError("a forward needs input_ids or inputs_embeds")


def check_rows(rows: int, batch: int) -> None:
    """Whether a forward of `batch` rows can go on with a stream of so many, 0 for one that is empty.

    Raises:
        H2OStreamError: it cannot.
    """
    if rows and rows != batch:
        raise H2OStreamError(
            f"the stream has {rows} row(s), the forward brings {batch}; feed as many, or start a new stream"
        )


def check_past(mask: Tensor | None, lengths: Sequence[int], columns: int, new: int) -> None:
    """Whether a mask shows of the past what the stream holds.

    Args:
        mask: [B, T] as `Padding.of` takes it. Looked at if T is `columns` + `new`.
        lengths: tokens of each row before this forward.
        columns: columns of the stream before this forward.
        new: Q.

    Raises:
        ConfigError: it hides tokens of the past, or shows padding.
    """
    if not columns or mask is None or mask.shape[1] != columns + new:
        return
    shown = mask[:, :columns].bool().sum(1).tolist()
    if shown != list(lengths):
        raise ConfigError(
            f"attention_mask shows {shown} tokens of the past, the stream has seen {list(lengths)}; "
            "what was seen cannot be hidden, and padding stays padding"
        )


def check_positions(
    given: Tensor | None,
    lengths: Sequence[int],
    columns: int,
    shape: tuple[int, int],
    padding: Padding | None,
    exact: bool,
) -> None:
    """Whether positions are those of one text: each token's index in its row, with padding counted or without.

    Args:
        given: [..., B or 1, Q] ``position_ids``, of no account where there is padding. None for none.
        lengths: tokens of each row before this forward.
        columns: columns of the stream before this forward.
        shape: B and Q.
        padding: of this forward.
        exact: padding may not be counted: the model looks positions up.

    Raises:
        ConfigError: they are others, as those of several texts packed into one row.
    """
    if given is None:
        return
    batch, new = shape
    if given.dim() < 2 or given.shape[-1] != new or given.shape[-2] not in (1, batch):
        raise ConfigError(f"position_ids have shape {tuple(given.shape)}; [{batch}, {new}] is served")
    if new == 1 and padding is None and given.flatten().tolist() == list(lengths):
        return  # as `generate` gives them with every token, found out quickly
    seen, column = torch.tensor(lengths, device=given.device), torch.arange(new, device=given.device)
    hidden = False if padding is None else padding.hidden(given.device)
    right = ((given == (seen[:, None] + column if padding is None else padding.positions(seen))) | hidden).all(-1)
    if not exact:
        right |= ((given == columns + column) | hidden).all(-1)
    if not bool(right.all()):
        raise ConfigError(
            "position_ids are not those of one text that goes on from what was seen (packed texts are not served); "
            "leave them out"
        )
