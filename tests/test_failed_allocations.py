"""Memory that ends in native code: a clear error, and nothing that later steps would read or write out of bounds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.fixtures import with_exhaustive
from tests.native_builds import needs_library

TESTS = Path(__file__).parent

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux" or not shutil.which("g++"), reason="nothing to preload"),
    needs_library,
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("every", "model", "rule", "what"), with_exhaustive(
    [(100, "experts", "h2o", "step")],
    product((1,), ("dense", "experts"), ("h2o", "absolute"), ("prompt", "batch", "step", "assisted step")),
))  # fmt: skip
def test_every_allocation_may_fail(every: int, model: str, rule: str, what: str, tmp_path: Path) -> None:
    preloaded = tmp_path / "failing_allocations.so"
    source = TESTS / "failing_allocations.cpp"
    subprocess.run(["g++", "-std=c++17", "-O1", "-shared", "-fPIC", source, "-o", preloaded, "-ldl"], check=True)
    ended = subprocess.run(
        [sys.executable, "-m", "tests.run_failing_allocations", model, rule, what, str(every)], cwd=TESTS.parent,
        env=os.environ | {"LD_PRELOAD": str(preloaded), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
