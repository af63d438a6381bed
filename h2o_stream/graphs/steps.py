"""Puts compiled steps into a model: its decoder layers, output layer and slots run graphs where there are any."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from h2o_stream.cache.groups import GroupedLayer
from h2o_stream.cache.policies import Budget
from h2o_stream.cache.slots import SlotLayer
from h2o_stream.cache.statistics import SparsityMeter
from h2o_stream.cache.weigh import Products
from h2o_stream.cache.window import H2OCache
from h2o_stream.config import CachePlan
from h2o_stream.graphs.artifacts import Artifacts, Runner
from h2o_stream.graphs.trace import (
    CACHE,
    MOST_PINS,
    Blank,
    Blueprint,
    Chunk,
    Fixed,
    Growing,
    Limits,
    Part,
    Place,
    kind_of,
    told_apart,
)

Told = tuple[Fixed, torch.dtype]
"""Keywords of a module, and the dtype of what it is handed."""

MOST_PARTS = 2
"""Groups of heads in a layer that a graph has names for."""

_SIZES = {"rows": 11, "slots0": 48, "slots1": 80, "distances": 160}
"""Sizes to trace with in the place of those that grow: all different, or they would be taken for the same."""


@contextmanager
def compiled(model: Any, cache: Any, artifacts: Artifacts | None = None) -> Iterator[Artifacts]:
    """Let single tokens, and chunks of one stream, go through compiled graphs, as soon as there are any.

    A graph serves the layer it is ready for; whatever it does
    not serve (few `kv_bits`, other devices than the CPU, layers that are about to allocate, what is left of a prompt
    after its last whole chunk) goes the eager way, on the same tensors.

    Args:
        model: an attached model.
        cache: what `attach` gave.
        artifacts: where graphs come from; the default looks into the user's cache folder.

    Yields:
        The graphs; `Artifacts.wait` waits for them.
    """
    artifacts, keywords = artifacts or Artifacts(), _Keywords(cache)
    modules = _modules(model, cache)
    before = {module: vars(module).get("forward") for module in modules}
    for module, number in modules.items():
        module.forward = _Compiled(module, number, cache, keywords, artifacts)
    if modules:
        cache.make_reader = partial(_Reader, artifacts)
    try:
        yield artifacts
    finally:
        if modules:
            cache.make_reader = None
        for module, forward in before.items():
            del module.forward
            if forward is not None:
                module.forward = forward


def _modules(model: Any, cache: Any) -> dict[nn.Module, int | None]:
    """The decoder layers with their numbers, and the output layer; nothing if steps of this model are not compiled."""
    if not isinstance(cache, H2OCache) or model.device.type != "cpu" or hasattr(model, "hf_device_map"):
        return {}
    if cache.plan.kv_bits < 16 or (model.tp_size or 1) > 1 or hasattr(model, "zero_inference"):
        return {}
    count = len(cache.layers)
    for layers in model.modules():
        if (
            isinstance(layers, nn.ModuleList)
            and len(layers) == count
            and all(map(_layer_number_is, layers, range(count)))
        ):
            head = model.get_output_embeddings()
            return {layer: number for number, layer in enumerate(layers)} | ({head: None} if head is not None else {})
    return {}


def _layer_number_is(layer: nn.Module, number: int) -> bool:
    return any(getattr(module, "layer_idx", None) == number for module in layer.modules())


class _Keywords:
    """Splits what a model hands to its layers, once for all layers of a forward."""

    def __init__(self, cache: H2OCache) -> None:
        self._cache = cache
        self._last: dict[str, Any] = {}
        self._known: tuple[list[str], list[int]] = ([], [])
        self._split: tuple[Fixed, list[Tensor]] = ((), [])

    def __call__(self, keywords: dict[str, Any]) -> tuple[Fixed, list[Tensor]]:
        """See `told_apart`."""
        known = list(keywords), list(map(id, keywords.values()))
        if known != self._known:
            fixed, tensors = told_apart(keywords, self._cache)
            self._last, self._known = keywords, known  # as long as it is held no other object has its number
            self._split = fixed, [tensor.contiguous() for tensor in tensors]
        return self._split


@dataclass
class _Bound:
    """A graph and the tensors of a layer that it works on, as long as they are those.

    Attributes:
        run: the graph.
        told: keywords and dtype that it was traced with.
        parts: the groups of heads, each with what must not have been replaced meanwhile.
        evicted: for each group the tensors that say how many tokens lose their slots: none, one, perhaps two.
        rest: inputs from there on.
    """

    run: Runner
    told: Told
    parts: list[tuple[SlotLayer, Tensor, Tensor, Budget]]
    evicted: list[tuple[Tensor, ...]]
    rest: list[Tensor]

    def serves(self, told: Told) -> bool:
        """Whether the tensors are still those, and the graph is one for this."""
        for part, free, index, budget in self.parts:
            if part.free is not free or part.index is not index or part.budget is not budget:
                return False
        return self.told == told


class _Finder:
    """Finds the graph for a module, and gathers the tensors that it works on.

    Args:
        module: what is traced.
        number: of the decoder layer.
        artifacts: where graphs come from.
    """

    def __init__(self, module: nn.Module, number: int, artifacts: Artifacts) -> None:
        self._module, self._number, self._artifacts = module, number, artifacts
        self._kind = ""
        self._told: Told | None = None
        self._described: dict[tuple[int, ...], Blueprint] = {}

    def __call__(
        self,
        at_once: int,
        hidden: Tensor,
        extras: list[Tensor],
        told: Told,
        parts: list[SlotLayer],
        heads: list[Tensor],
    ) -> _Bound | None:
        """The graph for the slots as they are now, or None.

        Args:
            at_once: how many tokens lose their slots, at most.
            hidden: the first input.
            extras: tensors of the keywords.
            told: the keywords.
            parts: the groups of heads.
            heads: those of each group where there are several.
        """
        if told != self._told:
            self._told, self._described = told, {}
        several, room = hidden.shape[0] > 1, _room([len(part.budget.pins) for part in parts])
        known = self._described.get((at_once, several, room))
        if known and self._artifacts.get(known) is None:
            return None
        if len(parts) > MOST_PARTS or not all(map(_served, parts)):
            return None
        named = [
            (f"{path}.{name}" if path else name, weight)
            for path, inner in self._module.named_modules()
            for name, weight in (*inner._parameters.items(), *inner._buffers.items())
            if weight is not None
        ]
        evicted = [tuple(torch.tensor(count) for count in range(at_once + 1)) for _ in parts]
        rest = [weight for _, weight in named]
        rows: Growing = ((0, "rows"),) if several else ()
        growing: list[Growing] = [rows if len(x) == len(hidden) else () for x in (hidden, *extras)]
        growing += [()] * (len(parts) + len(rest))
        for place, part in enumerate(parts):
            own = part.tensors().values()
            rest += [*own, *self._limits(part, room)]
            slots: Growing = (*rows, (2, f"slots{place}"))
            growing += [slots if tensor.shape[2] == part.store.slots else rows for tensor in own]
            growing += [()] * len(Limits._fields)
        rest += heads
        growing += [()] * len(heads)
        table = parts[0].table if parts else None
        if table is not None:
            reach = max(part.reach(part.store.slots + hidden.shape[-2]) for part in parts)
            rest.append(table.upto(reach, hidden.device, hidden.dtype))
            growing.append(((0, "distances"),))
        if known is None:
            self._kind = self._kind or kind_of(self._module)
            inputs = [hidden, *extras, *(none for none, *_ in evicted), *rest]
            blueprint = Blueprint(
                module=self._module,
                kind=self._kind,
                keywords=told[0],
                extras=len(extras),
                weights=tuple(name for name, _ in named),
                parts=tuple(Part(_rules(part.plan), part.sliding, tuple(part.tensors())) for part in parts),
                rotates=table is not None,
                inputs=tuple(_blank(tensor, names) for tensor, names in zip(inputs, growing, strict=True)),
                at_once=at_once,
                threads=torch.get_num_threads(),
            )
            soon = {part.at_once for part in parts if hidden.shape[-2] == 1}
            for most in {1, at_once} | soon:  # more are rare, one is enough for all other steps
                one = replace(blueprint, at_once=most)
                self._described[most, several, room] = one
                self._artifacts.get(one)
            known = self._described[at_once, several, room]
        run = self._artifacts.get(known)
        if run is None:
            return None
        return _Bound(run, told, [(part, part.free, part.index, part.budget) for part in parts], evicted, rest)

    def _limits(self, part: SlotLayer, room: int) -> Limits:
        pins = torch.zeros(room, 2, dtype=torch.int64)
        for row, pin in enumerate(part.budget.pins):
            pins[row] = torch.tensor([pin.start, pin.stop])
        budget = part.budget
        sinks, recent, span, number = map(torch.tensor, (budget.sinks, budget.recent, part.span, self._number))
        return Limits(sinks, pins, recent, span, number)


class _Compiled:
    """The forward of one module: its graph where that serves, its own forward elsewhere.

    Args:
        module: a decoder layer or the output layer.
        number: of the decoder layer.
        cache: of the model.
        keywords: shared by the modules of the model.
        artifacts: where graphs come from.
    """

    def __init__(
        self, module: nn.Module, number: int | None, cache: H2OCache, keywords: _Keywords, artifacts: Artifacts
    ) -> None:
        self.eager = module.forward
        self._number, self._cache, self._keywords = number, cache, keywords
        self._find = _Finder(module, number or 0, artifacts)
        self._bound: dict[int, _Bound | None] = {}
        self._layer: Any = None
        self._parts: list[SlotLayer] = []
        self._heads: list[Tensor] = []

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """See the module's own forward."""
        hidden = args[0] if len(args) == 1 else None
        if not isinstance(hidden, Tensor) or hidden.dim() != 3 or hidden.shape[1] > 1:
            return self.eager(*args, **keywords)
        if self._number is not None and self._cache.layers[self._number] is not self._layer:
            self._layer = self._cache.layers[self._number]
            self._parts, self._heads = _by_size(self._layer)
        at_once, dues = 1, []
        for part in self._parts:
            due = _due(part)
            if due is None:
                return self.eager(*args, **keywords)
            dues.append(due)
            if due > 1:
                at_once = max(at_once, part.at_once)
        fixed, extras = self._keywords(keywords)
        told, bound = (fixed, hidden.dtype), self._bound.get(at_once)
        if bound is None or not bound.serves(told):
            bound = self._bound[at_once] = self._find(at_once, hidden, extras, told, self._parts, self._heads)
        if bound is None:
            return self.eager(*args, **keywords)
        inputs = [hidden.contiguous(), *extras]
        inputs += [evicted[due] for due, evicted in zip(dues, bound.evicted, strict=True)]
        for part in self._parts:
            part.columns += 1
            part.count_token()
        inputs += bound.rest
        return bound.run(inputs)[0]


