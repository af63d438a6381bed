"""What the kernels for GPUs compute, and that they compile: in processes of their own, where Triton is installed.

Triton decides when it is imported whether it interprets kernels or compiles them.
"""

import os
import subprocess
import sys

import pytest

from h2o_stream.gpu import available
from h2o_stream.native.abi import NormKind

pytest.importorskip("triton")


def run(*arguments: str, **variables: str) -> None:
    done = subprocess.run([sys.executable, *arguments], env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("chosen", [
    pytest.param("[recent] or [Q8_0] or pairs or replies or [shared-5] or [convolution] or [mamba2]", id="some"),
    pytest.param("", id="all", marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_interpreted(chosen: str) -> None:
    files = [
        f"tests/test_gpu_{name}.py" for name in ("kernels", "mixers", "steps", "blocks", "passes", "batch", "experts")
    ]
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, *(("-k", chosen) if chosen else ()),
        **{available.INTERPRET: "1"})  # fmt: skip


@pytest.mark.parametrize("case", ["Q8_0", pytest.param("", id="all", marks=pytest.mark.exhaustive)])
def test_compiled(case: str) -> None:
    run("-m", "tests.gpu_compiled", *filter(None, [case]), **{available.INTERPRET: "0"})


def test_kinds_of_norms() -> None:
    """`gpu/layers.py` and `products.normed` know these."""
    assert {*NormKind} == {NormKind.NONE, NormKind.RMS, NormKind.LAYER}
