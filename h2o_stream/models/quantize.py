"""Weights of matrices in 8 or 4 bits.

Every 32 numbers of a row share a scale, and in 4 bits an offset, as in GGUF's Q8_0, Q4_0 and Q4_1: what comes from such
a file lies on that grid already and is not rounded again. The library of `h2o_stream.native` multiplies them; without
it they are unpacked for every product.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from h2o_stream.errors import ConfigError
from h2o_stream.native import library
from h2o_stream.native.abi import Matrix
from h2o_stream.native.packing import GROUP, from_tiles, kind_of, to_tiles

_FEW = 16
"""Vectors up to which it is faster not to unpack the weights."""


def quantize(model: Any, kind: str, notify: Callable[[str], None] = lambda line: None) -> None:
    """Pack the linear layers of a model in place; embeddings stay as they are.

    The output layer is packed in 8 bits at least, as GGUF files have it: it loses most. Layers whose input size is not
    a multiple of 32 are left alone.

    Args:
        model: a causal language model of transformers.
        kind: ``int8`` or ``int4``.
        notify: told one line where weights will be slower than they could be.

    Raises:
        ConfigError: the model is not on the CPU.
    """
    if model.device.type != "cpu":
        raise ConfigError(f"--quantize {kind} packs weights for the CPU, the model is on {model.device}; leave it out")
    if library.loaded() is None:
        notify("Packed weights are slow here: the C++ library is missing, so they are unpacked for every product.")
    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and NativeLinear.takes(child.weight):
                packed = Native4Linear if kind == "int4" and child is not head else Native8Linear
                setattr(module, name, packed(child))


class NativeLinear(nn.Module):
    """y = x W' + b, W in 8 or 4 bits in tiles of four rows; see `h2o_stream.native.packing`."""

    bits: int

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.tiles: Tensor
        self.register_buffer("tiles", to_tiles(*self.pack(linear.weight.detach().float().unflatten(1, (-1, GROUP)))))
        self.bias = linear.bias

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Whether a matrix can be packed."""
        return weight.device.type == "cpu" and weight.shape[1] % GROUP == 0

    @staticmethod
    def pack(groups: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and grid, as `to_tiles` takes them, of numbers [rows, n, GROUP]."""
        raise NotImplementedError

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """The matrix, [out, in]."""
        shape = self.out_features, self.in_features
        native = library.loaded()
        if native is None:
            return from_tiles(self.tiles, *shape, self.bits).to(dtype)
        weights = torch.empty(shape, dtype=dtype if dtype == torch.bfloat16 else torch.float32)
        native.h2o_unpack(
            ctypes.byref(self._described()),
            ctypes.c_void_p(weights.data_ptr()),
            *map(ctypes.c_int64, (weights.dtype == torch.bfloat16, torch.get_num_threads())),
        )
        return weights.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        flat = x.reshape(-1, self.in_features)
        native = library.loaded()
        if native is not None and len(flat) <= _FEW:
            y = self._multiplied(native, flat)
        else:
            y = flat @ self.unpacked(x.dtype).T
        y = y.to(x.dtype).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias

    def _multiplied(self, native: ctypes.CDLL, x: Tensor) -> Tensor:
        """[n, in] to [n, out] float32, without the bias."""
        x = x.float().contiguous()
        y = x.new_empty(len(x), self.out_features)
        native.h2o_multiply(
            ctypes.byref(self._described()),
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, y)),
            *map(ctypes.c_int64, (len(x), torch.get_num_threads())),
        )
        return y

    def _described(self) -> Matrix:
        return Matrix(self.tiles.data_ptr(), None, self.out_features, self.in_features, kind_of(self.bits))


class Native8Linear(NativeLinear):
    """In 8 bits."""

    bits = 8

    @staticmethod
    def pack(groups: Tensor) -> tuple[Tensor, Tensor]:
        """See `NativeLinear.pack`."""
        smallest = torch.finfo(torch.float16).smallest_normal
        scale = (groups.abs().amax(-1) / 127).half().clamp_min(smallest)
        return (groups / scale.float()[..., None]).round_().clamp_(-127, 127).to(torch.int8), scale[:, None]


class Native4Linear(NativeLinear):
    """In 4 bits."""

    bits = 4

    @staticmethod
    def pack(groups: Tensor) -> tuple[Tensor, Tensor]:
        """See `NativeLinear.pack`."""
        codes, scale, middle = on_grid(groups)
        codes = codes.to(torch.uint8)
        grid = torch.stack((scale, middle - 8 * scale), 1).half()
        return codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4, grid


def on_grid(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Put every group on the nearer of two grids of 16 values.

    One goes from its least to its largest number (Q4_1), the other has zero on it and the number of largest size at its
    end (Q4_0).

    Args:
        groups: [..., n] float32.

    Returns:
        Codes [..., n], 0 to 15; scale and middle [...]: a number is about (code - 8) * scale + middle.
    """
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    end = torch.where(high > -low, high, low)
    tried = []
    for scale, middle in (((high - low) / 15, low + (high - low) / 15 * 8), (end / -8, torch.zeros_like(end))):
        codes = ((groups - middle) / torch.where(scale == 0, 1.0, scale) + 8).round().clamp(0, 15)
        error = ((codes - 8) * scale + middle - groups).square().sum(-1, keepdim=True)
        tried.append((codes, scale, middle, error))
    (*first, error), (*second, other) = tried
    codes, scale, middle = (torch.where(other < error, b, a) for a, b in zip(first, second, strict=True))
    return codes, scale.squeeze(-1), middle.squeeze(-1)
