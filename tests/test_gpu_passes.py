"""Passes of several tokens of one stream on a GPU, under Triton's interpreter. `tests/test_gpu.py` runs them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch

from h2o_stream import CacheConfig, attach
from h2o_stream.config import SamplingConfig
from h2o_stream.engine.engine import Engine
from h2o_stream.engine.events import Token
from h2o_stream.engine.grammar import Guess
from h2o_stream.engine.speculation import Speculation
from h2o_stream.gpu import available
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.native.abi import Activation, NormKind
from h2o_stream.native.gguf_types import TensorType
from h2o_stream.native.matrix import Matrix, MatrixKind, Norm
from tests.fixtures import ids as tokens
from tests.fixtures import make_llama
from tests.states import equal_states
from tests.test_gpu_blocks import random_blocks
from tests.test_gpu_graphs import Recording
from tests.test_gpu_steps import family, recorded  # noqa: F401

pytestmark = pytest.mark.skipif(os.environ.get(available.INTERPRET) != "1", reason="Triton does not interpret kernels")


@pytest.mark.parametrize("name", ["", "Q4_K", "Q6_K", "Q8_0"])
def test_products_as_of_each_row_alone(name: str) -> None:
    """Bit for bit."""
    from h2o_stream.gpu.matrices import gemv
    from h2o_stream.gpu.packed import block_matrix, repacked

    rows, columns = 8, 768
    if name:
        packed = repacked(random_blocks(name, rows, columns), TensorType[name], torch.device("cpu"))
        assert packed is not None
        matrix: Matrix = block_matrix(packed, torch.randn(rows), TensorType[name], rows, columns)
    else:
        matrix = Matrix(torch.randn(rows, columns), torch.randn(rows), rows, columns, MatrixKind.FLOAT32)
    x, added = torch.randn(4, columns), torch.randn(4, rows)
    norm = Norm(NormKind.RMS, torch.rand(columns), None, 1e-6)

    def products(part: slice) -> list[torch.Tensor]:
        return [
            gemv([matrix, matrix, matrix], x[part], norm),
            gemv([matrix, matrix], x[part], norm, gated=True, activation=int(Activation.SILU)),
            gemv([matrix], x[part], added=added[part], add_scale=0.5),
        ]

    alone = [products(slice(row, row + 1)) for row in range(4)]
    for size in (2, 3, 4):
        for together, parts in zip(products(slice(0, size)), zip(*alone[:size], strict=True), strict=True):
            assert together.equal(torch.cat(parts))


@contextmanager
def stream(model: Any, config: CacheConfig) -> Iterator[tuple[Any, Any]]:
    """A cache behind a prompt, and passes."""
    with attach(model, config, engine="auto") as cache:
        assert cache.engine_note.startswith("fused"), cache.engine_note
        model(tokens(37), past_key_values=cache)
        yield cache, model.forward.stepper.passes()


@pytest.mark.parametrize(("name", "policy", "bits"), [
    ("", "h2o", 16), ("", "tova", 16), ("", "random", 16), ("", "h2o", 8), ("", "h2o", 4), ("", "tova", 6),
    ("Qwen 3 MoE", "h2o", 16), ("LFM2", "h2o", 16), ("Qwen 3.5", "h2o", 16), ("Bamba", "h2o", 16),
    pytest.param("Gemma 3", "h2o-paper", 16, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_as_steps_and_taken_back(name: str, policy: str, bits: int) -> None:
    """Logits and states are those of single steps, bit for bit, wherever the first wrong guess is."""
    model = family(name) if name else make_llama(groups=2, layers=1)
    config, ids = CacheConfig(policy, window=24, chunk=16, kv_bits=bits), tokens(10, seed=3)[0].tolist()
    with stream(model, config) as (cache, _):
        steps = [model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1] for token in ids]
        wanted = cache.state_dict()
    with stream(model, config) as (cache, passes):
        got, wrong = list[torch.Tensor](), count(1)
        while len(got) < len(ids):
            at = len(got)
            if (logits := passes.next(ids[at])) is None:
                guesses, right = ids[at + 1 : at + 4], next(wrong) % 4
                guesses[right:] = [(token + 1) % 50 for token in guesses[right:]]
                logits = passes.take(ids[at], guesses)
                if logits is None:
                    assert len(guesses) == 0
                    logits = model(torch.tensor([[ids[at]]]), past_key_values=cache).logits[0, -1]
            got.append(logits.clone())
        assert all(map(torch.equal, got, steps))
        assert equal_states(cache.state_dict(), wanted)


def test_replies_are_the_same(monkeypatch: pytest.MonkeyPatch, served_embedded: LoadedModel) -> None:
    """With guesses of which every fourth is wrong."""
    start, reply = [5 + 7 * i % 41 for i in range(60)], list[int]()

    def followers(tokens: Any, *_: Any) -> Iterator[list[Guess]]:
        at = len(tokens) - len(start)
        yield [Guess(reply[i] if i % 4 else 3, 10) for i in range(at, min(at + 3, len(reply)))]

    monkeypatch.setattr(Speculation, "_count", lambda _, max_guesses: max_guesses)
    monkeypatch.setattr("h2o_stream.engine.speculation.followers", followers)
    states, passes = [], []
    for mode in ("off", "auto"):
        sampling = SamplingConfig(0.2, seed=5, max_tokens=12, dry_multiplier=0.0)
        model, config = make_llama(groups=2, layers=1), CacheConfig(window=24, chunk=16)
        with Engine(model, served_embedded.tokenizer, config, sampling, speculate=mode) as engine:
            list(engine.prefill(start))
            tokens = [event.id for event in engine.decode() if isinstance(event, Token)]
            assert tokens == (reply or tokens)
            reply = tokens
            states.append(engine.state_dict())
            passes.append(engine.speculation.passes)
    assert equal_states(*states)
    assert passes[1] < passes[0] - 4


@pytest.mark.parametrize("bits", [16, 4])
def test_passes_are_captured(recorded: type[Recording], bits: int) -> None:  # noqa: F811
    """By a graph for this number of tokens; replays go on exactly."""
    model, ids = make_llama(groups=2, layers=1), tokens(24, seed=3)[0].tolist()
    config = CacheConfig(window=24, chunk=16, budgets="equal", kv_bits=bits)
    results = []
    for captured in (False, True):
        with stream(model, config) as (cache, passes):
            if not captured:
                model.forward.stepper._passes.clear()
            logits, at = [], 0
            while at < len(ids):
                row = passes.next(ids[at])
                if row is None:
                    guesses = [*ids[at + 1 : at + 3], 1]
                    row = passes.take(ids[at], guesses)
                    row = model(torch.tensor([[ids[at]]]), past_key_values=cache).logits[0, -1] if row is None else row
                logits.append(row.clone())
                at += 1
            results.append((logits, cache.state_dict()))
    assert all(map(torch.equal, results[0][0], results[1][0]))
    assert equal_states(results[0][1], results[1][1])
    assert recorded.made == 1
    assert recorded.replays > 1
