"""Native steps: rotations, fixed point and activations at their edges, and steps that are checked or cut off."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from h2o_stream import CacheConfig, attach
from h2o_stream.cache.attention import LogitTransform
from h2o_stream.cache.audit import check_slots
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.policies.accumulated import Accumulated
from h2o_stream.cache.protection import Protection
from h2o_stream.cache.rotations import Rotations
from h2o_stream.config import CachePlan
from h2o_stream.errors import H2OStreamError
from h2o_stream.native import library
from h2o_stream.native.kernels import NativeKernels, make_kernels
from h2o_stream.native.model_guard import ModelGuard
from tests.fixtures import make_llama, thinned
from tests.native_builds import needs_library
from tests.native_streams import (
    EXACT,
    assert_same,
    one_by_one,
    streamed,
    tokens_of,
)
from tests.slots import attend
from tests.test_native_prefill import Table, plan
from tests.tolerance import relative_error

pytestmark = needs_library


@pytest.mark.every(3)
@pytest.mark.parametrize(("size", "kv_bits"), thinned(
    product((32, 64, 128, 256), (16, 8, 6)), lambda size, kv_bits: (size in (64, 256)) == (kv_bits == 16)
))  # fmt: skip
def test_keys_rotated_in_registers(size: int, kv_bits: int) -> None:
    """Rotations are composed of two, which have the scale of YaRN twice."""
    model = make_llama(heads=1, size=size, groups=3, layers=1, context=4096)
    model.model.layers[0].self_attn.k_proj.weight.data *= 32 / size  # or else large logits amplify rounding
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 10_000.0}
    config = copy.deepcopy(model.config)
    config.rope_parameters = yarn
    scaled = LlamaForCausalLM(config).eval()
    scaled.load_state_dict(model.state_dict())
    assert scaled.model.rotary_emb.attention_scaling > 1.1
    rounding = EXACT if kv_bits == 16 else 2e-2 * max(1, size / 64)  # sums of more products have fewer bits for each
    assert_same(
        scaled, CacheConfig(window=48, kv_bits=kv_bits), tokens_of(2, 80), parts=one_by_one(80), largest=rounding
    )


@pytest.mark.parametrize("groups", [3, 6])
def test_fixed_point(monkeypatch: pytest.MonkeyPatch, groups: int) -> None:
    """Attention to keys of 8 bits loses little beside their own rounding, of large keys too."""
    model = make_llama(heads=1, size=64, groups=groups, layers=1, context=4096)
    keys = model.model.layers[0].self_attn.k_proj.weight.data
    keys *= 0.2
    keys[[5, 40]] *= 10
    config, tokens, parts = CacheConfig(window=300, kv_bits=8), tokens_of(1, 230), one_by_one(230)
    ours, _ = streamed(model, config, tokens, "auto", parts=parts)
    monkeypatch.setattr(Rotations, "codes", lambda *_: None)
    floats, _ = streamed(model, config, tokens, "auto", parts=parts)
    exactly, _ = streamed(model, CacheConfig(window=300), tokens, "auto", parts=parts)
    assert 0 < relative_error(ours, floats) < relative_error(floats, exactly) / 15


@pytest.mark.every(2)
@pytest.mark.parametrize("inner", [32, 36])
def test_gelu_far_from_zero(inner: int) -> None:
    """Of whole vectors, and of a part of one."""
    config = copy.deepcopy(make_llama().config)
    config.hidden_act, config.intermediate_size = "gelu_pytorch_tanh", inner
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    for layer in model.model.layers:
        layer.mlp.gate_proj.weight.data *= 20
    gates = []
    hook = model.model.layers[0].mlp.act_fn.register_forward_hook(lambda _, inputs, __: gates.append(inputs[0]))
    model(tokens_of(1, 30))
    hook.remove()
    assert gates[0].min() < -50
    assert gates[0].max() > 50
    assert_same(model, CacheConfig(window=32), tokens_of(1, 70), parts=one_by_one(70))


def test_a_stream_continues_with_another_engine() -> None:
    model, tokens = make_llama(), tokens_of(1, 80)
    config, parts = CacheConfig(window=24), one_by_one(80)
    whole, _ = streamed(model, config, tokens, "eager", parts=parts)
    with torch.no_grad(), attach(model, config) as cache:
        first = [model(part, past_key_values=cache).logits for part in tokens[:, :50].split([30, *[1] * 20], 1)]
        state = cache.state_dict()
    with torch.no_grad(), attach(model, config, engine="eager") as cache:
        cache.load_state_dict(state)
        rest = [model(part, past_key_values=cache).logits for part in tokens[:, 50:].split(1, 1)]
    assert relative_error(torch.cat([*first, *rest], 1), whole) < EXACT


class Mine(Accumulated):
    """A policy written in Python."""


def test_a_policy_written_in_python_is_served_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_llama()
    with attach(model, CacheConfig(window=24)) as cache:
        assert cache.engine_note.startswith("native"), "a verified model does not vouch for the policy"
    monkeypatch.setattr("h2o_stream.cache.head_group.make_policy", lambda plan, layer=0: Mine(plan, layer))
    with torch.no_grad(), attach(model, CacheConfig(window=24)) as cache:
        assert cache.engine_note.startswith("eager")
        for part in tokens_of(1, 40).split(1, 1):
            model(part, past_key_values=cache)
        assert cache.kept().shape[-1] == 24


def test_a_step_that_differs_is_found_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.CHECK_VARIABLE, "1")
    model, tokens = make_llama(layers=3), tokens_of(1, 60)
    with torch.no_grad(), attach(model, CacheConfig(window=24)) as cache:
        model(tokens[:, :40], past_key_values=cache)
        for part in tokens[:, 40:50].split(1, 1):
            model(part, past_key_values=cache)
        norm = model.model.layers[1].input_layernorm
        norm.weight = nn.Parameter(norm.weight * 1.1)
        monkeypatch.setattr(ModelGuard, "__bool__", lambda self: True)  # the native step still uses the old one
        with pytest.raises(H2OStreamError, match="after layer 1 "):
            model(tokens[:, 50:51], past_key_values=cache)


@pytest.mark.parametrize(("slots", "dtype"), [(16_383, torch.int16), (16_384, torch.int32)])
@pytest.mark.parametrize("policy", ["h2o", "recent"])
def test_as_many_slots_as_ranks_of_16_bits_can_count(policy: str, slots: int, dtype: torch.dtype) -> None:
    """Full slots take single tokens, then a chunk, then single tokens."""
    plan = CacheConfig(policy, slots - 1, positions="absolute", chunk=5).plan()
    groups = [HeadGroup(plan) for _ in range(2)]
    kernels = (make_kernels(), None)
    like, generator = torch.empty(1, 2, 1, 8), torch.Generator().manual_seed(slots)
    order = torch.stack([torch.randperm(slots, generator=generator) for _ in range(2)])
    for group in groups:
        group.allocate_like(like, like, slots)
        assert group.rank.dtype == dtype
        group.tokens.expect((slots - 1,), slots - 1)
        group.tokens.advance()
        group.seen.fill_(slots - 1)
        group.index.copy_(order).masked_fill_(group.index == slots - 1, -1)
        group.rank.copy_(slots - 2 - order).masked_fill_(group.index < 0, slots)
        group.free.copy_((group.index < 0).int().argmax(-1, keepdim=True))
        group.scores.copy_(torch.rand(order.shape, generator=torch.Generator().manual_seed(1)))
        group.scores.masked_fill_(group.index < 0, -torch.inf)
        for name in ("keys", "values"):
            x = getattr(group.store, name)
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(len(name))))
        group.filled = slots
    for count in (1, 1, 12, 1):
        query, key, value = (torch.randn(1, heads, count, 8, generator=generator) for heads in (4, 2, 2))
        ours, theirs = (
            attend(group, query, key, value, LogitTransform(0.3), kernels=chosen)
            for group, chosen in zip(groups, kernels, strict=True)
        )
        assert relative_error(ours, theirs) < EXACT
        for group in groups:
            check_slots(group, "slots")
        assert groups[0].kept().equal(groups[1].kept())


NEW = (40, 1, 1, 9, *[1] * 20)


def outputs(native: bool, plan: CachePlan, poisoned: int) -> Iterator[tuple[Tensor, HeadGroup]]:
    """Results of a layer whose first head gets a NaN key in one forward."""
    layer = HeadGroup(plan, table=None if plan.positions == "absolute" else Table(16))
    layer.protection = Protection(plan.sinks, (range(7, 9),), 4)
    kernels = NativeKernels(library.loaded()) if native else None
    seeded = torch.Generator().manual_seed(1)
    for number, new in enumerate(NEW):
        query, key, value = (torch.randn(1, heads, new, 16, generator=seeded) for heads in (4, 2, 2))
        if number == poisoned:
            key[:, 0, -1] = torch.nan
        yield attend(layer, query, key, value, LogitTransform(0.25), kernels=kernels), layer


@pytest.mark.skipif(bool(library.why_not()), reason="there is no compiled library")
@pytest.mark.every(4)
@pytest.mark.parametrize("policy", ["h2o", "h2o-paper", "tova", "random", "sink"])
@pytest.mark.parametrize("poisoned", [0, 1, 3])
@pytest.mark.parametrize("positions", ["gap", "absolute"])
def test_as_in_torch(policy: str, poisoned: int, positions: str) -> None:
    case = plan(policy, positions=positions)
    both = zip(outputs(True, case, poisoned), outputs(False, case, poisoned), strict=True)
    for number, ((native, layer), (eager, other)) in enumerate(both):
        assert not native[:, :, 2:].isnan().any(), "the other KV head"
        if number <= poisoned:
            assert torch.equal(native.isnan(), eager.isnan())
            assert native.isnan().any() == (number == poisoned)
        for one in (layer, other):
            kept = one.kept()
            assert all(set(range(7, 9)) <= set(kept[0, head].tolist()) for head in range(2))
            assert (kept[..., : case.sinks] == torch.arange(case.sinks)).all()
            assert (kept[..., -1] == one.tokens.lengths[0] - 1).all()
