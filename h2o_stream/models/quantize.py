"""Weights of matrices in 8 or 4 bits.

Every 32 numbers of a row share a scale, and in 4 bits an offset, as in GGUF's Q8_0, Q4_0 and Q4_1: what comes from such
a file lies on that grid already and is not rounded again. They are multiplied by the library of `h2o_stream.native`;
where that cannot be compiled, by torch's own packed kernels, which are slower, take activations in bfloat16, and in
8 bits have one scale for a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from h2o_stream.errors import ConfigError
from h2o_stream.native import legacy_library as library
from h2o_stream.native.ops import GROUP, grid_of, unpacked

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""What transformers calls matrices that multiply the same vectors: one product gives them all."""

_ROWS = 16
"""Rows that torch's 4-bit kernel takes at once."""

_FEW = 16
"""Vectors up to which it is faster not to unpack the weights."""

_FEW_FOR_TORCH = 32
"""The same for torch's 8-bit kernel."""


def quantize(model: Any, kind: str, notify: Callable[[str], None] = lambda line: None) -> None:
    """Pack the linear layers of a model in place; embeddings stay as they are.

    The output layer is packed in 8 bits at least, as GGUF files have it: it loses most. Layers whose shape the kernels
    cannot take are left alone.

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
        notify(
            "Packed weights are multiplied by torch's kernels, slower: the C++ compiler failed or there is none (g++)."
        )
    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for names in _TOGETHER:
            linears: list[Any] = [getattr(module, name, None) for name in names]
            if all(type(linear) is nn.Linear for linear in linears):
                kinds = {_packing(linear.weight, kind) for linear in linears}
                packed = kinds.pop()
                if packed is not None and not kinds:
                    product = _Product(packed(_stacked(linears)), [linear.out_features for linear in linears])
                    for number, name in enumerate(names):
                        setattr(module, name, _Part(product, number))
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                packed = _packing(child.weight, "int8" if child is head else kind)
                if packed is not None:
                    setattr(module, name, packed(child))


Packed = Callable[[nn.Linear], nn.Module]
"""Makes a packed layer of one."""


def _packing(weight: Tensor, kind: str) -> Packed | None:
    """The quickest way to hold a matrix; None if there is none."""
    ours, torchs = (Native4Linear, Int4Linear) if kind == "int4" else (Native8Linear, Int8Linear)
    if library.loaded() is not None and ours.takes(weight):
        return ours
    return torchs if torchs.takes(weight) else None


def _stacked(linears: Sequence[Any]) -> nn.Linear:
    """One linear layer that gives the outputs of several, in a row."""
    weight = torch.cat([linear.weight for linear in linears])
    stacked = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    stacked.weight = nn.Parameter(weight, requires_grad=False)
    if any(linear.bias is not None for linear in linears):
        biases = [weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias for linear in linears]
        stacked.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return stacked


class _Product(nn.Module):
    """The outputs of several linear layers for one input, computed when the first of them is asked.

    Args:
        linear: gives them in a row.
        sizes: of each.
    """

    def __init__(self, linear: nn.Module, sizes: Sequence[int]) -> None:
        super().__init__()
        self.linear, self._sizes = linear, tuple(sizes)
        self._x: Tensor | None = None
        self._parts: Sequence[Tensor] = ()

    def forward(self, x: Tensor, number: int) -> Tensor:
        """[..., in] to [..., out] of one; nothing is held on to once the last was asked."""
        if x is not self._x:
            self._x, self._parts = x, self.linear(x).split(self._sizes, -1)
        part = self._parts[number]
        if number == len(self._sizes) - 1:
            self._x, self._parts = None, ()
        return part


class _Part(nn.Module):
    """One of the linear layers of a `_Product`."""

    def __init__(self, product: _Product, number: int) -> None:
        super().__init__()
        self._product, self._number = product, number

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        y: Tensor = self._product(x, self._number)
        return y


class NativeLinear(nn.Module):
    """y = x W' + b, W in 8 or 4 bits; see `ops.multiply_packed`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        codes, grid = self.pack(linear.weight.detach().float().unflatten(1, (-1, GROUP)))
        self.codes: Tensor
        self.grid: Tensor
        self.register_buffer("codes", codes.flatten(1).contiguous())
        self.register_buffer("grid", grid)
        self.bias = linear.bias

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Whether the library does."""
        return weight.device.type == "cpu" and weight.shape[1] % GROUP == 0

    @staticmethod
    def pack(groups: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, and what `ops.grid_of` gives, of numbers [rows, n, GROUP]."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        flat = x.reshape(-1, self.in_features)
        if flat.shape[0] <= _FEW:
            threads = torch.get_num_threads()
            y = torch.ops.h2o_stream.multiply_packed(flat.float(), self.codes, self.grid, threads)
        else:
            y = flat @ unpacked(self.codes, self.grid, x.dtype).T
        return _shaped(y, x, self.bias)


class Native8Linear(NativeLinear):
    """In 8 bits."""

    @staticmethod
    def pack(groups: Tensor) -> tuple[Tensor, Tensor]:
        """See `NativeLinear.pack`."""
        scale = _half(groups.abs().amax(-1) / 127)
        return (groups / scale[..., None]).round_().clamp_(-127, 127).to(torch.int8), grid_of(scale)


class Native4Linear(NativeLinear):
    """In 4 bits."""

    @staticmethod
    def pack(groups: Tensor) -> tuple[Tensor, Tensor]:
        """See `NativeLinear.pack`."""
        codes, scale, middle = on_grid(groups)
        codes = codes.to(torch.uint8)
        return codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4, grid_of(scale, middle - 8 * scale)


def _half(scale: Tensor) -> Tensor:
    """Scales as they will be held, none of them zero."""
    return scale.half().float().clamp_min(torch.finfo(torch.float16).smallest_normal)


class Int8Linear(nn.Module):
    """y = x W' + b, W in 8 bits with a scale for each row, by torch's kernel."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        scale = (weight.float().abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        self.codes: Tensor
        self.scale: Tensor
        self.register_buffer("codes", (weight.float() / scale[:, None]).round_().to(torch.int8))
        self.register_buffer("scale", scale.bfloat16())
        self.bias = linear.bias

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Whether the kernel does."""
        return weight.device.type == "cpu"

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        flat = x.reshape(-1, self.in_features)
        if len(flat) <= _FEW_FOR_TORCH:
            y = torch._weight_int8pack_mm(flat.bfloat16(), self.codes, self.scale)
        else:
            y = flat @ (self.codes.to(x.dtype) * self.scale[:, None].to(x.dtype)).T
        return _shaped(y, x, self.bias)


class Int4Linear(nn.Module):
    """y = x W' + b, W in 4 bits with a scale and an offset for every `GROUP` numbers of a row, by torch's kernel."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        codes, scale, middle = on_grid(weight.float().unflatten(1, (-1, GROUP)))
        self.codes: Tensor
        self.grid: Tensor
        self.register_buffer("codes", torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.flatten(1).int(), 1))
        self.register_buffer("grid", torch.stack((scale.T, middle.T), -1).bfloat16().contiguous())
        self.bias = linear.bias

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Whether the kernel does."""
        return weight.device.type == "cpu" and weight.shape[1] % GROUP == 0 and weight.shape[0] % _ROWS == 0

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        flat = x.reshape(-1, self.in_features)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(flat.bfloat16(), self.codes, GROUP, self.grid)
        return _shaped(y, x, self.bias)


def _shaped(y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """The product as the output for x."""
    y = y.to(x.dtype).view(*x.shape[:-1], -1)
    return y if bias is None else y + bias


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
