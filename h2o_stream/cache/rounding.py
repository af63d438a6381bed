"""Tells rounding from mistakes: lets a model compute in more bits than its weights have, or round once more."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

PRECISE = torch.float32
"""What models in fewer bits compute in: its rounding is never as large as a mistake."""

_LARGE = 2**24
"""Weights of an output layer that are converted at a time."""


@contextmanager
def in_dtype(model: Any, dtype: torch.dtype | None) -> Iterator[None]:
    """Inside the block a model computes in `PRECISE`, with weights that are converted for the forward of their layer.

    None leaves it as it is.

    Embeddings are looked up as they are. Packed weights are exact in float32. Modules that cast to a dtype of their own
    may fail.
    """
    with ExitStack() as hooks:
        parts = _parts(model) if dtype is PRECISE else ()
        spare: dict[Any, list[Tensor]] = {}
        for module, part in parts:
            if isinstance(module, nn.Embedding) or hasattr(module, "num_embeddings"):
                hooks.callback(module.register_forward_hook(_unrounded).remove)
            elif type(module) is nn.Linear and module.weight.numel() > _LARGE and "forward" not in vars(module):
                module.forward = functools.partial(_multiply_in_parts, module)  # type: ignore[method-assign]
                hooks.callback(vars(module).pop, "forward")
            else:
                converted = _Converted(part, spare)
                hooks.callback(module.register_forward_pre_hook(converted.begin).remove)
                hooks.callback(module.register_forward_hook(converted.end, always_call=True).remove)
        yield


def _parts(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Modules, and those whose weights they use: layers with all of theirs, others with their own."""
    yield module, [module]
    for child in module.children():
        if isinstance(module, nn.ModuleList):
            yield child, [*child.modules()]
        else:
            yield from _parts(child)


def _unrounded(module: Any, inputs: Any, rows: Tensor) -> Tensor:
    """Scaled rows of an embedding as they are before they are rounded, if that is all that it does."""
    if hasattr(module, "dtype"):  # of a packed one
        precise = copy.copy(module)
        precise.dtype = PRECISE
        unrounded: Tensor = precise.forward(*inputs)
        return unrounded
    weight = module.weight
    scale = torch.as_tensor(getattr(module, "embed_scale", 1.0)).to(weight)
    unrounded = weight[inputs[0]].to(PRECISE) * scale
    return unrounded if unrounded.to(rows.dtype).equal(rows) else rows.to(PRECISE)


def _multiply_in_parts(module: nn.Linear, x: Tensor) -> Tensor:
    """What a large layer computes in float32, with few of its weights in float32 at a time."""
    rows = max(1, _LARGE // module.in_features)
    biases = itertools.repeat(None) if module.bias is None else module.bias.to(PRECISE).split(rows)
    parts = zip(module.weight.split(rows), biases)  # noqa: B905
    return torch.cat([functional.linear(x, weight.to(PRECISE), bias) for weight, bias in parts], -1)


class _Converted:
    """The weights of modules in float32, from `begin` to `end`.

    Args:
        spare: tensors by shape and device for weights of other modules, once these have ended.
    """

    def __init__(self, modules: list[nn.Module], spare: dict[Any, list[Tensor]]) -> None:
        self._spare = spare
        self._owners: list[dict[str, Any]] = [
            owner for module in modules for owner in (module._parameters, module._buffers)
        ]
        self._held: list[tuple[dict[str, Any], str, Tensor]] = []

    def begin(self, module: nn.Module, inputs: Any) -> None:
        for owner in self._owners:
            for name, tensor in owner.items():
                if tensor is not None and tensor.is_floating_point() and tensor.itemsize < PRECISE.itemsize:
                    self._held.append((owner, name, tensor))
        for owner, name, tensor in self._held:
            spare = self._spare.setdefault((tensor.shape, tensor.device), [])
            more = spare.pop() if spare else torch.empty_like(tensor, dtype=PRECISE, requires_grad=False)
            more.copy_(tensor.detach())
            owner[name] = nn.Parameter(more, requires_grad=False) if isinstance(tensor, nn.Parameter) else more

    def end(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        while self._held:
            owner, name, tensor = self._held.pop()
            self._spare[tensor.shape, tensor.device].append(owner[name].detach())
            owner[name] = tensor


@contextmanager
def rounded_embedding(model: Any, step: float, seed: int = 0) -> Iterator[None]:
    """Let a model's embedding round its outputs randomly up or down, by `step` of each number."""
    seeded = torch.Generator("cpu").manual_seed(seed)

    def rounded(module: Any, inputs: Any, rows: Tensor) -> Tensor:
        ups = (torch.randint(2, rows.shape, generator=seeded, device="cpu") * 2 - 1).to(rows.device)
        return (rows.float() * (1 + ups * step)).to(rows.dtype)

    handle = model.get_input_embeddings().register_forward_hook(rounded)
    try:
        yield
    finally:
        handle.remove()
