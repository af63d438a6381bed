"""Native prompts against eager ones: the same logits, and the same tokens kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_stream import CacheConfig, attach
from h2o_stream.cache.eager import EagerKernels
from h2o_stream.native import library, prompts
from h2o_stream.native.abi import MatrixKind
from tests.conftest import make_llama
from tests.families import FAMILIES, config_of
from tests.packed_tiles import KINDS
from tests.test_native_step import EXACT, tokens_of
from tests.test_packed import packed_model
from tests.tolerance import relative_error

pytestmark = pytest.mark.skipif(library.loaded() is None, reason="there is no compiled library")

NATIVE = [pytest.param(family, id=family.name) for family in FAMILIES if family.native]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """The shapes of the prompts that run natively."""
    shapes: list[tuple[int, int]] = []

    def recorded(self: Any, tokens: Tensor, keep: int, run: Any = prompts.PromptForward.run) -> Tensor:
        shapes.append(tuple(tokens.shape))  # type: ignore[arg-type]
        logits: Tensor = run(self, tokens, keep)
        return logits

    monkeypatch.setattr(prompts.PromptForward, "run", recorded)
    return shapes


@pytest.fixture
def dense_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models in float32 take the native route, too, which compares exactly."""
    monkeypatch.setattr(prompts, "_DENSE", set())


def streamed(model: Any, config: CacheConfig, tokens: Tensor, engine: Any) -> tuple[Tensor, list[Any]]:
    """Logits [B, Q, V] of a prompt in two parts with a token between, and what each layer keeps."""
    with torch.no_grad(), attach(model, config, engine=engine) as cache:
        parts = tokens.split((17, 1, tokens.shape[1] - 18), 1)
        logits = [model(part, past_key_values=cache).logits for part in parts]
        return torch.cat(logits, 1), [cache.kept(layer).tolist() for layer in range(len(cache.layers))]


@pytest.mark.parametrize("family", NATIVE)
@pytest.mark.parametrize("rows", [1, pytest.param(3, marks=pytest.mark.exhaustive)])
@pytest.mark.usefixtures("dense_too")
def test_every_family(family: Any, rows: int, taken: list[tuple[int, int]]) -> None:
    model, tokens = family.make(), tokens_of(rows, 60)
    for positions in family.positions:
        if positions == "absolute" and "LongRoPE" in family.name:
            continue  # its frequencies depend on the text's length, so it runs eagerly
        config = config_of(family, "h2o", 8, positions)
        ours, kept = streamed(model, config, tokens, "auto")
        assert taken[-2:] == [(rows, 17), (rows, 42)]
        theirs, wanted = streamed(model, config, tokens, "eager")
        assert relative_error(ours, theirs) < EXACT
        assert kept == wanted


@pytest.mark.usefixtures("dense_too")
def test_attention_is_native(taken: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it was eager, which gives the same numbers and took two thirds of a prompt's time."""
    model = make_llama()
    streamed(model, CacheConfig(window=32), tokens_of(1, 60), "auto")  # verifies, with eager forwards
    monkeypatch.setattr(EagerKernels, "prefill", None)
    streamed(model, CacheConfig(window=32), tokens_of(1, 60), "auto")
    assert taken[-2:] == [(1, 17), (1, 42)]


@pytest.mark.parametrize("kv_bits", [8, 4])
@pytest.mark.usefixtures("dense_too")
def test_few_bits(kv_bits: int) -> None:
    config = CacheConfig(window=32, kv_bits=kv_bits, chunk=8)
    ours, theirs = (streamed(make_llama(), config, tokens_of(2, 70), engine)[0] for engine in ("auto", "eager"))
    assert relative_error(ours, theirs) < 2e-2


@pytest.mark.usefixtures("dense_too")
def test_more_tokens_than_a_block(taken: list[tuple[int, int]]) -> None:
    config = CacheConfig(window=64, chunk=32)
    ours, theirs = (streamed(make_llama(), config, tokens_of(2, 300), engine) for engine in ("auto", "eager"))
    assert (2, 282) in taken
    assert relative_error(ours[0], theirs[0]) < EXACT
    assert ours[1] == theirs[1]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights(kind: MatrixKind, taken: list[tuple[int, int]]) -> None:
    model, tokens = packed_model(kind), tokens_of(2, 60)
    ours, theirs = (streamed(model, CacheConfig(window=80), tokens, engine)[0] for engine in ("auto", "eager"))
    assert (2, 42) in taken
    assert relative_error(ours, theirs) < 0.1


class TestForms:
    def test_logits_to_keep(self, taken: list[tuple[int, int]]) -> None:
        model, tokens = packed_model(MatrixKind.INT8), tokens_of(2, 20)
        with torch.no_grad(), attach(model, CacheConfig(window=32)):
            taken.clear()
            whole = model(tokens).logits
            for keep in (1, 5, 20, 30):
                assert model(tokens, logits_to_keep=keep).logits.equal(whole[:, -keep:])
            assert len(taken) == 5

    def test_what_the_model_has_to_do_itself(self, taken: list[tuple[int, int]]) -> None:
        """Padding, embeddings instead of ids, hidden states, autocast."""
        model, tokens = packed_model(MatrixKind.INT8), tokens_of(2, 20)
        mask = torch.ones(2, 20, dtype=torch.int64)
        mask[1, :4] = 0
        with torch.no_grad(), attach(model, CacheConfig(window=32)):
            taken.clear()
            model(tokens, attention_mask=mask)
            model(inputs_embeds=model.get_input_embeddings()(tokens))
            assert model(tokens, output_hidden_states=True).hidden_states
            with torch.autocast("cpu", torch.bfloat16):
                model(tokens)
            assert taken == []

    def test_unknown_tokens_are_refused(self) -> None:
        model = packed_model(MatrixKind.INT8)
        with torch.no_grad(), attach(model, CacheConfig(window=32)), pytest.raises(IndexError, match="is not one of"):
            model(torch.tensor([[5, model.config.vocab_size]]))

    def test_dense_weights_stay_with_torch(self, taken: list[tuple[int, int]]) -> None:
        with torch.no_grad(), attach(model := make_llama(), CacheConfig(window=32)):
            model(tokens_of(1, 20))
        assert taken == []
