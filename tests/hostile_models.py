"""Model files whose numbers do not fit: GGUF files and checkpoints with mutated headers, read and stepped.

Each file is to be served or refused in one line, within `LIMIT_S` and
`LIMIT_BYTES`. A crash, a hang and any other exception are findings. The number of a file gives the same file again.
"""

import json
import math
import mmap
import os
import random
import resource
import select
import shutil
import signal
import struct
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from h2o_stream.models.gguf_header import GgufTensor, Header, SkippedArray
from h2o_stream.native.gguf_types import TensorType, ValueType

LIMIT_S, LIMIT_BYTES = 2.0, 2**30
"""Of the processor's time; a process that gives nothing for much longer hangs."""

SLOWER = 10 if "libasan" in os.environ.get("LD_PRELOAD", "") else 1
"""Under sanitizers, which also need the address space for themselves."""

NUMBERS = (0, 1, 2, 3, 7, 15, 16, 31, 63, 127, 255, 256, 1023, 4097, 65535, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**40)
WIDE = (2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -2, -(2**31), -(2**63), 10**400)
FLOATS = (0.0, -0.0, -1.0, 0.5, 1.5, 1e-40, 1e-300, 1e38, 1e300, math.inf, -math.inf, math.nan)
PROMPT, STEPS = 20, 3


