"""llama.cpp's logits: those of a reader of GGUF files that is not ours.

From llama-cpp-python where it is installed (`make setup-all`), else from ik-llama-cpp-python, a fork that comes as a
wheel and reads fewer architectures. It ends the process where it cannot go on, so this file is run in one of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy
import pytest
from numpy.typing import NDArray

CONTEXT = 64
"""Least number of positions."""

WHOLE = find_spec("llama_cpp") is not None
"""Whether llama.cpp itself is installed."""

_FORK_ROUNDING = 5e-3
"""Of the fork, whose keys and values have 16 bits."""

_FORK_DIFFERS = {
    "dots.llm1", "Gemma 4, experts", "Gemma 4, keys as values", "Granite", "Granite MoE", "HunYuan MoE", "Ministral 3",
    "Mixtral",
}  # fmt: skip
"""What the fork reads otherwise than llama.cpp and transformers do."""


def assert_reads(name: str, path: Path, tokens: Sequence[int], expected: NDArray[numpy.float32], limit: float) -> None:
    """Compare llama.cpp's logits of a file with the expected ones [n, V]. `limit`: of the largest difference, as a
    share of the largest logit.
    """
    if not WHOLE and name in _FORK_DIFFERS:
        pytest.skip("ik_llama.cpp computes something else, llama.cpp does not: make setup-all")
    difference = numpy.abs(logits(path, tokens) - expected).max() / numpy.abs(expected).max()
    assert difference < max(limit, 0 if WHOLE else _FORK_ROUNDING)


def logits(path: Path, tokens: Sequence[int]) -> NDArray[numpy.float32]:
    """Logits [n, V] of all tokens. Skips the test if no llama.cpp is installed, or it does not read the file."""
    if WHOLE:
        import llama_cpp

        llama = llama_cpp.Llama(
            str(path), logits_all=True, verbose=False, n_ctx=max(CONTEXT, len(tokens)), n_threads=1,
            n_threads_batch=1, type_k=0, type_v=0,
        )  # fmt: skip
        llama.eval(tokens)
        scores: NDArray[numpy.float32] = llama.scores[: len(tokens)].copy()
        llama.close()
        return scores
    if not find_spec("ik_llama_cpp"):
        pytest.skip("no llama.cpp is installed: make setup-all, or pip install ik-llama-cpp-python")
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "logits.npy"
        done = subprocess.run(
            [sys.executable, __file__, path, found, *map(str, tokens)],
            env=os.environ | {"GGML_NO_BACKTRACE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if done.returncode:
            pytest.skip(f"ik_llama.cpp does not read it: {done.stdout.decode(errors='replace').strip()[-200:]}")
        return numpy.load(found)


def logits_apart(path: Path, tokens: Sequence[int]) -> NDArray[numpy.float32] | None:
    """The same from a process of its own, which llama.cpp may end; None if it does not read the file."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "logits.npy"
        if (child := os.fork()) == 0:
            try:
                os.close(2)
                numpy.save(found, logits(path, tokens))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        return numpy.load(found) if found.exists() else None


def main() -> None:
    """Write the logits that ik_llama.cpp computes: PATH TARGET TOKEN..."""
    import ctypes

    from ik_llama_cpp import _ctypes_api as api
    from ik_llama_cpp._internals import IkModel, make_batch_single

    path, target, *tokens = sys.argv[1:]
    model = IkModel(path)
    parameters = api.llama_context_default_params()
    parameters.n_ctx, parameters.n_threads = max(CONTEXT, len(tokens)), 2
    parameters.flash_attn = False
    context = api.llama_init_from_model(model.model, parameters)
    rows = []
    for position, token in enumerate(tokens):
        batch = make_batch_single(int(token), position)
        if api.llama_decode(context, batch):
            sys.exit("it cannot decode")
        row = ctypes.cast(api.llama_get_logits_ith(context, -1), ctypes.POINTER(ctypes.c_float))
        rows.append(numpy.ctypeslib.as_array(row, (model.n_vocab,)).copy())
    numpy.save(target, numpy.stack(rows))


if __name__ == "__main__":
    main()
