"""Tokens through a module, or a chunk through the slots of a layer, as functions of tensors; and what tells them apart.

For a token the module's own forward is traced; in a decoder layer `SlotLayer.step` is its attention. For a chunk it is
`SlotLayer.read` alone, since the library's products of matrices are fast. Weights, slots and all that changes while a
stream goes on are inputs, so that layers that differ in nothing else share a graph.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig

import h2o_stream.cache.attention  # noqa: F401 -- registers what the layers call
from h2o_stream.cache.groups import GroupedLayer
from h2o_stream.cache.padding import Padding
from h2o_stream.cache.policies import Budget, make_policy
from h2o_stream.cache.rope import RotaryTable
from h2o_stream.cache.slots import SlotLayer
from h2o_stream.cache.store import Store
from h2o_stream.cache.weigh import Arrivals, Products, Turns
from h2o_stream.config import CachePlan
from h2o_stream.native import legacy_library as library
from h2o_stream.native.ops import DTYPES

MOST_PINS = 8
"""The most ranges of pinned tokens that a graph has room for."""

CACHE = "<cache>"
"""Stands for the cache among a layer's keywords."""


@dataclass(frozen=True)
class Place:
    """Stands for a tensor among a layer's keywords."""

    number: int


class Limits(NamedTuple):
    """What a group of heads goes by in a step.

    Attributes:
        sinks: [] int64, first tokens that stay.
        pins: [n, 2] int64, the pinned indices from first up to last + 1; 0, 0 for none.
        recent: [] int64, newest tokens that stay.
        span: [] int64, see `SlotLayer.span`.
        number: [] int64, of the decoder layer.
    """

    sinks: Tensor
    pins: Tensor
    recent: Tensor
    span: Tensor
    number: Tensor


@dataclass(frozen=True)
class Part:
    """A group of heads of a layer: what never changes.

    Attributes:
        plan: its rules; how many slots there are is of no account.
        sliding: see `SlotLayer`.
        names: the tensors of its slots.
    """

    plan: CachePlan
    sliding: int | None
    names: tuple[str, ...]


Growing = tuple[tuple[int, str], ...]
"""Dimensions of a tensor that differ between streams, and names for their sizes."""

Fixed = tuple[tuple[str, Any], ...]
"""Keywords with something else in the place of tensors and of the cache, see `told_apart`."""