def changed(rng: random.Random, number: float, others: Sequence[float]) -> float:
    """Another number, often one that is near or that another key has."""
    if isinstance(number, float) and rng.random() < 0.6:
        return rng.choice((*FLOATS, number * 2, -number))
    near = (number + 1, number - 1, number * 2, number // 2, number * 4, -number)
    return rng.choice((rng.choice(near), rng.choice(near), rng.choice(others or near), rng.choice(NUMBERS),
                       rng.choice((*WIDE, *FLOATS))))  # fmt: skip


@dataclass(frozen=True)
class Gguf:
    """The parts of a GGUF file: values by key, tensors, and what they hold."""

    values: Mapping[str, Any]
    raw: Mapping[str, bytes]
    tensors: tuple[GgufTensor, ...]
    data: Mapping[str, bytes]

    @classmethod
    def read(cls, path: Path) -> "Gguf":
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = Header(data, len(data))
            values, spans = header.metadata()
            tensors = header.tensors(32)
            blocks = {name: data[x.offset : x.offset + x.nbytes] for name, x in tensors.items()}
            return cls(
                values, {key: data[slice(*span)] for key, span in spans.items()}, tuple(tensors.values()), blocks
            )

    def mutated(self, rng: random.Random) -> "Gguf":
        """With one change."""
        kind = rng.choices((self._other_value, self._without, self._exchanged, self._other_tensor, self._other_data),
                           (60, 5, 5, 20, 10))[0]  # fmt: skip
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
        return self._with(key, new)

    def _with(self, key: str, value: Any) -> "Gguf":
        raw = _string(key.encode()) + _encoded(value)
        return replace(self, values={**self.values, key: value}, raw={**self.raw, key: raw})

    def _without(self, rng: random.Random) -> "Gguf":
        key = self._own(rng)
        return replace(self, values={k: v for k, v in self.values.items() if k != key},
                       raw={k: v for k, v in self.raw.items() if k != key})  # fmt: skip

    def _exchanged(self, rng: random.Random) -> "Gguf":
        one, other = self._own(rng), self._own(rng)
        if any(isinstance(self.values[key], SkippedArray) for key in (one, other)):
            return self._without(rng)
        return self._with(one, self.values[other])._with(other, self.values[one])

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
            shape = [math.prod(shape)]
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

    def write(self, path: Path) -> None:
        infos, parts, offset = [], [], 0
        for tensor in self.tensors:
            data = self.data[tensor.name]
            shape = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
            infos.append(_string(tensor.name.encode()) + shape + struct.pack("<IQ", tensor.type, offset))
            parts.append(data + bytes(-len(data) % 32))
            offset += len(parts[-1])
        head = b"".join([b"GGUF", struct.pack("<IQQ", 3, len(infos), len(self.raw)), *self.raw.values(), *infos])
        path.write_bytes(b"".join([head, bytes(-len(head) % 32), *parts, bytes(64)]))


def _string(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _encoded(value: Any) -> bytes:
    """The type of a value, and the value."""
    if isinstance(value, list):
        kinds = [_encoded(item) for item in value] or [struct.pack("<I", ValueType.UINT32)]
        same = [item[4:] for item in kinds if item[:4] == kinds[0][:4]]
        return struct.pack("<I", ValueType.ARRAY) + kinds[0][:4] + struct.pack("<Q", len(same) if value else 0) + (
            b"".join(same) if value else b"")  # fmt: skip
    if isinstance(value, str):
        return struct.pack("<I", ValueType.STRING) + _string(value.encode())
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
    """The files of a checkpoint's folder."""

    files: Mapping[str, bytes]

    @classmethod
    def read(cls, path: Path) -> "Folder":
        return cls({file.name: file.read_bytes() for file in path.iterdir() if file.is_file()})

    def mutated(self, rng: random.Random) -> "Folder":
        """With one change in a number of a JSON file, or of the header of its weights."""
        weights = [name for name in self.files if name.endswith(".safetensors")]
        others = [name for name in self.files if name.endswith(".json") and name != "config.json"]
        name = rng.choices(("config.json", rng.choice(weights), rng.choice(others or ["config.json"])), (75, 15, 10))[0]
        content = self.files[name]
        start = 8 + int.from_bytes(content[:8], "little") if name in weights else 0
        value = json.loads(content[8:start] if start else content)
        text = json.dumps(_mutated_json(rng, value)).encode()
        if start:
            text = len(text).to_bytes(8, "little") + text + content[start:]
        return Folder({**self.files, name: text})

    def write(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        for name, content in self.files.items():
            (path / name).write_bytes(content)


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


def mutant(seeds: Sequence[Gguf | Folder], number: int) -> Gguf | Folder:
    """The file of a number."""
    rng = random.Random(number)
    made = rng.choice(seeds)
    for _ in range(rng.choice((1, 1, 2, 3))):
        made = made.mutated(rng)
    return made


def attempt(path: Path, with_torch: bool) -> str:
    """Read a model and take some steps: ``served`` or ``refused``; else what was found, with a traceback."""
    from h2o_stream.errors import H2OStreamError
    from h2o_stream.native.description import DescriptionError

    try:
        _step(path, with_torch)
        return "served"
    except (H2OStreamError, DescriptionError) as error:
        message = str(error)
        return "refused" if message and "\n" not in message else f"many lines: {message!r}"
    except BaseException as error:  # noqa: BLE001  # whatever it is, it is found
        kind = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
        where = "".join(traceback.format_tb(error.__traceback__)[-4:])
        return f"{kind}\n{where}"


def _step(path: Path, with_torch: bool) -> None:
    from h2o_stream.config import CacheConfig, ModelConfig
    from h2o_stream.engine.served import serve
    from h2o_stream.models import file_tokenizers
    from h2o_stream.models.gguf_export import export_tokenizer
    from h2o_stream.native.description import DescriptionError
    from h2o_stream.runtime import loading
    from h2o_stream.runtime.transformers_model import load

    def export(file: Any, notify: Any) -> Path:
        """Without a process of its own, which takes seconds."""
        if not with_torch:
            raise DescriptionError("only transformers reads its tokenizer")
        return export_tokenizer(file, notify)

    file_tokenizers.export_apart = export
    config, cache = ModelConfig(str(path), offline=True, dtype="float32"), CacheConfig("h2o", window=32, chunk=16)
    try:
        loaded = loading.load_without_torch(config, cache, "auto", _ignore, _ignore, str(path))
    except DescriptionError:
        if not with_torch:
            raise
        loaded = load(config, cache, _ignore, _ignore)
    served = serve(loaded.model, cache, "auto", _ignore)
    tokens = loaded.tokenizer("the an th")["input_ids"] + [number * 7 % 61 + 3 for number in range(PROMPT)]
    vocabulary = getattr(served, "vocabulary", 64)
    served.forward([token % vocabulary for token in tokens])
    for token in range(STEPS):
        served.forward([token % vocabulary])
    served.close()


def _ignore(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class Finding:
    """What was found with the file of a number."""

    number: int
    what: str


def search(
    seeds: Sequence[Gguf | Folder], numbers: Sequence[int], with_torch: Callable[[int], bool], counts: Counter[str]
) -> Iterator[Finding]:
    """Try the files of these numbers, in processes of their own."""
    at = 0
    with TemporaryDirectory() as folder:
        while at < len(numbers):
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(read)
                _work(seeds, numbers[at:], with_torch, Path(folder), write)
            os.close(write)
            with os.fdopen(read, "rb") as results:
                done, found = _listen(results, numbers[at:], counts)
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            at += done
            yield from found[:-1]
            if at < len(numbers) or found[-1:]:
                last = found[-1] if found else None
                if last is None:
                    last = Finding(numbers[at], f"ended with status {status}")
                    at += 1
                yield last


def _listen(results: Any, numbers: Sequence[int], counts: Counter[str]) -> tuple[int, list[Finding]]:
    """How many files were tried, and what was found; the last one is there if the process was too slow."""
    found = list[Finding]()
    for done, number in enumerate(numbers):
        ready, _, _ = select.select([results], [], [], 30 * LIMIT_S * SLOWER)
        line = results.readline() if ready else b""
        if not line:
            if not ready:
                return done + 1, [*found, Finding(number, "hangs")]
            return done, found
        what = json.loads(line)
        counts[what.splitlines()[0].split(":")[0]] += 1
        if what not in ("served", "refused"):
            found.append(Finding(number, what))
            return done + 1, found
    return len(numbers), found


def _work(
    seeds: Sequence[Gguf | Folder], numbers: Sequence[int], with_torch: Callable[[int], bool], folder: Path, out: int
) -> None:
    """Try files, and write a line of each; never returns."""
    try:
        if SLOWER == 1:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
            resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES, used + LIMIT_BYTES))
        for number in numbers:
            made = mutant(seeds, number)
            path = folder / ("model.gguf" if isinstance(made, Gguf) else "model")
            made.write(path)
            begun = time.process_time()
            what = attempt(path, with_torch(number))
            if (seconds := time.process_time() - begun) > LIMIT_S * SLOWER:
                what = f"takes {seconds:.1f} s: {what}"
            os.write(out, json.dumps(what).encode() + b"\n")
    except BaseException:  # noqa: BLE001  # the process ends
        traceback.print_exc()
    finally:
        os._exit(0)
