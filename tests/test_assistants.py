"""Threads that assist a step: the same bits whatever they do, no read of what may be gone, and when a step has them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import traceback
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

from h2o_stream.attachment.describe import describe
from h2o_stream.native import library, stepper
from h2o_stream.native.abi import MatrixKind, Sharing
from h2o_stream.native.description import Description, Matrix
from h2o_stream.native.pointers import Array
from h2o_stream.runtime.model import ServedRuntime
from tests.fixtures import make_llama, with_exhaustive
from tests.native_builds import needs_library
from tests.test_experts import described, fed, packed, served

TESTS = Path(__file__).parent
SOURCES = TESTS.parent / "h2o_stream/native/src"

compiled = pytest.mark.skipif(not shutil.which("g++"), reason="nothing to compile with")


def program(folder: Path, *sources: Path, flags: tuple[str, ...] = ()) -> list[str]:
    """Compile a program; its command. Skips the test if there is no such sanitizer."""
    command = ["g++", "-std=c++17", "-O1", "-Wno-psabi", *flags, *map(str, sources), "-o", str(folder / "program")]
    said = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in said.stderr:
        pytest.skip("there is no thread sanitizer")
    assert said.returncode == 0, said.stderr
    return [str(folder / "program")]


@compiled
@pytest.mark.exhaustive
@pytest.mark.parametrize("flags", [(), ("-g", "-fsanitize=thread")])
def test_exact_and_without_races_though_threads_are_interrupted(flags: tuple[str, ...], tmp_path: Path) -> None:
    names = ("assistants.cpp", "vectors.cpp", "threads.cpp")
    sources = [*(SOURCES / name for name in names), TESTS / "assistants.cpp"]
    command = program(tmp_path, *sources, flags=("-pthread", *flags))
    # some versions of the sanitizer cannot cope with random addresses
    ended = subprocess.run(
        [*(["setarch", "-R"] if shutil.which("setarch") else []), *command], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@needs_library
@compiled
def test_a_step_that_is_closed_waits_for_late_threads(tmp_path: Path) -> None:
    command = program(tmp_path, TESTS / "late_assistants.cpp", flags=("-pthread", "-ldl"))
    in_use = library._path(library.name())
    ended = subprocess.run([*command, in_use], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def model(name: str) -> Description:
    """A model with matrices large enough to be shared."""
    if name == "columns":  # of more rows than a job has room for
        weights = torch.randn(256, 40000, generator=torch.Generator().manual_seed(0))
        output = Matrix(weights, None, 40000, 256, MatrixKind.FLOAT32_COLUMNS)
        return replace(describe(make_llama(heads=8, groups=2, size=16, vocab=40000)), output=output)
    if name == "experts":
        return described("softmax", MatrixKind.INT4, 1024, 256)
    description = describe(make_llama(heads=8, groups=2, size=16, vocab=2000))
    if name == "dense":
        return description
    return replace(description, output=packed(MatrixKind.INT8, 2000, 256, 0))


def assisted(description: Description, sharing: Sharing = Sharing.ASSISTED) -> ServedRuntime:
    """Three threads share the work of its steps."""
    runtime = served(description, 3)
    runtime.stepper.native.h2o_step_share(runtime.stepper.handle, sharing)
    return runtime


def logits(runtime: ServedRuntime) -> Array:
    return fed(runtime, [12, *[1] * 5])


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepper, "num_threads", lambda: 3)
    monkeypatch.setattr(stepper, "DENSE", set())


@needs_library
@pytest.mark.parametrize("name", with_exhaustive(["packed", "columns"], ["experts", "dense"]))
def test_results_do_not_depend_on_who_multiplies(name: str, three_threads: None) -> None:
    results = [logits(assisted(model(name), sharing)) for sharing in Sharing for _ in range(2)]
    assert all(numpy.array_equal(result, results[0]) for result in results)


@needs_library
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_process_has_assistants_of_its_own(three_threads: None) -> None:
    used, unused = assisted(model("dense")), assisted(model("dense"))
    expected = logits(used)[:, :500].tobytes()
    read, write = os.pipe()
    if not (child := os.fork()):  # which must not use torch, nor return to pytest
        try:
            signal.alarm(20)
            os.write(write, logits(unused)[:, :500].tobytes())
        except BaseException:  # noqa: BLE001
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        found = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    assert found == expected, found[:2000]


QUIET, BUSY, ALONE = (4.0, 4.6, 1, 1), (20.0, 6.3, 1, 0), (20.0, 8.0, 0, 0)
"""Milliseconds of a step on all threads and on one, whether that has assistants and whether they were undisturbed."""


@compiled
def test_steps_have_assistants_while_others_want_the_processor(tmp_path: Path) -> None:
    command = program(tmp_path, TESTS / "thread_tuner.cpp")
    phases = [[QUIET] * 100, [BUSY] * 600, [QUIET] * 100, [BUSY] * 9, [QUIET] * 91, [ALONE] * 600]
    lines = "".join(" ".join(map(str, step)) + "\n" for phase in phases for step in phase)
    said = subprocess.run(command, input=lines, capture_output=True, text=True, check=True).stdout
    chosen = iter(map(int, said.split()))
    alone, beside, after, soon, later, serial = ([next(chosen) for _ in phase] for phase in phases)
    assert alone == [1] * 100
    assert beside[:200] == [1] + [0] * 199  # one step is enough to notice
    assert sum(beside) <= 4
    assert after == [0] * 8 + [1] * 92
    assert soon + later == [1] + [0] * 16 + [1] * 83
    assert sum(serial) <= 12
