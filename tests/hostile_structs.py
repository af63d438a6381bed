"""Descriptions whose numbers do not fit, given to the native library itself: it refuses them, or computes with arrays
that have exactly the sizes that abi.h says. Under the address sanitizer, which sees what is behind them.
"""

import ctypes
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy

from h2o_stream.cache.rotations import FINE_ROWS
from h2o_stream.native import abi, library
from h2o_stream.native.abi import MatrixKind, MixerKind
from h2o_stream.native.matrix import DENSE
from h2o_stream.native.packing import columns_fit, packed_bytes
from h2o_stream.native.stepper import open_step, raise_failure
from tests.hostile_files import changed

_MAX_BYTES, _MAX_LAYERS = 2**25, 16
"""Of an array that is made, and of all layers; what needs more is not computed."""

_NUMBERS = {"free": 0, "seen": 0, "recent": 2, "span": 8}
"""Of slots."""

TOKENS, STEPS = 5, 4


@dataclass(frozen=True)
class Structs:
    """A model as structures: pointers say only whether there is something."""

    model: bytes
    layers: tuple[bytes, ...]
    cache: tuple[tuple[str, float], ...] = ()

    def mutated(self, rng: random.Random) -> "Structs":
        """With another number."""
        if rng.random() < 0.1:
            names = [name for name, kind in abi.AttentionLayer._fields_ if kind is not ctypes.c_void_p]
            name = rng.choice([*names[names.index("policy") :], *_NUMBERS])
            return replace(self, cache=(*self.cache, (name, changed(rng, rng.choice((0, 1, 2, 4, 16)), ()))))
        number = rng.randrange(-1, len(self.layers))
        kind, data = (abi.Model, self.model) if number < 0 else (abi.Layer, self.layers[number])
        changing = bytearray(data)
        numbers = [part for part in _parts(kind, changing) if isinstance(part, ctypes.c_int64 | ctypes.c_double)]
        chosen = rng.choice(numbers)
        sizes = [part.value for part in numbers if isinstance(part, ctypes.c_int64) and part.value > 1]
        chosen.value = _number(changed(rng, chosen.value, sizes), type(chosen))
        if number < 0:
            return replace(self, model=bytes(changing))
        return replace(self, layers=(*self.layers[:number], bytes(changing), *self.layers[number + 1 :]))

    def write(self, path: Path) -> None:
        pass


def _number(value: float, kind: Any) -> Any:
    """What is nearest to it of a C number."""
    if kind is ctypes.c_double:
        return float(max(-1e308, min(value, 1e308)))
    return int(max(-(2**63), min(value, 2**63 - 1))) if value == value else 0


def _parts(kind: Any, data: Any, offset: int = 0) -> Iterator[Any]:
    """Every structure, number and pointer in a structure, which share its memory."""
    if issubclass(kind, ctypes.Array):
        for number in range(kind._length_):
            yield from _parts(kind._type_, data, offset + number * ctypes.sizeof(kind._type_))
        return
    yield kind.from_buffer(data, offset)
    if issubclass(kind, ctypes.Structure):
        for name, each in kind._fields_:
            yield from _parts(each, data, offset + getattr(kind, name).offset)


class _TooLargeError(Exception):
    pass


class _Arrays:
    """Makes arrays of exact sizes, and keeps them alive."""

    def __init__(self) -> None:
        self._kept = list[Any]()

    def new(self, dtype: str, *shape: int, value: float = 0) -> int:
        """The address of a new array of numbers."""
        count = math.prod(max(size, 0) for size in shape)  # what has negative ones is refused
        if count * numpy.dtype(dtype).itemsize > _MAX_BYTES:
            raise _TooLargeError
        self._kept.append(numpy.full(count, value, dtype))
        return int(self._kept[-1].ctypes.data)

    def order(self, size: int) -> int:
        """An order of so many elements."""
        address = self.new("int32", size)
        self._kept[-1][:] = numpy.arange(size)[::-1]
        return address

    def fill(self, struct: Any, **sizes: int) -> None:
        """Pointers to float32 numbers, if there are any, by how many these are."""
        for name, size in sizes.items():
            if getattr(struct, name):
                setattr(struct, name, self.new("float32", size, value=0.5))

    def matrices(self, struct: Any) -> None:
        """The weights of all matrices in a structure."""
        for matrix in _parts(type(struct), struct):
            if not isinstance(matrix, abi.Matrix) or not matrix.weights or matrix.kind not in list(MatrixKind):
                continue
            rows, columns, kind = matrix.rows, matrix.columns, MatrixKind(matrix.kind)
            if kind in DENSE or columns_fit(kind, columns):  # what is not read is not looked at
                size = rows * columns * (4 if DENSE.get(kind) == "float32" else 2)
                matrix.weights = self.new("uint8", size if kind in DENSE else packed_bytes(kind, rows, columns))
                self.fill(matrix, bias=rows)


