"""Detects changes of a described model: a native step reads weights by address and calls no module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, contains, is_
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from h2o_stream.native.description import Description
from h2o_stream.native.modules import has_active_hooks, uses_dropout

_version, _training = attrgetter("_version"), attrgetter("training")

_SENTINEL = object()

_REGISTRATIONS = (
    torch_module.register_module_parameter_registration_hook,
    torch_module.register_module_buffer_registration_hook,
    torch_module.register_module_module_registration_hook,
)


class ModelGuard:
    """A snapshot of a model that its later state is compared with.

    Between tokens only cheap properties are compared: addresses, versions and modes. Modules, parameters and hooks are
    compared after torch has registered any anywhere, and after `invalidate`. The model's own hooks and forward are
    ignored, because they run around every step.

    Args:
        model: the model to watch.
        description: its description.
    """

    def __init__(self, model: nn.Module, description: Description) -> None:
        modules = list(model.modules())
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
        read_in_place = set(_addresses(description))
        self._copied = [tensor for tensor in self._tensors if tensor.data_ptr() not in read_in_place]
        self._copies = [tensor.detach().clone() for tensor in self._copied]
        self._versioned = [tensor for tensor in self._copied if not tensor.is_inference()]
        self._versions = [*map(_version, self._versioned)]
        self._registrations = [0]
        handles = [listen(partial(_count, self._registrations)) for listen in _REGISTRATIONS]
        finalize(self, _remove, handles)
        self._checked_at: tuple[int, int] | None = self._counters

    @property
    def _counters(self) -> tuple[int, int]:
        """Counters of created hooks and of registrations, in the whole process."""
        return RemovableHandle.next_id, self._registrations[0]

    def invalidate(self) -> None:
        """Compare everything the next time."""
        self._checked_at = None

    def __bool__(self) -> bool:
        """Whether modules, weights, hooks and modes are unchanged."""
        if self._checked_at != self._counters:
            if not self._structure_unchanged:
                return False
            self._checked_at = self._counters
        return (
            [*map(Tensor.data_ptr, self._tensors)] == self._addresses
            and [*map(_version, self._versioned)] == self._versions
            and not any(map(contains, self._module_dicts, repeat("forward")))
            and [*map(_training, self._dropout_modules)] == self._training_modes
        )

    @property
    def _structure_unchanged(self) -> bool:
        """Whether modules, parameters and hooks are the same objects."""
        return all(map(is_, chain.from_iterable(self._containers), self._members)) and not any(
            map(has_active_hooks, self._hooks)
        )

    @property
    def weights_unchanged(self) -> bool:
        """Whether the weights that the description has copied are unchanged; slower."""
        return all(map(torch.equal, self._copied, self._copies))


def _addresses(value: Any) -> Iterator[int]:
    """Addresses of all tensors in a description."""
    if isinstance(value, Tensor):
        yield value.data_ptr()
    elif is_dataclass(value):
        yield from chain.from_iterable(_addresses(getattr(value, field.name)) for field in fields(value))
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(_addresses, value))


def _count(registered: list[int], *_: Any) -> None:
    registered[0] += 1


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