class _Reader:
    """Takes chunks of one layer through graphs of its slots; see `slots.Reader`.

    Args:
        artifacts: where graphs come from.
    """

    _TOLD: Fixed = (("key", Place(0)), ("value", Place(1)), ("cache", CACHE))

    def __init__(self, artifacts: Artifacts) -> None:
        self._artifacts = artifacts
        self._find: _Finder | None = None
        self._bound: _Bound | None = None

    def __call__(self, part: SlotLayer, query: Tensor, key: Tensor, value: Tensor, products: Products) -> Tensor | None:
        """See `slots.Reader`."""
        if query.shape[0] > 1 or query.shape[2] != part.plan.chunk or not part.is_initialized:
            return None
        told = (self._TOLD, query.dtype)
        inputs = [query.unflatten(1, (key.shape[1], -1)).contiguous(), key.contiguous(), value.contiguous()]
        if self._bound is None or not self._bound.serves(told):
            self._find = self._find or _Finder(Chunk(products), int(part.policy.layer), self._artifacts)
            self._bound = self._find(1, inputs[0], inputs[1:], told, [part], [])
        held = None if self._bound is None else part.count_chunk(query.shape[2])
        if self._bound is None or held is None:
            return None
        return self._bound.run([*inputs, torch.tensor(held), *self._bound.rest])[0]


