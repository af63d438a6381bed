"""Files from outside, and changes to them: numbers that do not fit, other types, parts that are missing."""

import io
import json
import math
import mmap
import random
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
from safetensors import SafetensorError

from h2o_stream.cache.state import checksummed, decode_json
from h2o_stream.errors import H2OStreamError
from h2o_stream.models.gguf_header import GgufTensor, Header, SkippedArray
from h2o_stream.native.gguf_types import TensorType, ValueType
from h2o_stream.session.state_format import decode_state, write_state
from tests.gguf_files import raw_metadata, string

NUMBERS = (0, 1, 2, 3, 7, 15, 16, 31, 63, 127, 255, 256, 1023, 4097, 65535, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**40)
WIDE = (2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -2, -(2**31), -(2**63), 10**400)
FLOATS = (0.0, -0.0, -1.0, 0.5, 1.5, 1e-40, 1e-300, 1e38, 1e300, math.inf, -math.inf, math.nan)


def changed(rng: random.Random, number: float, others: Sequence[float]) -> float:
    """Another number, often one that is near or that another key has."""
    if isinstance(number, float) and rng.random() < 0.6:
        return rng.choice((*FLOATS, number * 2, -number))
    near = (number + 1, number - 1, number * 2, number // 2, number * 4, -number)
    return rng.choice((rng.choice(near), rng.choice(near), rng.choice(others or near), rng.choice(NUMBERS),
                       rng.choice((*WIDE, *FLOATS))))  # fmt: skip


@dataclass(frozen=True)
class Gguf:
    """The parts of a GGUF file: values by key, tensors, and what they hold; bytes at some places of the header."""

    values: Mapping[str, Any]
    raw: Mapping[str, bytes]
    tensors: tuple[GgufTensor, ...]
    data: Mapping[str, bytes]
    damage: tuple[tuple[float, bytes], ...] = ()

    @classmethod
    def read(cls, path: Path) -> "Gguf":
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = Header(data, len(data))
            values, tensors = header.metadata(), header.tensors(32)
            blocks = {name: data[x.offset : x.offset + x.nbytes] for name, x in tensors.items()}
            return cls(values, raw_metadata(path), tuple(tensors.values()), blocks)

    def mutated(self, rng: random.Random) -> "Gguf":
        """With one change."""
        kind = rng.choices((self._other_value, self._less, self._exchanged, self._other_tensor, self._other_data,
                            self._damaged), (50, 5, 5, 20, 10, 10))[0]  # fmt: skip
        return kind(rng)

    def _own(self, rng: random.Random) -> str:
        """A key, more often one of the architecture."""
        own = [key for key in self.values if not key.startswith(("general.", "tokenizer."))]
        return rng.choice(own if own and rng.random() < 0.85 else [*self.values])

    def _other_value(self, rng: random.Random) -> "Gguf":
        key = self._own(rng)
        value, sizes = self.values[key], [x for x in self.values.values() if type(x) in (int, float)]
        sizes += [size for tensor in self.tensors[:20] for size in tensor.shape]
        new: Any
        if rng.random() < 0.08:
            new = rng.choice(
                ("", "7", "x" * 70, True, [], [1] * 5000, [0.5], ["a"], [value] if type(value) is int else 3)
            )
        elif isinstance(value, SkippedArray) or (isinstance(value, list) and rng.random() < 0.5):
            new = rng.choice(([], ["a"] * 3, [3] * 70, 5, list(value[:-1]) if isinstance(value, list) else []))
        elif isinstance(value, list) and value and type(value[0]) in (int, float):
            new = list(value)
            new[rng.randrange(len(new))] = changed(rng, rng.choice(value), sizes)
        elif isinstance(value, list):
            new = [True, 3]
        elif isinstance(value, str):
            new = rng.choice(("", value + "x", "llama", "yarn", "linear", "gpt2", value[: len(value) // 2]))
        else:
            new = changed(rng, value, sizes)
        return self.with_value(key, new)

    def with_value(self, key: str, value: Any) -> "Gguf":
        raw = string(key.encode()) + _encoded(value)
        return replace(self, values={**self.values, key: value}, raw={**self.raw, key: raw})

    def _less(self, rng: random.Random) -> "Gguf":
        return self.without(self._own(rng))

    def without(self, key: str) -> "Gguf":
        """The same without the value of a key."""
        return replace(self, values={k: v for k, v in self.values.items() if k != key},
                       raw={k: v for k, v in self.raw.items() if k != key})  # fmt: skip

    def _exchanged(self, rng: random.Random) -> "Gguf":
        one, other = self._own(rng), self._own(rng)
        if any(isinstance(self.values[key], SkippedArray) for key in (one, other)):
            return self._less(rng)
        return self.with_value(one, self.values[other]).with_value(other, self.values[one])

    def _other_tensor(self, rng: random.Random) -> "Gguf":
        number = rng.randrange(len(self.tensors))
        old = self.tensors[number]
        shape, new, tensors = list(old.shape), old, list(self.tensors)
        at, action = rng.randrange(len(shape)), rng.randrange(8)
        if action == 0:
            with suppress(OverflowError, ValueError):
                shape[at] = max(1, int(min(changed(rng, shape[at], shape), 2**62)))
        elif action == 1:
            shape = shape[::-1] if len(shape) > 1 else [1, *shape]
        elif action == 2 and shape[at] % 2 == 0:
            shape = [*shape[:at], 2, shape[at] // 2, *shape[at + 1 :]][:4]
        elif action == 3:
            shape = [min(math.prod(shape), 2**62)]
        elif action == 4:
            shape[at] = max(1, shape[at] // 2)
        elif action == 5:
            new = replace(new, type=rng.choice([*TensorType]))
        elif action == 6:
            other = rng.choice(self.tensors)
            shape, new = list(other.shape), replace(new, type=other.type)
        else:
            del tensors[number]
            return replace(self, tensors=tuple(tensors))
        tensors[number] = replace(new, shape=tuple(shape))
        return replace(self, tensors=tuple(tensors))

    def _other_data(self, rng: random.Random) -> "Gguf":
        small = [tensor for tensor in self.tensors if tensor.nbytes < 4096] or self.tensors
        tensor = rng.choice(small if rng.random() < 0.8 else self.tensors)
        data, values = bytearray(self.data[tensor.name]), (*FLOATS, 1e30, -1e30)
        for _ in range(rng.choice((1, 4, len(data) // 4))):
            start = rng.randrange(max(1, len(data) // 4)) * 4
            with suppress(OverflowError):
                data[start : start + 4] = struct.pack("<f", rng.choice(values))
        return replace(self, data={**self.data, tensor.name: bytes(data)})

    def _damaged(self, rng: random.Random) -> "Gguf":
        return replace(self, damage=(*self.damage, (rng.random() ** 2, _other_bytes(rng))))

    def write(self, path: Path) -> None:
        infos, parts, offset = [], [], 0
        for tensor in self.tensors:
            data = self.data[tensor.name]
            shape = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
            infos.append(string(tensor.name.encode()) + shape + struct.pack("<IQ", tensor.type, offset))
            parts.append(data + bytes(-len(data) % 32))
            offset += len(parts[-1])
        head = b"".join([b"GGUF", struct.pack("<IQQ", 3, len(infos), len(self.raw)), *self.raw.values(), *infos])
        for place, put in self.damage:
            at = int(place * len(head))
            head = head[:at] + put + head[at + len(put) :]
        path.write_bytes(b"".join([head, bytes(-len(head) % 32), *parts, bytes(64)]))


def _encoded(value: Any) -> bytes:
    """The type of a value, and the value."""
    if isinstance(value, list):
        kinds = [_encoded(item) for item in value] or [struct.pack("<I", ValueType.UINT32)]
        same = [item[4:] for item in kinds if item[:4] == kinds[0][:4]]
        return struct.pack("<I", ValueType.ARRAY) + kinds[0][:4] + struct.pack("<Q", len(same) if value else 0) + (
            b"".join(same) if value else b"")  # fmt: skip
    if isinstance(value, str):
        return struct.pack("<I", ValueType.STRING) + string(value.encode())
    if isinstance(value, bool):
        return struct.pack("<I?", ValueType.BOOL, value)
    if isinstance(value, int):
        for kind, code in ((ValueType.UINT32, "I"), (ValueType.INT64, "q"), (ValueType.UINT64, "Q")):
            with suppress(struct.error):
                return struct.pack(f"<I{code}", kind, value)
        value = math.inf
    try:
        return struct.pack("<If", ValueType.FLOAT32, value)
    except OverflowError:
        return struct.pack("<Id", ValueType.FLOAT64, value)


@dataclass(frozen=True)
class Folder:
    """Files by their place in a folder.

    Attributes:
        favourite: of what is changed, more than half is this file.
        note: what its reader has to know.
    """

    files: Mapping[str, bytes]
    favourite: str = ""
    note: Any = None

    @classmethod
    def read(cls, path: Path, favourite: str = "", note: Any = None) -> "Folder":
        files = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
        return cls({name: files[name] for name in sorted(files)}, favourite, note)

    def mutated(self, rng: random.Random) -> "Folder":
        """With one change in a file, or without one."""
        name = self.favourite if self.favourite in self.files and rng.random() < 0.6 else rng.choice([*self.files])
        if rng.random() < 0.02 and len(self.files) > 1:
            return replace(self, files={other: data for other, data in self.files.items() if other != name})
        change = _changed_bytes if rng.random() < 0.1 else _CHANGES.get(Path(name).suffix, _changed_text)
        try:
            content = change(rng, self.files[name])
        except (SafetensorError, H2OStreamError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
            content = _changed_bytes(rng, self.files[name])
        return replace(self, files={**self.files, name: content})

    def write(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        for name, content in self.files.items():
            file = path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


def _other_bytes(rng: random.Random) -> bytes:
    return rng.choice((rng.randbytes(rng.choice((1, 4, 8))), struct.pack("<q", rng.choice((*NUMBERS, -1)))))


def _changed_bytes(rng: random.Random, content: bytes) -> bytes:
    """With other bytes at some place, more often near the begin, or cut off."""
    data, length = bytearray(content), max(1, len(content))
    for _ in range(rng.choice((1, 1, 4))):
        at = rng.randrange(min(length, 200) if rng.random() < 0.5 else length)
        put = _other_bytes(rng)
        data[at : at + rng.choice((0, len(put), len(put)))] = put
    return bytes(data[: rng.randrange(length)] if rng.random() < 0.1 else data)


def _changed_text(rng: random.Random, content: bytes) -> bytes:
    """With a piece of it, or of what templates and databases trip over, at another place."""
    if content[:1] == b"{" and rng.random() < 0.9:
        with suppress(ValueError):
            return _changed_json(rng, content)
    start, stop, at = sorted(rng.randrange(len(content) + 1) for _ in range(3))
    pieces = (content[start:stop], *PIECES, b"9" * 400, b"(" * 3000, "\ud800".encode("utf-8", "surrogatepass"))
    return content[:start] + rng.choice(pieces) * rng.choice((1, 1, 2, 50)) + content[rng.choice((start, stop, at)) :]


PIECES = (b"", b"\n", b"\0",
          b"{{ messages }}", b"{% for m in messages %}", b"{% endfor %}", b"{% if x %}", b"{% endif %}",
          b"{{ range(10**9) | list }}", b"{{ 'a' * 10**9 }}", b"{% set x = messages * 9999 %}", b"{{ x.__class__ }}",
          b"{{ .System }}", b"{{ if .Prompt }}", b"{{ end }}", b"{{ raise_exception('a\nb') }}", b"{{ 1 // 0 }}",
          b"{%- macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}", b"</s>", b"<|im_end|>")  # fmt: skip


def _changed_json(rng: random.Random, content: bytes) -> bytes:
    text = json.dumps(_mutated_json(rng, json.loads(content)))
    if rng.random() < 0.03:
        deep, (begin, end) = rng.choice((700, 9999)), rng.choice((("[", "]"), ('{"a":', "}")))
        strange = rng.choice((begin * deep + "1" + end * deep, "9" * 5000, "1e999", "NaN"))
        text = text.replace(rng.choice(("1", "true", "null", '""', "2")), strange, 1)
    return text.encode()


def _changed_lines(rng: random.Random, content: bytes) -> bytes:
    """With another line, or with lines in another order."""
    lines = content.splitlines()
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    if rng.random() < 0.2:
        lines[at], lines[other] = lines[other], lines[at]
    elif rng.random() < 0.1:
        del lines[at]
    else:
        lines[at] = _changed_json(rng, lines[at])
    return b"\n".join((*lines, b""))


def _changed_tensors(rng: random.Random, content: bytes) -> bytes:
    """With another number in the header, or in an array whose checksums are made to fit, as an attacker would."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    texts = header.get("__metadata__", {})
    if "checksums" in header and rng.random() < 0.7:
        return _changed_state(rng, content, texts)
    if texts and rng.random() < 0.3:
        name = rng.choice([*texts])
        texts[name] = _changed_text(rng, texts[name].encode()).decode("utf-8", "replace")
    else:
        header = _mutated_json(rng, header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[start:]


def _changed_state(rng: random.Random, content: bytes, texts: Mapping[str, str]) -> bytes:
    """A saved state with another number, of which its checksums say nothing."""
    state = decode_state(content)
    sums = [name for name in state if name.endswith("checksums")]
    covered = {name: [*decode_json(state, name)] for name in sums}
    small = [name for name, array in state.items() if array.size < 200 or rng.random() < 0.3]
    name = rng.choice([name for name in small if name not in sums] or [*state])
    array, choice = state[name].copy(), rng.random()
    if array.dtype == numpy.uint8 and array[:1] == b"{"[0]:
        array = numpy.frombuffer(_changed_json(rng, array.tobytes()), numpy.uint8)
    elif choice < 0.1:
        array = array.reshape(-1)[: rng.randrange(array.size + 1)]
    elif choice < 0.2:
        array = array.astype(rng.choice((numpy.int64, numpy.int32, numpy.float32, numpy.uint8)))
    elif array.size:
        flat, number = array.reshape(-1), rng.randrange(array.size)
        for place in range(number, min(array.size, number + rng.choice((1, 1, 9999)))):
            with suppress(OverflowError, ValueError):
                flat[place] = changed(rng, flat[place].item(), (array.size, *array.shape))
    state[name] = numpy.ascontiguousarray(array)
    for name in sums:
        fitting = checksummed({key: state[key] for key in covered[name] if key in state}, name)
        state[name] = fitting[name]
    with io.BytesIO() as file:
        write_state(file, state, texts)
        return file.getvalue()


_CHANGES: Mapping[str, Callable[[random.Random, bytes], bytes]] = {
    ".json": _changed_json, ".jsonl": _changed_lines, ".safetensors": _changed_tensors, ".sqlite": _changed_bytes,
}  # fmt: skip


def _mutated_json(rng: random.Random, value: Any) -> Any:
    """A value with one change somewhere."""
    if isinstance(value, dict) and value and rng.random() < 0.97:
        key = rng.choice([*value])
        if rng.random() < 0.05:
            return {name: item for name, item in value.items() if name != key}
        sizes = [item for item in value.values() if type(item) in (int, float)]
        if type(value[key]) in (int, float):
            return {**value, key: changed(rng, value[key], sizes)}
        return {**value, key: _mutated_json(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return rng.choice((value[:at], value * 2, [*value[:at], _mutated_json(rng, value[at]), *value[at + 1 :]]))
    if type(value) in (int, float):
        return changed(rng, value, ())
    return rng.choice((None, True, False, "", "7", "llama3", "yarn", [], {}, [1, 2], {"a": 1}, 3, 0.5, 10**30, -1))