def _fill_layer(new: _Arrays, model: Any, layer: Any) -> None:
    """Arrays of a layer beside its matrices."""
    hidden, shape, experts, mixer = model.hidden_size, layer.attention, layer.experts, layer.mixer
    norms = dict.fromkeys(("before_attention", "after_attention", "before_mlp", "after_mlp", "after_embedding"), hidden)
    heads = (shape.query_heads, shape.kv_heads) if layer.norms_all_heads else (1, 1)
    norms |= {"query_norm": heads[0] * shape.head_size, "key_norm": heads[1] * shape.head_size}
    norms |= {"value_norm": shape.value_size, "attended_norm": layer.out.columns, "inner_norm": layer.down.columns}
    of_norms = [(getattr(layer, name), size) for name, size in norms.items()]
    of_norms += [(x.norm, x.matrix.columns) for x in layer.latent]
    of_norms += [(getattr(experts, f"{name}_norm"), hidden) for name in ("router", "input", "output", "mlp")]
    delta = mixer.kind == MixerKind.GATED_DELTA
    of_norms += [(layer.laurel.norm, hidden), (mixer.norm, mixer.value_size * (1 if delta else mixer.heads))]
    for norm, size in of_norms:
        new.fill(norm, weight=size, bias=size)
    new.fill(shape, sink_logits=shape.query_heads)
    new.fill(layer, frequencies=layer.absolute_rotary_dims // 2)
    new.fill(experts, choice_bias=experts.router.rows, factors=experts.router.rows)
    channels = mixer.convolution.channels
    new.fill(mixer.convolution, weight=channels * mixer.convolution.kernel, bias=channels)
    new.fill(mixer, rate=mixer.heads, decay_bias=mixer.heads, skip=mixer.heads)
    n = model.versions
    new.fill(layer.altup, router=n * hidden, prediction=n**3, correction=n**2, embedding_scale=hidden)


def _slots(new: _Arrays, attention: Any, slots: int, numbers: Mapping[str, int]) -> dict[str, int]:
    """Empty slots of all heads of a layer."""
    heads, bits, number = attention.kv_heads, attention.kv_bits, "uint16" if attention.in_bfloat16 else "float32"
    exact = slots if bits == 16 else attention.exact_sinks + attention.residual
    coded = max(0, slots - exact)
    sizes = {"key": attention.head_size, "value": attention.value_size}
    if not 0 <= exact <= slots or bits not in (2, 4, 6, 8, 16):
        coded, exact = 0, slots  # it is refused
    fields = {f"{name}s": new.new(number, heads, exact, size) for name, size in sizes.items()}
    if bits < 16:
        fields |= {f"{name}_codes": new.new("uint8", heads, coded, size * bits // 8) for name, size in sizes.items()}
        fields["key_range"] = new.new("float32", heads, 2, sizes["key"])
        fields["value_grid"] = new.new("uint16", heads, coded, 2)
    return fields | {
        "scores": new.new("float32", heads, slots, value=-numpy.inf), "long_term": new.new("float32", heads, slots),
        "index": new.new("int32", heads, slots, value=-1), "rank": new.new("int16", heads, slots, value=slots),
        "free": new.new("int64", heads, value=numbers["free"] + (exact if bits < 16 else 0)),
        "seen": new.new("int64", 1, value=numbers["seen"]), "recent": numbers["recent"], "span": numbers["span"],
        "heads": new.order(heads), "head_count": heads, "slot_count": slots,
    }  # fmt: skip


def compute(path: Path, seed: Structs) -> None:
    """Open a model, and take a prompt and some tokens through it."""
    native = library.loaded()
    assert native
    new, model = _Arrays(), abi.Model.from_buffer_copy(seed.model)
    count = model.layer_count if 0 < model.layer_count <= _MAX_LAYERS else 1
    model.layer_count = min(model.layer_count, count)  # there are no more
    layers = (abi.Layer * count).from_buffer_copy(b"".join(islice(cycle(seed.layers), count)))
    model.layers = ctypes.cast(layers, ctypes.POINTER(abi.Layer))
    try:
        for layer in layers:
            for name in ("elements", "order"):
                if getattr(layer, name):
                    setattr(layer, name, new.order(layer.attention.head_size))
        native.h2o_step_close(open_step(native, SimpleNamespace(struct=model)))
        new.matrices(model)
        new.fill(model, learned_positions=64 * model.hidden_size)
        model.learned_offset = 0
        for norm in (model.embedding_norm, model.norm):
            new.fill(norm, weight=model.hidden_size, bias=model.hidden_size)
        size = model.layer_embedding.columns // model.layer_count
        new.fill(model.layer_projection_norm, weight=size, bias=size)
        for layer in layers:
            new.matrices(layer)
            _fill_layer(new, model, layer)
        _run(native, new, model, layers, seed.cache)
    except _TooLargeError:
        return


def _run(native: Any, new: _Arrays, model: Any, layers: Any, cache: tuple[tuple[str, float], ...]) -> None:
    slots, first, states, count = 24, 0, list[int](), list[dict[str, int]]()
    for layer in layers:
        attention = layer.attention
        layer.first_group, layer.group_count = first, int(layer.qkv_count > 0)
        if not layer.qkv_count:
            continue
        attention.policy, attention.position_mode, attention.kv_bits = first % 4, first % 3, 16
        attention.rope_rows, attention.rotary_dims = 9, layer.absolute_rotary_dims // 2 * 2
        attention.exact_sinks, attention.residual = 2, 4
        numbers = dict(_NUMBERS)
        for name, value in cache:
            if name in numbers:
                numbers[name] = _number(value, ctypes.c_int64) // 2
            else:
                setattr(attention, name, _number(value, dict(abi.AttentionLayer._fields_)[name]))
        attention.rope = new.new("float32", attention.rope_rows, attention.rotary_dims, value=0.5)
        rows = FINE_ROWS + -(-attention.rope_rows // FINE_ROWS)
        attention.rope_codes = new.new("int16", rows, attention.rotary_dims, value=0x4000)
        count.append(_slots(new, attention, slots, numbers))
        first += 1
    for layer in layers:
        mixer = layer.mixer
        if mixer.kind:
            states.append(new.new("float32", mixer.convolution.channels, mixer.convolution.kernel))
            if mixer.kind != MixerKind.SHORT_CONVOLUTION:
                states.append(new.new("float32", mixer.heads, mixer.key_size, mixer.value_size))
    if not count:
        return
    bound = numpy.zeros(first, abi.SLOTS)
    for row, fields in zip(bound, count, strict=True):
        for name, value in fields.items():
            row[name] = value
    addresses, streams = numpy.array(states or [0], numpy.int64), numpy.zeros(1, abi.STREAM)
    streams["slots"], streams["states"] = bound.ctypes.data, addresses.ctypes.data
    logits = new.new("float32", TOKENS, model.vocab_size)
    tokens, limits = numpy.arange(TOKENS) % model.vocab_size, numpy.full(3 * first, slots - 1, numpy.int64)
    step = open_step(native, SimpleNamespace(struct=model))
    code = native.h2o_forward(ctypes.addressof(model), streams.ctypes.data, 1, tokens.ctypes.data, TOKENS, 2,
                              limits.ctypes.data, TOKENS, logits, None, None, 2)  # fmt: skip
    for number in range(STEPS * 8):
        bound["evictions"] = int(TOKENS + number + 1 >= slots)
        code = code or native.h2o_step(step, streams.ctypes.data, 1, logits, None, 2)
    native.h2o_step_close(step)
    raise_failure(code)
