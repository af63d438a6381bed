"""Recurrent mixers run natively: states are exact through batches, blocks, threads, undo, forks and both runtimes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from h2o_stream import CacheConfig, attach
from h2o_stream.attachment.describe import describe
from h2o_stream.cache.recurrent import states_of
from h2o_stream.models.packed_layers import PackedLinear
from h2o_stream.native.abi import MatrixKind
from h2o_stream.native.description import DescriptionError
from h2o_stream.native.packing import pack
from tests.families import FAMILIES, GROUPED, tiny
from tests.fixtures import with_exhaustive
from tests.native_builds import needs_library
from tests.native_streams import exact, streamed, tokens_of
from tests.tolerance import relative_error

pytestmark = needs_library

NAMES = ("LFM2", "Qwen3-Next", "Qwen 3.5", "OLMo hybrid", "Bamba", "Falcon-H1", "Granite 4", "Nemotron-H")
mixers = pytest.mark.parametrize("name", with_exhaustive(NAMES[::2], NAMES[1::2]))
"""Has every kind of mixer."""

CONFIG = CacheConfig(window=24, chunk=8)


def family_of(name: str) -> Any:
    return next(family for family in FAMILIES if family.name == name)


def packed(name: str) -> Any:
    """A copy with packed matrices."""
    model = copy.deepcopy(family_of(name).make())
    for parent in list(model.modules()):
        for key, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.out_features > 8:
                rows, columns = child.weight.shape
                tiles = pack(child.weight.detach(), MatrixKind.INT8)
                setattr(parent, key, PackedLinear(MatrixKind.INT8, columns, rows, child.bias, tiles))
    return model


def states(cache: Any) -> list[Tensor]:
    return [state for layer in cache.layers for state in states_of(layer).values()]


@pytest.mark.every(2)
@mixers
@pytest.mark.usefixtures("dense_too")
def test_blocks_of_a_prompt_and_threads(name: str, taken: list[tuple[int, int]]) -> None:
    """More tokens than a block, of two streams, one after the other in the second block."""
    model, tokens, results = family_of(name).make(), tokens_of(2, 560), []
    config, before = CacheConfig(window=64, chunk=32), torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(streamed(model, config, tokens, "auto")[0])
    finally:
        torch.set_num_threads(before)
    assert taken[-1] == (2, 542)
    assert results[0].equal(results[1])
    theirs, _ = streamed(model, config, tokens, "eager")
    assert relative_error(results[0], theirs) < 2 * exact(family_of(name))


@pytest.mark.every(2)
@mixers
def test_packed_weights_and_padding(name: str) -> None:
    """A padded prompt is eager, the turn after it native; both go on with the same states."""
    model, tokens = packed(name), tokens_of(3, 40)
    mask = torch.ones(3, 20, dtype=torch.int64)
    mask[1, :7] = mask[2, :2] = 0
    found = []
    for engine in ("auto", "eager"):
        with torch.no_grad(), attach(model, CONFIG, engine=engine) as cache:  # type: ignore[arg-type]
            assert cache.engine_note.startswith("native" if engine == "auto" else "eager"), cache.engine_note
            first = model(tokens[:, :20], attention_mask=mask, past_key_values=cache).logits[:, -1:]
            rest = [model(part, past_key_values=cache).logits for part in tokens[:, 20:].split([1, 8, 11], 1)]
            found.append(torch.cat([first, *rest], 1))
    assert (found[0] - found[1]).norm() < 0.1 * found[1].norm()  # packed products round their inputs otherwise


@pytest.mark.every(2)
@mixers
@pytest.mark.usefixtures("dense_too")
def test_rows_without_a_token_keep_their_states(name: str) -> None:
    model, tokens = family_of(name).make(), tokens_of(2, 30)
    with torch.no_grad(), attach(model, CONFIG) as cache:
        model(tokens[:, :20], past_key_values=cache)
        model(tokens[:, 20:21], past_key_values=cache)
        before = [state[1].clone() for state in states(cache)]
        column = torch.ones(2, 22, dtype=torch.int64)
        column[1, 21] = 0
        model(tokens[:, 21:22], attention_mask=column, past_key_values=cache)
        assert all(state[1].equal(old) for state, old in zip(states(cache), before, strict=True))
        assert not any(state[0].equal(state[1]) for state in states(cache))


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["Qwen 3.5", "Granite 4"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.usefixtures("dense_too")
def test_states_decay_to_zero(name: str, count: int) -> None:
    """Not to numbers that are too small to be normal, with which a prompt takes three times as long."""
    model = copy.deepcopy(family_of(name).make())
    tokens, smallest = tokens_of(1, 21), torch.finfo(torch.float32).tiny
    silence = torch.zeros(1, 8, dtype=torch.int64)
    tokens[tokens == 0] = 1
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0  # adds nothing to the states of the first layer
        for module in model.modules():
            if isinstance(module, nn.Conv1d) and module.bias is not None:
                module.bias.zero_()
        with attach(model, CONFIG) as cache:
            for part in (tokens[:, :20], tokens[:, 20:], silence):
                model(part, past_key_values=cache)
            state = next(state for state in states_of(cache.layers[0]).values() if state.ndim == 4)
            state.copy_(smallest * (1 + torch.rand_like(state)))
            model(silence[:, :count], past_key_values=cache)
            assert cache.engine_note.startswith("native")
            assert ((state == 0) | (state >= smallest)).all()
            assert (state == 0).any()


@pytest.mark.every(3)
@mixers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_undo_and_forks_are_exact(name: str, dtype: torch.dtype) -> None:
    """Also in bfloat16, whose native states are more exact than transformers'."""
    model, tokens = copy.deepcopy(family_of(name).make()).to(dtype), tokens_of(2, 40)

    def steps(first: int) -> Tensor:
        parts = tokens[:, first : first + 6].split(1, 1)
        return torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)

    with torch.no_grad(), attach(model, CONFIG) as cache:
        assert cache.engine_note.startswith("native")
        model(tokens[:, :20], past_key_values=cache)
        steps(20)
        assert {state.dtype for state in states(cache)} == {torch.float32}
        state = cache.state_dict()
        expected, other = steps(26), steps(32)
        cache.load_state_dict(state)
        assert steps(26).equal(expected)
        assert steps(32).equal(other)
        cache.load_state_dict(state)
        model(tokens[:, 26:27], past_key_values=cache)  # binds addresses
        cache.reorder_cache(torch.tensor([1, 1]))
        swapped = model(tokens[[1, 1], 27:28], past_key_values=cache).logits
        assert swapped[0].equal(swapped[1])
        assert swapped[1].equal(expected[1, 1:2])
        model(tokens[:, 28:30], past_key_values=cache)  # eager: dense prompts are
        own = {dtype for spec in cache.specs for dtype in spec.state_dtypes.values()}
        assert {state.dtype for state in states(cache)} == own
        cache.reset()
        assert not states(cache)


def another_forward(layer: Any) -> None:
    class Doubled(type(layer.conv)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return 2 * super().forward(*args, **kwargs)

    Doubled.forward.__module__ = type(layer.conv).__module__
    layer.conv.__class__ = Doubled


@pytest.mark.parametrize(("name", "change"), [
    ("LFM2", another_forward),
    ("Qwen 3.5", lambda layer: setattr(layer.linear_attn, "activation", "gelu")),
    ("Qwen3-Next", lambda layer: setattr(layer.linear_attn.norm, "activation", "sigmoid")),
])  # fmt: skip
def test_what_computes_something_else_is_eager(name: str, change: Callable[[Any], None]) -> None:
    model = copy.deepcopy(family_of(name).make())
    change(model.model.layers[0])
    with attach(model, CONFIG) as cache:
        assert cache.engine_note.startswith("eager: its logits are off by")


def test_a_long_kernel() -> None:
    model = tiny("Lfm2", **GROUPED, conv_L_cache=9, layer_types=["conv", "full_attention"])()
    with pytest.raises(DescriptionError, match="over 9 tokens"):
        describe(model)
