"""Detects changes of a described model: a native step reads weights by address and calls no module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from ctypes import CDLL
from dataclasses import fields, is_dataclass
from itertools import chain, repeat
from operator import attrgetter, contains, is_
from typing import Any

import numpy
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from h2o_stream.native.abi import BYTES
from h2o_stream.native.description import Description
from h2o_stream.native.pointers import dtype_name, pointer
from h2o_stream.native.torch_modules import has_active_hooks, raw_tensor, text_modules, uses_dropout

_training = attrgetter("training")

_SENTINEL = object()


class ModelGuard:
    """A snapshot of a model that its later state is compared with.

    What a step uses is compared with every token, however it was changed: which modules and weights there are, where
    weights are in memory, and the numbers of those that the description has copied (the others are read in place).
    Hooks are compared after torch has registered any anywhere, and after `invalidate`. The model's own hooks and
    forward are ignored, because they run around every step.

    Args:
        native: the library, which compares bytes; None for a model on a GPU.
        model: watched as it is now.
        description: says which weights a step reads in place; the others are compared as copies.

    Raises:
        DescriptionError: a tensor that the description may have copied is not contiguous.
    """

    def __init__(self, native: CDLL | None, model: nn.Module, description: Description) -> None:
        self._native = native
        modules = [module for _, module in text_modules(model)]
        children = modules[1:]
        # The buffers of a rotary embedding change with the sequence length.
        static_modules = [module for module in modules if not hasattr(module, "rope_type")]
        containers: list[Mapping[str, Any]] = [module._modules for module in modules]
        containers += [owner for module in static_modules for owner in (module._parameters, module._buffers)]
        # Views that show later insertions; the sentinel at the end matches nothing else.
        self._containers = [*(container.values() for container in containers if container), (_SENTINEL,)]
        self._members = [*chain.from_iterable(self._containers)]
        self._tensors = [member for member in self._members if isinstance(member, Tensor)]
        self._addresses = [*map(Tensor.data_ptr, self._tensors)]
        self._module_dicts = [vars(module) for module in children]
        self._hooks = [hooks for module in children for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._hooks += [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        self._dropout_modules = [module for module in modules if uses_dropout(module)]
        self._training_modes = [*map(_training, self._dropout_modules)]
        self._checked_at: int | None = RemovableHandle.next_id
        read_in_place = set(_addresses(description))
        copied = [tensor for tensor in self._tensors if tensor.data_ptr() not in read_in_place]
        self._written = [tensor for tensor in copied if native is None and not tensor.is_inference()]
        self._versions = [tensor._version for tensor in self._written]
        copied = copied if native else []
        self._copies = [raw_tensor(tensor, "the model").clone() for tensor in copied]
        self._compared = numpy.zeros(len(copied), dtype=BYTES)
        for row, tensor, copy in zip(self._compared, copied, self._copies, strict=True):
            row["ours"] = pointer(copy, dtype_name(copy.dtype), copy.numel())
            row["theirs"], row["count"] = tensor.data_ptr(), tensor.nbytes

    def invalidate(self) -> None:
        """Compare hooks the next time."""
        self._checked_at = None

    def __bool__(self) -> bool:
        """Whether modules, weights, hooks and modes are unchanged."""
        if self._checked_at != RemovableHandle.next_id:
            if any(map(has_active_hooks, self._hooks)):
                return False
            self._checked_at = RemovableHandle.next_id
        return (
            all(map(is_, chain.from_iterable(self._containers), self._members))
            and [*map(Tensor.data_ptr, self._tensors)] == self._addresses
            and [tensor._version for tensor in self._written] == self._versions
            and (self._native is None or self._native.h2o_equal(self._compared.ctypes.data, len(self._compared)) == 1)
            and not any(map(contains, self._module_dicts, repeat("forward")))
            and [*map(_training, self._dropout_modules)] == self._training_modes
        )


def _addresses(value: Any) -> Iterator[int]:
    """Addresses of all tensors in a description."""
    if isinstance(value, Tensor):
        yield value.data_ptr()
    elif is_dataclass(value):
        yield from chain.from_iterable(_addresses(getattr(value, field.name)) for field in fields(value))
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(_addresses, value))
