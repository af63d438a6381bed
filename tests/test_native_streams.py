"""Native prompts and steps against eager ones: the same logits, and the same tokens kept, in every configuration."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from h2o_stream import CacheConfig, attach
from h2o_stream.cache.eager import EagerKernels
from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.native.abi import MatrixKind
from tests.fixtures import make_llama, thinned, with_exhaustive
from tests.more_families import MORE
from tests.native_builds import needs_library
from tests.native_streams import (
    EXACT,
    NATIVE,
    assert_same,
    on_threads,
    one_by_one,
    streamed,
    tokens_of,
)
from tests.test_packed import packed_model
from tests.tolerance import FLOAT32, relative_error

pytestmark = needs_library


@pytest.mark.every(2)
@pytest.mark.parametrize(("policy", "positions"), thinned(
    itertools.product(NATIVE, ("gap", "rolling", "absolute")),
    lambda policy, positions: policy == "h2o" or positions == ("gap", "absolute")[len(policy) % 2],
))  # fmt: skip
@pytest.mark.usefixtures("dense_too")
def test_every_policy(policy: str, positions: Any, taken: list[tuple[int, int]]) -> None:
    model = make_llama()
    for rows, chunk in ((1, 8), (3, 0)):
        assert_same(model, CacheConfig(policy, 24, chunk=chunk, positions=positions), tokens_of(rows, 90), taken)


@pytest.mark.parametrize(
    ("side", "kv_bits"), with_exhaustive([("left", 8), ("right", 16)], [("left", 16), ("right", 8)])
)
def test_padded_batches(side: str, kv_bits: int) -> None:
    mask = torch.ones(4, 30, dtype=torch.int64)
    for row, padding in enumerate((0, 3, 17, 25)):
        mask[row, slice(0, padding) if side == "left" else slice(30 - padding, 30)] = 0
    config = CacheConfig(window=24, chunk=8, kv_bits=kv_bits)
    rounding = EXACT if kv_bits == 16 else 2e-2  # a key halfway between two levels may round either way
    assert_same(make_llama(), config, tokens_of(4, 70), parts=one_by_one(70), mask=mask, largest=rounding)


@pytest.mark.every(3)
@pytest.mark.parametrize(("kv_bits", "positions"), thinned(
    itertools.product((8, 6, 4, 2), ("gap", "rolling", "absolute")),
    lambda bits, positions: positions == {8: "rolling", 2: "absolute"}.get(bits, "gap"),
))  # fmt: skip
@pytest.mark.usefixtures("dense_too")
def test_few_bits(kv_bits: int, positions: Any, taken: list[tuple[int, int]]) -> None:
    """In prompts and in steps."""
    chunk = 8 if kv_bits in (2, 8) else 0
    config = CacheConfig(window=32, kv_bits=kv_bits, positions=positions, chunk=chunk, long_term=2.0)
    for rows in (1, 2):
        assert_same(make_llama(), config, tokens_of(rows, 80), taken, 2e-2, parts=(17, 1, *[1] * 20))


@pytest.mark.every(2)
@pytest.mark.parametrize(("budgets", "parts"), thinned(
    itertools.product(("equal", "measured"), ((), (1,), (1, 1), (24,), (25, 40), one_by_one(105))),
    lambda budgets, parts: len(parts) % 2 == (budgets == "equal"),
))  # fmt: skip
@pytest.mark.usefixtures("dense_too")
def test_stages_of_windows(budgets: Any, parts: tuple[int, ...], taken: list[tuple[int, int]]) -> None:
    """Streams that fill slots exactly, and that pass several stages in which windows by head grow and shrink."""
    for rows in (1, 3):
        config = CacheConfig(window=24, budgets=budgets, chunk=8)
        assert_same(make_llama(), config, tokens_of(rows, 110), taken, parts=parts)


@pytest.mark.parametrize(("budgets", "kv_bits"), [("equal", 16), ("measured", 16), ("measured", 4)])
@pytest.mark.parametrize("parts", [(17, 1), one_by_one(100, 20)], ids=["prompt", "steps"])
@pytest.mark.usefixtures("dense_too")
def test_pins_and_transient_tokens(
    budgets: Any, kv_bits: int, parts: tuple[int, ...], taken: list[tuple[int, int]]
) -> None:
    def protect(cache: H2OCache) -> None:
        cache.pin(5, 12)
        cache.evict_first(14, 60)

    config = CacheConfig(window=32, budgets=budgets, chunk=8, kv_bits=kv_bits)
    rounding = EXACT if kv_bits == 16 else 2e-2
    kept = assert_same(make_llama(), config, tokens_of(2, 110), taken, rounding, parts=parts, begin=protect)
    heads = [set(head) for layer in kept for row in layer for head in row]
    assert all(set(range(5, 12)) <= head and not head & set(range(14, 60)) for head in heads)


VERSIONS = "Gemma 3n, three versions"


@pytest.mark.parametrize(("name", "rows", "parts"), [
    ("Llama", 2, (17, 1)), (VERSIONS, 1, (558, 1)), (VERSIONS, 8, one_by_one(40)),
])  # fmt: skip
@pytest.mark.usefixtures("dense_too")
def test_more_tokens_than_a_block(name: str, rows: int, parts: tuple[int, ...]) -> None:
    """And more streams than a step multiplies one by one."""
    model = make_llama() if name == "Llama" else MORE[name]()
    count, rounding = (600, EXACT) if name == "Llama" else (sum(parts) + 1, FLOAT32)
    config = CacheConfig(window=64 if name == "Llama" else 16, chunk=32)
    assert_same(model, config, tokens_of(rows, count), None, rounding, parts=parts)


@pytest.mark.parametrize("name", ["Llama", pytest.param(VERSIONS, marks=pytest.mark.exhaustive)])
@pytest.mark.usefixtures("dense_too")
def test_results_do_not_depend_on_the_number_of_threads(name: str) -> None:
    model, results = make_llama() if name == "Llama" else MORE[name](), []
    for count in (1, 2, 3, 5):
        with on_threads(count):
            config = CacheConfig(window=32, chunk=16)
            results.append(streamed(model, config, tokens_of(2, 110), "auto", parts=(90, *[1] * 10))[0])
    assert all(result.equal(results[0]) for result in results)


@pytest.mark.usefixtures("dense_too")
def test_attention_is_native(taken: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it was eager, which gives the same numbers and took two thirds of a prompt's time."""
    model = make_llama()
    streamed(model, CacheConfig(window=32), tokens_of(1, 60), "auto")  # verifies, with eager forwards
    monkeypatch.setattr(EagerKernels, "prefill", None)
    streamed(model, CacheConfig(window=32), tokens_of(1, 60), "auto")
    assert taken[-2:] == [(1, 17), (1, 42)]


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

    @pytest.mark.parametrize("tokens", [[-1], [64], [2**40], [5, 64]])
    def test_unknown_tokens_are_refused(self, tokens: list[int]) -> None:
        model = packed_model(MatrixKind.INT8)
        with attach(model, CacheConfig(window=32)) as cache:
            model(tokens_of(1, 20), past_key_values=cache)
            with pytest.raises(IndexError, match="is not one of 64"):
                model(torch.tensor([tokens]), past_key_values=cache)

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
