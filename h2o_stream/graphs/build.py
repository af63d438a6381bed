"""Compiles blueprints ahead of time: ``python -m h2o_stream.graphs.build PACKAGE ...``, blueprints on standard input.

A process of its own, so that a conversation goes on meanwhile, and one that yields to it.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from h2o_stream.graphs.trace import Blueprint

KEPT_S = 30 * 24 * 3600
"""Seconds after which a graph that was not used is removed."""

_SETTINGS = {"cpp.enable_floating_point_contract_flag": "fast"}

_SERIAL = {"cpp.threads": 1}
"""What is left between the calls of our own library is too little to share out: waiting for each other takes longer."""


def traced(blueprint: Blueprint) -> Any:
    """The exported program of a blueprint; what grows has any size in it."""
    import torch
    from torch.export import Dim

    from h2o_stream.graphs.trace import Step

    torch.set_num_threads(blueprint.threads)
    dims: dict[str, Any] = defaultdict(lambda: Dim.DYNAMIC)
    inputs = [torch.zeros(blank.shape, dtype=blank.dtype) for blank in blueprint.inputs]
    shapes = [{number: dims[name] for number, name in blank.growing} or None for blank in blueprint.inputs]
    with torch.no_grad():
        return torch.export.export(Step(blueprint), (inputs,), dynamic_shapes=(shapes,), strict=False)


def build(blueprint: Blueprint, package: Path) -> None:
    """Trace and compile."""
    compile_ahead(traced(blueprint), package, _SERIAL if blueprint.by_library else {})


def compile_ahead(program: Any, package: Path, settings: Mapping[str, Any]) -> None:
    """Compile an exported program, with settings of Inductor; the package appears whole or not at all."""
    import torch

    from h2o_stream.native.ops import called_by_graphs

    settings = {**_SETTINGS, **settings, "aot_inductor.custom_ops_to_c_shims": called_by_graphs()}
    unfinished = package.with_suffix(f".{os.getpid()}.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=str(unfinished), inductor_configs=settings)
    unfinished.replace(package)


def _yield_to_everything() -> None:
    """Run only when nothing else wants to: a conversation wakes up thousands of times a second, and must not wait."""
    if hasattr(os, "nice"):
        os.nice(19)
    if hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main() -> None:
    """Compile every blueprint into the file that an argument names, unless another process has done so."""
    from filelock import FileLock

    _yield_to_everything()
    paths = [Path(argument) for argument in sys.argv[1:]]
    for old in paths[0].parent.iterdir():
        if time.time() - old.stat().st_mtime > KEPT_S:
            old.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="h2o-stream-") as scratch:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": scratch, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        blueprints = pickle.load(sys.stdin.buffer)  # noqa: S301 -- from the process that started this one
        for blueprint, package in zip(blueprints, paths, strict=True):
            try:
                with FileLock(package.with_suffix(".lock")):
                    if not package.exists():
                        build(pickle.loads(blueprint), package)  # noqa: S301 -- the same
            except Exception:  # noqa: BLE001 -- whatever it was, the others may go well
                traceback.print_exc()


if __name__ == "__main__":
    main()