def _due(part: SlotLayer) -> int | None:
    """See `SlotLayer.due`; None where there are no slots yet."""
    due = part.due if part.is_initialized else None
    # A row may have empty slots where another has none: those come first.
    return 0 if due and len(part.lengths) > 1 and part.schedule.fixed else due


def _served(part: SlotLayer) -> bool:
    """Whether a graph can work on these slots."""
    return part.is_initialized and len(part.budget.pins) <= MOST_PINS and isinstance(part.watch, SparsityMeter)


def _room(pins: Sequence[int]) -> int:
    """For how many ranges of pinned tokens to have room: every slot is looked up in each, and few chats have two."""
    return 1 if max(pins, default=0) <= 1 else MOST_PINS


def _blank(tensor: Tensor, growing: Growing) -> Blank:
    """What a graph is traced with in the place of a tensor, the same for all streams."""
    sizes = list(tensor.shape)
    for number, name in growing:
        sizes[number] = _SIZES[name]
    return Blank(tuple(sizes), tensor.dtype, growing)


def _rules(plan: CachePlan) -> CachePlan:
    """A plan without its numbers of slots, all but whether there are heavy hitters."""
    return replace(plan, window=0, sinks=0, heavy=min(plan.heavy, 1), recent=0, span=0, chunk=0)


def _by_size(layer: Any) -> tuple[list[SlotLayer], list[Tensor]]:
    """The groups of heads of a layer, small ones first so that fewer kinds of layer need a graph; and their heads."""
    if not isinstance(layer, GroupedLayer):
        return [layer], []
    order = sorted(range(len(layer.parts)), key=lambda place: len(layer.heads[place]))
    return [layer.parts[place] for place in order], [layer.heads[place] for place in order]
