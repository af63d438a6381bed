"""Native prompts against eager ones: the same logits, and the same tokens kept."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o_stream import CacheConfig, attach
from h2o_stream.cache.audit import check_slots
from h2o_stream.cache.eager import EagerKernels
from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.native import library, stepper
from h2o_stream.native.abi import MatrixKind
from tests.fixtures import make_llama, thinned, with_exhaustive
from tests.in_turn import in_turn
from tests.packed_tiles import KINDS
from tests.test_native_step import EXACT, tokens_of
from tests.test_native_step import NATIVE as NATIVE_POLICIES
from tests.test_packed import packed_model
from tests.tolerance import relative_error

pytestmark = pytest.mark.skipif(library.loaded() is None, reason="there is no compiled library")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """The shapes of the prompts that run natively."""
    shapes: list[tuple[int, int]] = []

    def recorded(self: Any, ids: Any, keep: int = 0, prompt: Any = stepper.Stepper.prompt) -> Any:
        logits = prompt(self, ids, keep)
        if logits is not None:
            shapes.append(ids.shape)
        return logits

    monkeypatch.setattr(stepper.Stepper, "prompt", recorded)
    return shapes


@pytest.fixture
def dense_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models in float32 take the native route, too, which compares exactly."""
    monkeypatch.setattr(stepper, "DENSE", set())


def streamed(
    model: Any,
    config: CacheConfig,
    tokens: Tensor,
    engine: Any,
    *,
    parts: Sequence[int] = (17, 1),
    begin: Callable[[H2OCache], None] = lambda cache: None,
) -> tuple[Tensor, list[Any]]:
    """Logits [B, Q, V] of a stream in parts, the rest being the last one, and what each layer keeps.

    `begin` gets the cache after the first part.
    """
    with torch.no_grad(), attach(model, config, engine=engine) as cache:
        logits = []
        for number, part in enumerate(tokens.split([*parts, tokens.shape[1] - sum(parts)], 1)):
            logits.append(model(part, past_key_values=cache).logits)
            if number == 0:
                begin(cache)
            for group in cache.head_groups:
                check_slots(group, f"slots after part {number}")
        return torch.cat(logits, 1), [cache.kept(layer).tolist() for layer in range(len(cache.layers))]


def assert_same(
    model: Any, config: CacheConfig, tokens: Tensor, taken: list[Any], largest: float = EXACT, **how: Any
) -> None:
    """Both engines give the same logits and keep the same tokens, and the native one takes the last part."""
    ours, kept = streamed(model, config, tokens, "auto", **how)
    assert taken[-1] == (len(tokens), tokens.shape[1] - sum(how.get("parts", (17, 1))))
    theirs, wanted = streamed(model, config, tokens, "eager", **how)
    assert relative_error(ours, theirs) < largest
    assert kept == wanted


