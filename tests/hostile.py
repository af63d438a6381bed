"""Opens changed files of every kind (`hostile_kinds`), and writes what is found:

python -m tests.hostile --count 1000 --kinds gguf,session

Each is to be opened or refused in one line, within `LIMIT_S` and `LIMIT_BYTES`. A crash, a hang and any other exception
are findings. The number of a file gives the same file again.
"""

import gc
import json
import mmap
import os
import pickle
import random
import resource
import select
import signal
import sys
import time
import traceback
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from h2o_stream.errors import H2OStreamError
from h2o_stream.session.folders import sessions_folder
from tests.hostile_files import Gguf
from tests.hostile_kinds import KINDS, Kind
from tests.hostile_models import Seed

LIMIT_S, LIMIT_BYTES = 2.0, 2**30
"""Of the processor's time; a process that gives nothing for much longer hangs."""

SLOWER = 10 if "libasan" in os.environ.get("LD_PRELOAD", "") else 1
"""Under sanitizers, which also need the address space for themselves."""

_BATCH = 400
"""Files of a process, which keeps something of each."""

_PART = 20_000
"""Files between two lines of what was tried."""

Case = tuple[Kind, Seed]


def cases_of(names: Sequence[str], kept: Path | None = None, some: Callable[[str], bool] = bool) -> list[Case]:
    """What is changed: of these kinds, those with these names. In `kept` it is kept for the next time."""
    cases = list[Case]()
    for name in names:
        file = kept / f"{name}.pickle" if kept else None
        if file is not None and file.exists():
            seeds = pickle.loads(file.read_bytes())  # our own
        else:
            with TemporaryDirectory() as folder:
                os.environ.update(_home(Path(folder)))
                makers = KINDS[name].make(Path(folder)).items()
                seeds = [make() if callable(make) else make for key, make in makers if some(key)]
            if file:
                file.write_bytes(pickle.dumps(seeds))
        cases += [(KINDS[name], seed) for seed in seeds]
    return cases


def mutant(cases: Sequence[Case], number: int) -> Case:
    """The file of a number."""
    rng = random.Random(number)
    kind, made = rng.choice(cases)
    for _ in range(rng.choice((1, 1, 2, 3))):
        made = made.mutated(rng)
    return kind, made


def attempt(opener: Callable[[Path, Seed], None], path: Path, seed: Any = None) -> str:
    """Open a file: ``opened`` or ``refused``; else what was found, with a traceback."""
    from jinja2 import TemplateError

    from h2o_stream.native.description import DescriptionError

    try:
        opener(path, seed)
        return "opened"
    except (H2OStreamError, DescriptionError, TemplateError) as error:
        message = str(error)
        return "refused" if message and "\n" not in message else f"many lines: {message!r}"
    except BaseException as error:  # noqa: BLE001  # whatever it is, it is found
        kind = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
        where = "".join(traceback.format_tb(error.__traceback__)[-4:])
        return f"{kind}\n{where}"


@dataclass(frozen=True)
class Finding:
    """What was found with the file of a number."""

    number: int
    what: str


def search_all(cases: Sequence[Case], numbers: Sequence[int], counts: Counter[str]) -> Iterator[Finding]:
    """Try the files of these numbers, in processes of their own."""
    at, shared = 0, Path("/dev/shm")
    while at < len(numbers):
        with TemporaryDirectory(dir=shared if shared.exists() else None) as folder:
            batch = numbers[at : at + _BATCH]
            read, write = os.pipe()
            gc.freeze()  # what is changed is not to be searched for garbage
            child = os.fork()
            if child == 0:
                os.close(read)
                _work(cases, batch, Path(folder), write)
            os.close(write)
            with os.fdopen(read, "rb") as results:
                done, found = _listen(results, batch, counts)
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            at += done
            if done < len(batch) and not found:
                found = Finding(numbers[at], f"ended with status {status}")
                at += 1
            if found:
                yield found


def _listen(results: Any, numbers: Sequence[int], counts: Counter[str]) -> tuple[int, Finding | None]:
    """How many files were tried until something was found, and what."""
    poll = select.poll()  # which takes any descriptor
    poll.register(results, select.POLLIN)
    for done, number in enumerate(numbers):
        ready = poll.poll(1000 * 100 * LIMIT_S * SLOWER)
        line = results.readline() if ready else b""
        if not ready:
            return done + 1, Finding(number, "hangs")
        if not line:
            return done, None
        what = json.loads(line)
        counts[what.splitlines()[0].split(":")[0]] += 1
        if what not in ("opened", "refused"):
            return done + 1, Finding(number, what)
    return len(numbers), None


def _home(folder: Path) -> dict[str, str]:
    """What makes this folder the user's."""
    return {"HOME": str(folder)} | {f"XDG_{kind}_HOME": str(folder / kind) for kind in ("CACHE", "DATA", "CONFIG")}


def _work(cases: Sequence[Case], numbers: Sequence[int], folder: Path, out: int) -> None:
    """Try files, and write a line of each; never returns."""
    try:
        if SLOWER == 1:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
            resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES, used + LIMIT_BYTES))
        os.environ.update(_home(folder))
        place = sessions_folder()
        place.mkdir(parents=True)
        for number in numbers:
            kind, made = mutant(cases, number)
            path = place / ("model.gguf" if isinstance(made, Gguf) else "model")
            made.write(path)
            begun = time.monotonic()
            what = attempt(kind.open, path, made)
            if time.monotonic() - begun > LIMIT_S * SLOWER:  # beside other work; once more by the processor's time
                begun = time.process_time()
                what = attempt(kind.open, path, made)
                if (seconds := time.process_time() - begun) > LIMIT_S * SLOWER:
                    what = f"takes {seconds:.1f} s: {what}"
            os.write(out, json.dumps(what).encode() + b"\n")
    except BaseException:  # noqa: BLE001  # the process ends
        traceback.print_exc()
    finally:
        os._exit(0)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(name for name in KINDS if name != "torch"))
    parser.add_argument("--folder", type=Path, help="where what is changed is kept for the next time")
    chosen = parser.parse_args()
    if chosen.folder:
        chosen.folder.mkdir(exist_ok=True)
    cases, counts = cases_of(chosen.kinds.split(","), chosen.folder), Counter[str]()
    begun, different = time.monotonic(), Counter[str]()
    end = chosen.first + chosen.count
    for first in range(chosen.first, end, _PART):
        for finding in search_all(cases, range(first, min(first + _PART, end)), counts):
            key = "\n".join(finding.what.splitlines()[-2:])
            different[key] += 1
            if different[key] <= 2:
                print(f"--- {finding.number}: {finding.what}", flush=True)
        files, seconds = sum(counts.values()), time.monotonic() - begun
        print(f"{files} files in {seconds:.0f} s: {dict(counts)}; {len(different)} kinds", flush=True)
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
