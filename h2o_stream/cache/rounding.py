"""Tells rounding from mistakes: lets a model compute in more bits than its weights have, or round once more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

PRECISE = torch.float32
"""What models in fewer bits compute in: its rounding is never as large as a mistake."""

EXACT_STEP, ROUNDED_STEP = 2.0**-22, 2.0**-8
"""By how much an embedding is rounded to see what rounding does, relative to its numbers: in float32 and fewer bits."""

ROUNDINGS = 3
"""Results may be off by this many times the effect of a rounded embedding."""


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Inside the block a model computes in float32, with weights that are converted for the forward of their layer.

    Embeddings are looked up as they are. Packed weights are exact in float32. Modules that cast to a dtype of their own
    may fail.
    """
    with ExitStack() as hooks:
        for module, part in _parts(model):
            if isinstance(module, nn.Embedding) or hasattr(module, "num_embeddings"):
                hook = module.register_forward_hook(lambda module, inputs, rows: rows.to(PRECISE))
                hooks.callback(hook.remove)
            else:
                converted = _Converted(part)
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


class _Converted:
    """The weights of modules in float32, from `begin` to `end`."""

    def __init__(self, modules: list[nn.Module]) -> None:
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
            more: Tensor = tensor.detach().to(PRECISE)
            owner[name] = nn.Parameter(more, requires_grad=False) if isinstance(tensor, nn.Parameter) else more

    def end(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        while self._held:
            owner, name, tensor = self._held.pop()
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