@pytest.mark.usefixtures("dense_too")
def test_attention_is_native(taken: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it was eager, which gives the same numbers and took two thirds of a prompt's time."""
    model = make_llama()
    streamed(model, CacheConfig(window=32), tokens_of(1, 60), "auto")  # verifies, with eager forwards
    monkeypatch.setattr(EagerKernels, "prefill", None)
    streamed(model, CacheConfig(window=32), tokens_of(1, 60), "auto")
    assert taken[-2:] == [(1, 17), (1, 42)]


@pytest.mark.every(2)
@pytest.mark.parametrize(("policy", "positions"), thinned(
    itertools.product(NATIVE_POLICIES, ("gap", "rolling", "absolute")),
    lambda policy, positions: policy == "h2o" or positions == ("gap", "absolute")[len(policy) % 2],
))  # fmt: skip
@pytest.mark.usefixtures("dense_too")
def test_every_policy(policy: str, positions: Any, taken: list[tuple[int, int]]) -> None:
    model = make_llama()
    for rows, chunk in ((1, 8), (3, 0)):
        assert_same(model, CacheConfig(policy, 24, chunk=chunk, positions=positions), tokens_of(rows, 90), taken)


@in_turn("kv_bits, chunk", [(8, 8), (6, 0), (4, 0), (2, 8)])
@pytest.mark.usefixtures("dense_too")
def test_few_bits(kv_bits: int, chunk: int, taken: list[tuple[int, int]]) -> None:
    config = CacheConfig(window=32, kv_bits=kv_bits, chunk=chunk)
    ours, theirs = (streamed(make_llama(), config, tokens_of(2, 70), engine)[0] for engine in ("auto", "eager"))
    assert taken[-1] == (2, 52)
    assert relative_error(ours, theirs) < 2e-2


@pytest.mark.usefixtures("dense_too")
def test_more_tokens_than_a_block(taken: list[tuple[int, int]]) -> None:
    assert_same(make_llama(), CacheConfig(window=64, chunk=32), tokens_of(2, 600), taken)


@pytest.mark.every(2)
@pytest.mark.parametrize(("budgets", "parts"), thinned(
    itertools.product(("equal", "measured"), ((), (1,), (1, 1), (24,), (25, 40))),
    lambda budgets, parts: len(parts) % 2 == (budgets == "equal"),
))  # fmt: skip
@pytest.mark.usefixtures("dense_too")
def test_stages_of_windows(budgets: Any, parts: tuple[int, ...], taken: list[tuple[int, int]]) -> None:
    """Prompts that fill slots exactly, and that pass several stages in which windows by head grow and shrink."""
    for rows in (1, 3):
        config = CacheConfig(window=24, budgets=budgets, chunk=8)
        assert_same(make_llama(), config, tokens_of(rows, 110), taken, parts=parts)


@pytest.mark.usefixtures("dense_too")
def test_pins_and_transient_tokens(taken: list[tuple[int, int]]) -> None:
    def protect(cache: H2OCache) -> None:
        cache.pin(5, 12)
        cache.evict_first(14, 60)

    for budgets in ("equal", "measured"):
        config: Any = CacheConfig(window=32, budgets=budgets, chunk=8)  # type: ignore[arg-type]
        assert_same(make_llama(), config, tokens_of(2, 110), taken, begin=protect)


@pytest.mark.usefixtures("dense_too")
def test_under_inference_mode() -> None:
    """What is allocated there is written in place later, outside of it."""
    model, tokens, config = make_llama(), tokens_of(1, 80), CacheConfig(window=24, budgets="measured")
    expected, _ = streamed(model, config, tokens, "eager", parts=(17, 1, 42))
    with attach(model, config) as cache:
        with torch.inference_mode():
            logits = [model(part, past_key_values=cache).logits for part in tokens[:, :60].split((17, 1, 42), 1)]
        cache.reorder_cache(torch.tensor([0]))
        with torch.no_grad():
            logits.append(model(tokens[:, 60:], past_key_values=cache).logits)
    assert relative_error(torch.cat([x.clone() for x in logits], 1), expected) < EXACT


@pytest.mark.usefixtures("dense_too")
def test_results_do_not_depend_on_the_number_of_threads() -> None:
    model, before, results = make_llama(), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(streamed(model, CacheConfig(window=32, chunk=16), tokens_of(2, 90), "auto")[0])
    finally:
        torch.set_num_threads(before)
    assert all(result.equal(results[0]) for result in results)


def test_bfloat16_is_as_near_to_float32_as_transformers_is(dense_too: None, taken: list[tuple[int, int]]) -> None:
    exact = make_llama()
    model, config, tokens = copy.deepcopy(exact).bfloat16(), CacheConfig(window=64), tokens_of(2, 90)
    wanted, _ = streamed(exact, config, tokens, "eager")
    ours, theirs = (streamed(model, config, tokens, engine)[0].float() - wanted for engine in ("auto", "eager"))
    assert taken[-1] == (2, 72)
    assert ours.norm() < 1.2 * theirs.norm() < 0.5 * wanted.norm()


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", with_exhaustive(KINDS[::3], [*KINDS[1::3], *KINDS[2::3]]))
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
        """Padding, embeddings instead of ids, hidden states, autocast, somebody who looks at the attention."""
        model, tokens = packed_model(MatrixKind.INT8), tokens_of(2, 20)
        mask = torch.ones(2, 20, dtype=torch.int64)
        mask[1, :4] = 0
        with torch.no_grad(), attach(model, CacheConfig(window=32)) as cache:
            taken.clear()
            model(tokens, attention_mask=mask)
            model(inputs_embeds=model.get_input_embeddings()(tokens))
            assert model(tokens, output_hidden_states=True).hidden_states
            with torch.autocast("cpu", torch.bfloat16):
                model(tokens)
            cache.head_groups[0].watch = lambda *_: None
            model(tokens)
            cache.head_groups[0].watch = None
            assert taken == []
            model(tokens)
            assert taken == [(2, 20)]

    def test_unknown_tokens_are_refused(self) -> None:
        model = packed_model(MatrixKind.INT8)
        with torch.no_grad(), attach(model, CacheConfig(window=32)), pytest.raises(IndexError, match="is not one of"):
            model(torch.tensor([[5, model.config.vocab_size]]))

    def test_dense_weights_stay_with_torch(self, taken: list[tuple[int, int]]) -> None:
        with torch.no_grad(), attach(model := make_llama(), CacheConfig(window=32)):
            model(tokens_of(1, 20))
        assert taken == []

    def test_few_dense_weights_are_taken_too(self, taken: list[tuple[int, int]]) -> None:
        """As in Gemma 3n, of which llama.cpp quantizes some small matrices not."""
        model, tokens = packed_model(MatrixKind.INT8), tokens_of(1, 60)
        mlp = model.model.layers[0].mlp
        mlp.down_proj = torch.nn.Linear(mlp.down_proj.in_features, mlp.down_proj.out_features, bias=False)
        ours, theirs = (streamed(model, CacheConfig(window=80), tokens, engine)[0] for engine in ("auto", "eager"))
        assert (1, 42) in taken
        assert relative_error(ours, theirs) < 0.1
