"""Replacements of `nn.Linear` and `nn.Embedding` with packed weights."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from h2o_stream.errors import OutOfMemoryError
from h2o_stream.native.abi import Matrix, MatrixKind
from h2o_stream.native.gradients import without_gradient
from h2o_stream.native.packing import gather, packed_bytes, require_library, tiles_shape
from h2o_stream.native.pointers import pointer
from h2o_stream.native.threads import num_threads

_NO_GRADIENT = "packed weights have no gradients; load the model with --quantize none"


class PackedLinear(nn.Module):
    """y = x W' + b, with W as uint8 tiles (`tiles_shape`), which may be filled later.

    The dtype of y is `out_dtype`, or that of x. Logits are float32: rounding them to bfloat16 costs more than all other
    rounding of a packed model.
    """

    tiles: Tensor
    out_dtype: torch.dtype | None = None

    def __init__(
        self,
        kind: MatrixKind,
        in_features: int,
        out_features: int,
        bias: nn.Parameter | None,
        tiles: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.kind, self.in_features, self.out_features = kind, in_features, out_features
        if tiles is None:
            tiles = torch.empty(tiles_shape(kind, out_features, in_features), dtype=torch.uint8, device="meta")
        self.register_buffer("tiles", tiles)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]; `backward` raises."""
        y = self._multiply(x.detach().reshape(-1, self.in_features), x.dtype == torch.bfloat16)
        y = without_gradient(y.to(self.out_dtype or x.dtype).view(*x.shape[:-1], -1), x, reason=_NO_GRADIENT)
        return y if self.bias is None else y + self.bias

    def _multiply(self, x: Tensor, in_bfloat16: bool) -> Tensor:
        """[n, in] to [n, out] float32 without bias."""
        native = require_library()
        x = x.float().contiguous()
        y = x.new_empty(len(x), self.out_features)
        tiles = pointer(self.tiles, "uint8", packed_bytes(self.kind, self.out_features, self.in_features))
        matrix = Matrix(tiles, None, self.out_features, self.in_features, self.kind)
        inputs, outputs = pointer(x, "float32", x.numel()), pointer(y, "float32", y.numel())
        if native.h2o_multiply(ctypes.byref(matrix), inputs, outputs, len(x), in_bfloat16, num_threads()):
            raise OutOfMemoryError(f"out of memory for the products of {len(x)} tokens; lower --chunk")
        return y


class PackedEmbedding(nn.Module):
    """An embedding with packed weights, as in `PackedLinear`; its rows have this dtype and are scaled."""

    tiles: Tensor

    def __init__(
        self,
        kind: MatrixKind,
        num_embeddings: int,
        embedding_dim: int,
        dtype: torch.dtype,
        embed_scale: float = 1.0,
        tiles: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.kind, self.num_embeddings, self.embedding_dim = kind, num_embeddings, embedding_dim
        self.dtype, self.embed_scale = dtype, embed_scale
        if tiles is None:
            tiles = torch.empty(tiles_shape(kind, num_embeddings, embedding_dim), dtype=torch.uint8, device="meta")
        self.register_buffer("tiles", tiles)

    def forward(self, ids: Tensor) -> Tensor:
        """[...] int64 or int32 to [..., embedding_dim].

        Raises:
            TypeError: these are no token ids.
            IndexError: a token id is out of range.
        """
        if ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"token ids are {ids.dtype}; accepted: torch.int64 and torch.int32")
        flat = ids.flatten().long().contiguous()
        dtype = "bfloat16" if self.dtype == torch.bfloat16 else "float32"
        rows: Tensor = gather(self.tiles, self.kind, self.num_embeddings, self.embedding_dim, flat, dtype)
        rows = rows.to(self.dtype).view(*ids.shape, -1)
        return rows if self.embed_scale == 1 else rows * torch.tensor(self.embed_scale, dtype=self.dtype, device="cpu")


class TiedHead(PackedLinear):
    """An output layer that shares the weights of a packed embedding."""

    out_dtype = torch.float32

    def __init__(self, embedding: PackedEmbedding) -> None:
        nn.Module.__init__(self)
        self.kind, self.in_features, self.out_features = (
            embedding.kind,
            embedding.embedding_dim,
            embedding.num_embeddings,
        )
        self.bias = None
        self._embedding = (embedding,)  # not a submodule, so that the weights are listed once

    @property
    def tiles(self) -> Tensor:  # type: ignore[override]
        """See `PackedLinear`."""
        return self._embedding[0].tiles
