"""A decoder layer whose KV heads keep windows of different size: one `HeadGroup` for the heads of each size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from h2o_stream.cache.endless import EndlessLayer
from h2o_stream.cache.padding import Padding
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.state import within
from h2o_stream.cache.statistics import LayerStatistics, power_law
from h2o_stream.cache.attention import LogitTransform
from h2o_stream.errors import H2OStreamError


class GroupedLayer(EndlessLayer):
    """Groups of KV heads that share a window.

    Args:
        parts: the slots of every group.
        heads: the KV heads of every group, [n] int64 where the layer computes, together all heads of the layer.
    """

    def __init__(self, parts: Sequence[HeadGroup], heads: Sequence[Tensor]) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.heads = tuple(heads)

    # transformers' interface: what is said to the layer is said to every group

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """See `HeadGroup.lazy_initialization`."""
        for part, own in zip(self.parts, self.heads, strict=True):
            part.lazy_initialization(key_states[:, own], value_states[:, own])

    def get_seq_length(self) -> int:
        """See `HeadGroup.get_seq_length`."""
        return self.columns

    def reset(self) -> None:
        """Forget the stream and release the slots."""
        for part in self.parts:
            part.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """See `HeadGroup.reorder_cache`."""
        for part in self.parts:
            part.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row becomes `repeats` rows."""
        for part in self.parts:
            part.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at `indices`."""
        self.reorder_cache(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: see `HeadGroup.crop`."""
        self.parts[0].crop(tokens_to_remove)

    # what is held

    @property
    def columns(self) -> int:
        """See `HeadGroup`."""
        return self.parts[0].columns

    @property
    def lengths(self) -> tuple[int, ...]:
        """See `HeadGroup`."""
        return self.parts[0].lengths

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values, once there are any."""
        return self.parts[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of everything allocated for this layer."""
        return sum(part.nbytes for part in self.parts)

    def kept(self) -> Tensor:
        """[B, Hkv, n] int64 token indices, oldest first; heads and rows that hold fewer have -1 in front."""
        held = [part.kept() for part in self.parts]
        rows, device = held[0].shape[0], held[0].device
        heads, most = sum(map(len, self.heads)), max(part.shape[-1] for part in held)
        kept = torch.full((rows, heads, most), -1, dtype=torch.int64, device=device)
        if most:
            for part, own in zip(held, self.heads, strict=True):
                kept[:, own, most - part.shape[-1] :] = part
        return kept

    def tensors(self) -> dict[str, Tensor]:
        """Everything allocated, by group and name."""
        return {
            f"{number}.{name}": tensor
            for number, part in enumerate(self.parts)
            for name, tensor in part.tensors().items()
        }

    def statistics(self, number: int) -> LayerStatistics:
        """What the attention of this layer, called `number`, looks like; means over its heads."""
        parts = [part.statistics(number) for part in self.parts]
        sizes = [len(own) / sum(map(len, self.heads)) for own in self.heads]

        def mean(values: Sequence[float]) -> float:
            return math.fsum(size * value for size, value in zip(sizes, values, strict=True))

        scores = torch.zeros(max(len(part.scores) for part in parts))
        for size, part in zip(sizes, parts, strict=True):
            scores[: len(part.scores)] += size * part.scores.cpu()
        sparsity, mass = mean([part.sparsity for part in parts]), mean([part.mass for part in parts])
        return LayerStatistics(number, sparsity, scores, power_law(scores), mass)

    def load(self, tensors: Mapping[str, Tensor], columns: int, device: torch.device | None) -> None:
        """See `HeadGroup.load`."""
        for number, (part, own) in enumerate(zip(self.parts, self.heads, strict=True)):
            part.load(within(tensors, number), columns, device)
            if part.index.shape[1] != len(own):
                raise H2OStreamError(f"the state does not fit: {part.index.shape[1]} heads of a group of {len(own)}")

    # attention

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, transform: LogitTransform, padding: Padding | None = None
    ) -> Tensor:
        """See `HeadGroup.attend`."""
        batch, query_heads, new, _ = query.shape
        query = query.unflatten(1, (key.shape[1], -1))
        output = value.new_empty(batch, new, *query.shape[1:3], value.shape[-1], dtype=query.dtype)
        for part, own in zip(self.parts, self.heads, strict=True):
            mixed = part.attend(query[:, own].flatten(1, 2), key[:, own], value[:, own], transform, padding)
            output[:, :, own] = mixed.unflatten(2, (len(own), -1))
        return output.view(batch, new, query_heads, -1)
