"""The C++ sources compiled for every instruction set that this processor has, once for a run of the tests."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from filelock import FileLock

SOURCES = Path(__file__).parent.parent / "h2o_stream" / "native" / "src"

AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")

INSTRUCTION_SETS: dict[str, tuple[str, ...]] = {"portable": (), "avx2": AVX2, "avx512": AVX512}
"""Compiler flags."""


@functools.cache
def supported(instruction_set: str) -> bool:
    """Whether this processor has the instructions, as far as the system says."""
    if instruction_set == "portable":
        return True
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not cpuinfo.exists():
        return False
    line = next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "")
    names = {"-mavx512vnni": "avx512_vnni"}
    return {names.get(flag, flag[2:]) for flag in INSTRUCTION_SETS[instruction_set]} <= set(line.split())


@functools.cache
def built(instruction_set: str, flags: tuple[str, ...] = ("-O2",)) -> ctypes.CDLL:
    """The library; compiled where no process of this run, nor an earlier one, has done so."""
    compiler = next((found for name in ("g++", "clang++", "c++") if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    sources = sorted(SOURCES.glob("*.cpp"))
    command = [compiler, "-std=c++17", "-fPIC", "-shared", "-pthread", "-Wno-psabi"]
    command += ["-fno-math-errno", "-fno-trapping-math", *flags, *INSTRUCTION_SETS[instruction_set]]
    digest = hashlib.sha256(" ".join(command).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    library = Path(tempfile.gettempdir()) / f"h2o-stream-tests-{digest.hexdigest()[:16]}.so"
    with FileLock(f"{library}.lock"):
        if not library.exists():
            unfinished = library.with_suffix(".unfinished")
            subprocess.run([*command, *map(str, sources), "-o", str(unfinished)], check=True)
            unfinished.replace(library)
    return ctypes.CDLL(str(library))


@pytest.fixture(params=INSTRUCTION_SETS, scope="module")
def native(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The library, for every instruction set."""
    if not supported(request.param):
        pytest.skip(f"this processor does not have {request.param}")
    return built(request.param)
