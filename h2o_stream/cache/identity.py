"""The identity of a model, for states, sessions, comparisons and measurements on disk.

A model is its class and config, all weights and persistent buffers, how packed weights are packed, the plain attributes
of its modules (PEFT stores there which adapters are active, merged or disabled, and their scaling), and the source of
modules, patched forwards and hooks from outside h2o_stream, torch and Hugging Face. Training mode, attention
implementation and device do not matter.

All bytes of a weight are summed in blocks, at the speed of memory (0.02 s for 540 MB). A sum misses only changes
within 4 KiB that cancel. In one process a weight is summed again if its address, its version or one of some sampled
numbers has changed: writes through ``.data`` to a few numbers of a weight summed before can be missed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from h2o_stream.cache.source import home_of, source_of

FILE_DIGEST = "_h2o_file_digest"
"""Attribute of a model that was loaded from a file as it is: the digest of the file, see `models.file_identity`."""

_SAMPLED = 256
"""Numbers of each weight that are compared every time."""

_BLOCK = 4096
"""Bytes per sum."""

_ELSEWHERE = ("_name_or_path", "transformers_version", "quantization_config", "use_cache")
"""Config entries that do not affect the logits, or that the weights show."""

_PASSING = (
    "training",
    "hf_device_map",
    "gradient_checkpointing",
    "max_seq_len_cached",
    "warnings_issued",
    "name_or_path",
)
"""Attributes of modules that are not part of the identity."""

_ADAPTERS = ("_active_adapter", "_disable_adapters")
"""Private attributes of PEFT's layers that are."""

_summed: WeakKeyDictionary[nn.Module, dict[str, tuple[Any, bytes]]] = WeakKeyDictionary()
"""The weights of a model by name: a quick signature, and their sums."""


def model_digest(model: nn.Module) -> str:
    """Identifies a model: its class, the type of its weights, and 16 hex digits."""
    digest = hashlib.sha256(json.dumps(_config(model), sort_keys=True, default=str).encode())
    digests, modules, dtypes = _summed.setdefault(model, {}), [*model.named_modules()], set[torch.dtype]()
    offloaded = _offloaded(modules)
    for name, weight in _weights(model, modules):
        dtypes.add(weight.dtype)
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        weight = getattr(weight, "to_local", lambda whole=weight: whole)().detach()  # of one that processes share
        if weight.is_meta and name not in offloaded:
            continue
        seen = id(offloaded[name]) if weight.is_meta else _signature(weight)
        if name not in digests or digests[name][0] != seen:
            digests[name] = seen, _sums(offloaded[name][name.rpartition(".")[2]] if weight.is_meta else weight)
        digest.update(digests[name][1])
    storages = set[str]()
    for name, module in modules:
        digest.update(json.dumps([name, *_module(module)], default=str).encode())
        kind = vars(module).get("kind")
        storages |= {kind.name.lower()} if isinstance(kind, Enum) else set()
    storages = storages or {str(dtype).removeprefix("torch.") for dtype in dtypes}
    return f"{type(model).__name__} {'+'.join(sorted(storages))} {digest.hexdigest()[:16]}"


def has_additions(model: nn.Module) -> bool:
    """Whether modules have functions from outside, whose source does not show what they close over."""
    return any(map(_additions, model.modules()))


def _config(model: nn.Module) -> Any:
    def relevant(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kept = {name: relevant(part) for name, part in value.items() if name not in _ELSEWHERE}
        return {name: part for name, part in kept.items() if "attn_implementation" not in str(name)}

    return relevant(model.config.to_dict())  # type: ignore[operator, union-attr]


def _weights(model: nn.Module, modules: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers; other buffers are computed."""
    yield from model.named_parameters()
    for prefix, module in modules:
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _offloaded(modules: Sequence[tuple[str, nn.Module]]) -> dict[str, Any]:
    """By weight name: the mapping in which accelerate keeps the offloaded weights of that module."""
    weights = dict[str, Any]()
    for prefix, module in modules:
        kept = getattr(vars(module).get("_hf_hook"), "weights_map", None)
        if kept is not None:
            weights |= {f"{prefix}.{name}".lstrip("."): kept for name, _ in module.named_parameters(recurse=False)}
    return weights


def _signature(weight: Tensor) -> tuple[Any, ...]:
    """A signature that almost certainly changes with the weight."""
    some = weight.flatten()[:: max(weight.numel() // _SAMPLED, 1)]
    version = None if weight.is_inference() else weight._version
    return weight.data_ptr(), version, weight.shape, weight.stride(), weight.dtype, _bytes(some).cpu().numpy().tobytes()


def _sums(weight: Tensor) -> bytes:
    """The sum of each block of a weight, as integers, and the bytes of the last one."""
    whole = _bytes(weight)
    if whole.storage_offset() % 8:
        whole = whole.clone()
    full = len(whole) // _BLOCK * _BLOCK
    sums = whole[:full].view(torch.int64).view(-1, _BLOCK // 8).sum(1)
    return sums.cpu().numpy().tobytes() + whole[full:].cpu().numpy().tobytes()


def _bytes(weight: Tensor) -> Tensor:
    return weight.contiguous().flatten().view(torch.uint8)


def _module(module: nn.Module) -> Iterator[Any]:
    """What identifies a module besides its weights."""
    yield f"{type(module).__qualname__} {source_of(type(module))}"
    public = (name for name in vars(module) if not (name.startswith("_") or name in _PASSING))
    for name in sorted((*public, *(name for name in _ADAPTERS if name in vars(module)))):
        try:
            yield name, _plain(vars(module)[name])
        except TypeError:  # a module, a tensor, a config
            continue
    yield _additions(module)


def _additions(module: nn.Module) -> list[str]:
    """The source of the functions that a module has from outside."""
    added = (vars(module).get("forward"), *module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return [source for function in added if (source := _foreign(function, type(module)))]


def _plain(value: Any) -> Any:
    """A plain value, for JSON; a TypeError for a module, a tensor or another object."""
    if isinstance(value, dict):
        return sorted((str(name), _plain(part)) for name, part in value.items())
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if value is None or isinstance(value, str | int | float | Enum | torch.dtype):
        return str(value)
    raise TypeError(value)


def _foreign(function: Any, owner: type[nn.Module]) -> str:
    """The source of a function from outside."""
    while home_of(type(function)).startswith("h2o_stream."):  # an attached model: what is within
        function = getattr(function, "forward", None)
    function = getattr(function, "func", function)
    function = getattr(function, "__func__", function)
    if function is owner.forward:
        return ""
    return source_of(function if hasattr(function, "__qualname__") else type(function))