class Blank(NamedTuple):
    """A tensor without its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    growing: Growing


@dataclass(frozen=True)
class Blueprint:
    """All that a graph is made of.

    Attributes:
        module: what is traced, without its numbers.
        kind: what it is, see `kind_of`.
        keywords: what it is called with, see `told_apart`.
        extras: how many tensors are among them.
        weights: names of its parameters and buffers.
        parts: its groups of heads; none for a module without attention.
        rotates: whether keys come un-rotated.
        inputs: the tensors, in the order of `Step.forward`.
        at_once: see `SlotLayer`; of the group where it is largest.
        threads: that share the work.
    """

    module: nn.Module
    kind: str
    keywords: Fixed
    extras: int
    weights: tuple[str, ...]
    parts: tuple[Part, ...]
    rotates: bool
    inputs: tuple[Blank, ...]
    at_once: int
    threads: int

    @property
    def by_library(self) -> bool:
        """Whether products and attention are the business of our own library: for one token of each row."""
        return self.inputs[0].shape[-2] == 1 and library.loaded() is not None

    @cached_property
    def key(self) -> str:
        """16 hex digits, the same for modules that share a graph."""
        told = [
            self.kind,
            repr(self.keywords),
            self.weights,
            [asdict(part) for part in self.parts],
            self.rotates,
            repr(self.inputs),
            self.at_once,
            self.threads,
            torch.backends.cpu.get_cpu_capability(),
            [torch.__version__, transformers.__version__, _sources()],
        ]
        return hashlib.sha256(json.dumps(told, default=str).encode()).hexdigest()[:16]

    def pickled(self) -> bytes:
        """Itself, with the weights left out."""
        written = io.BytesIO()
        _Skeleton(written).dump(self)
        return written.getvalue()


class Chunk(nn.Module):
    """What a chunk goes through in a layer's slots.

    Args:
        products: what the model does with query times key.
    """

    def __init__(self, products: Products) -> None:
        super().__init__()
        self.scaling, self.softcap = products

    def forward(self, query: Tensor, key: Tensor, value: Tensor, cache: Any) -> Tensor:
        """[B, Q, Hq, D], of queries [B, Hkv, G, Q, D], keys and values [B, Hkv, Q, D]."""
        output: Tensor = cache[0].attend(query.flatten(1, 2), key, value, Products(self.scaling, self.softcap))
        return output


class Step(nn.Module):
    """What is traced: one token, or one chunk, through the module of a blueprint."""

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        self.blueprint = blueprint

    def forward(self, inputs: list[Tensor]) -> Tensor:
        """The module's output.

        Args:
            inputs: the hidden state [B, 1, H], or the queries of `Chunk`; tensors of the keywords; for each group of
                heads how many tokens lose their slots, [] int64, up to `at_once`, or with a chunk how many are
                held after it; weights; for each group the tensors of its slots and its limits; the heads of each group
                where there are several; the rotary table where keys come un-rotated. What the slots hold is replaced
                in place.
        """
        plan, given = self.blueprint, iter(inputs)
        hidden, turns = next(given), inputs[-1] if self.blueprint.rotates else None
        extras = [next(given) for _ in range(plan.extras)]
        counts = [next(given) for _ in plan.parts]
        weights = {name: next(given) for name in plan.weights}
        parts = []
        for part, count in zip(plan.parts, counts, strict=True):
            tensors = {name: next(given) for name in part.names}
            limits = Limits._make(next(given) for _ in Limits._fields)
            parts.append(_Slots(part, tensors, limits, count, plan.at_once, turns))
        cache = _Around(parts, [next(given) for _ in parts] if len(parts) > 1 else [])
        keywords = {name: _filled(value, extras, cache) for name, value in plan.keywords}
        with _FewVectors() if plan.by_library else nullcontext():
            output = functional_call(plan.module, weights, (hidden,), keywords)
        if not isinstance(output, Tensor):
            raise TypeError(f"{type(plan.module).__name__} gives {type(output).__name__}, not a tensor")
        for part in parts:
            part.write_back()
        return output


class _Slots(SlotLayer):
    """Slots whose tensors are inputs."""

    at_once = 1

    def __init__(
        self,
        part: Part,
        tensors: Mapping[str, Tensor],
        limits: Limits,
        count: Tensor,
        at_once: int,
        turns: Tensor | None,
    ) -> None:
        policy = make_policy(part.plan)
        policy.layer = limits.number
        super().__init__(part.plan, policy, None if turns is None else _Given(turns), part.sliding)
        self.watch, self.lengths, self.is_initialized = lambda *_: None, (0,), True
        self.span = limits.span
        pins = [_Ends(*pin.unbind()) for pin in limits.pins.unbind()]
        self.budget = Budget(limits.sinks, pins, limits.recent)
        self._given, self._count, self.at_once = tensors, count, at_once
        self.store = Store(tensors["keys"], tensors["values"])
        self.device = self.store.keys.device
        for name in self._books:
            setattr(self, name, tensors[name])

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, products: Products, padding: Padding | None = None
    ) -> Tensor:
        """See `SlotLayer.attend`."""
        new, slots = query.shape[2], self.store.slots
        if new == 1:
            if query.dtype in DTYPES and library.loaded() is not None:
                self.weigh = _weigh_one
            return self.step(query, key, value, products, True, self._count)
        arrivals = Arrivals((new,), new, query.device)
        return self.read(query, key, value, arrivals, products, slots, slots, slots - 1, self._count)

    def write_back(self) -> None:
        """Tensors that were replaced go where those came from that they replace."""
        for name, tensor in self.tensors().items():
            if tensor is not self._given[name]:
                self._given[name].copy_(tensor)


class _Ends(NamedTuple):
    start: Tensor
    stop: Tensor


class _Given(RotaryTable):
    """A rotary table that is an input."""

    def __init__(self, turns: Tensor) -> None:
        self._turns = turns

    def upto(self, limit: int | Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        """All there is."""
        return self._turns


class _Around:
    """A cache of one layer, as a decoder layer and `h2o_attention` see it."""

    padding = place = None

    def __init__(self, parts: Sequence[_Slots], heads: Sequence[Tensor]) -> None:
        self._layer = GroupedLayer(parts, heads) if heads else parts[0] if parts else None
        self.layers = self

    def __getitem__(self, number: int) -> Any:
        return self._layer

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key, value


def _weigh_one(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    turns: Turns | None,
    arrivals: Arrivals,
    hidden: Tensor | None,
    products: Products,
) -> tuple[Tensor, Tensor]:
    """`weigh` for one query, by the library of our own."""
    table, behind = turns or (None, None)
    softcap, threads = products.softcap or 0.0, torch.get_num_threads()
    seen = None if hidden is None else hidden.contiguous()
    output, probs = torch.ops.h2o_stream.weigh_one(
        query.contiguous(), keys, values, table, behind, seen, products.scaling, softcap, threads
    )
    return output, probs


class _FewVectors(TorchFunctionMode):
    """Matrices times one vector of each row, by the library of our own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is linear and not kwargs:
            x, weight, *bias = args
            if x.dtype == weight.dtype and weight.dtype in DTYPES:
                few = x.reshape(-1, x.shape[-1]).contiguous()
                product = torch.ops.h2o_stream.multiply_few(few, weight.contiguous(), torch.get_num_threads())
                product = product.view(*x.shape[:-1], -1)
                return product if not bias or bias[0] is None else product + bias[0]
        return func(*args, **(kwargs or {}))


