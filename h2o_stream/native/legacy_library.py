"""The library of our own: its sources beside this file, compiled once for a machine and kept in the cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from h2o_stream.resources import cache_folder

FLAGS = ["-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared"]

_SOURCES = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h"))


def compiler() -> str | None:
    """The C++ compiler of this machine, the one that CXX names if it is set."""
    named = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    return next((found for name in named if (found := shutil.which(name))), None)


@cache
def loaded() -> ctypes.CDLL | None:
    """The library; None where it cannot be compiled. That takes some seconds, once for a machine and version."""
    found = compiler()
    if found is None:
        return None
    told = hashlib.sha256(b"".join(source.read_bytes() for source in _SOURCES))
    told.update(" ".join([found, *FLAGS, torch.__version__, _processor()]).encode())
    path = cache_folder() / "native" / f"h2o-stream-{told.hexdigest()[:16]}.so"
    try:
        if not path.exists():
            _compile(found, [source for source in _SOURCES if source.suffix == ".cpp"], path)
        # A graph finds in it what it calls: the names are for all.
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except (OSError, subprocess.CalledProcessError):
        return None


def _compile(compiler: str, sources: Sequence[Path], path: Path) -> None:
    """The library appears whole or not at all."""
    own = Path(torch.__file__).with_name("lib")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        unfinished = Path(scratch) / path.name
        links = ["-o", str(unfinished), f"-L{own}", f"-Wl,-rpath,{own}", "-ltorch_cpu", "-lgomp"]
        subprocess.run([compiler, *FLAGS, *map(str, sources), *links], check=True, capture_output=True)
        unfinished.replace(path)


def _processor() -> str:
    """What it can do: a home folder may be shared by machines that differ in that."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