class _Skeleton(pickle.Pickler):
    """Pickles without the numbers of tensors."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return _of_class, (type(value),), {name: own for name, own in vars(value).items() if name != "forward"}
        if isinstance(value, nn.Parameter):
            return _blank_parameter, (tuple(value.shape), value.dtype)
        if isinstance(value, Tensor):
            return _blank, (tuple(value.shape), value.dtype)
        return NotImplemented


def _of_class(module: type[nn.Module]) -> nn.Module:
    return module.__new__(module)


def _blank(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _blank_parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(_blank(shape, dtype), requires_grad=False)


def told_apart(keywords: Mapping[str, Any], cache: object) -> tuple[Fixed, list[Tensor]]:
    """Split keywords into what is fixed and the tensors.

    Returns:
        Names and values, with a `Place` where a tensor was and a mark where the cache was; the tensors.
    """
    tensors: list[Tensor] = []

    def fixed(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return Place(len(tensors) - 1)
        if isinstance(value, tuple | list):
            return tuple(map(fixed, value))
        return CACHE if value is cache else value

    return tuple((name, fixed(value)) for name, value in keywords.items()), tensors


def _filled(value: Any, tensors: Sequence[Tensor], cache: object) -> Any:
    """The other way round."""
    if isinstance(value, Place):
        return tensors[value.number]
    if isinstance(value, tuple):
        return tuple(_filled(item, tensors, cache) for item in value)
    return cache if value == CACHE else value


@lru_cache
def _sources() -> str:
    """Tells versions of this program apart by what a graph is traced from."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(
        chain(*map(package.glob, ("graphs/trace.py", "graphs/build.py", "cache/**/*.py", "native/ops.py")))
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def kind_of(module: nn.Module) -> str:
    """Classes and settings of a module and all inside it. Which layer of the model it is does not count."""
    told: list[Any] = []
    for name, inner in module.named_modules():
        scalars = {
            key: value
            for key, value in vars(inner).items()
            if isinstance(value, str | int | float | bool | None) and key != "layer_idx"
        }
        config = getattr(inner, "config", None)
        settings = config.to_diff_dict() if isinstance(config, PreTrainedConfig) else None
        told.append((name, f"{type(inner).__module__}.{type(inner).__qualname__}", scalars, settings))
    return json.dumps(told, default=str)
