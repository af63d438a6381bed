"""Native steps against eager ones: the same tokens, logits and evictions in every configuration."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from h2o_stream import CacheConfig, attach
from h2o_stream.cache.attention import LogitTransform
from h2o_stream.cache.audit import check_slots
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.policies import make_policy
from h2o_stream.cache.policies.accumulated import Accumulated
from h2o_stream.cache.rotations import Rotations
from h2o_stream.errors import H2OStreamError
from h2o_stream.native import library
from h2o_stream.native.kernels import make_kernels
from h2o_stream.native.model_guard import ModelGuard
from h2o_stream.native.slots import POLICIES
from tests.families import DIFFERENT, FAMILIES, RULES, Family, config_of, pairs
from tests.fixtures import make_llama, thinned, with_exhaustive
from tests.slots import attend
from tests.tolerance import relative_error

pytestmark = pytest.mark.skipif(library.loaded() is None, reason="there is no compiled library")

EXACT = 1e-4
"""Largest float32 difference relative to the RMS of the logits."""


def exact(family: Family) -> float:
    """`EXACT`, or more where a norm amplifies the rounding of outputs that nearly cancel, in transformers as here."""
    return 5 * EXACT if "delta rule" in family.special else EXACT


PROMPT = 30

NATIVE = {name: rule for name, rule in RULES.items() if make_policy(CacheConfig(name).plan()).rule in POLICIES}
"""The policies that the library implements."""


def tokens_of(rows: int, count: int) -> Tensor:
    return torch.randint(3, 64, (rows, count), generator=torch.Generator().manual_seed(rows))


def streamed(model: Any, cache: Any, tokens: Tensor, mask: Tensor | None = None) -> tuple[Tensor, list[Any]]:
    """Logits [B, n, V] of single tokens after a prompt in a new stream, and the tokens each layer keeps."""
    cache.reset()
    width = PROMPT if mask is None else mask.shape[1]
    model(tokens[:, :width], attention_mask=mask, past_key_values=cache)
    steps = [model(part, past_key_values=cache).logits for part in tokens[:, width:].split(1, 1)]
    return torch.cat(steps, 1), [cache.kept(layer).tolist() for layer in range(len(cache.layers))]


def run_all(
    model: Any, config: CacheConfig, batches: Sequence[Tensor], engine: Any, mask: Tensor | None = None
) -> list[tuple[Tensor, list[Any]]]:
    """A stream of each batch through one cache."""
    with torch.no_grad(), attach(model, config, engine=engine) as cache:
        assert cache.engine_note.startswith("native" if engine == "auto" else "eager"), cache.engine_note
        return [streamed(model, cache, tokens, mask) for tokens in batches]


def run(model: Any, config: CacheConfig, tokens: Tensor, engine: Any) -> tuple[Tensor, list[Any]]:
    return run_all(model, config, [tokens], engine)[0]


def assert_same(
    model: Any, config: CacheConfig, *batches: Tensor, mask: Tensor | None = None, largest: float = EXACT
) -> None:
    both = (run_all(model, config, batches, engine, mask) for engine in ("auto", "eager"))
    for (ours, kept), (theirs, wanted) in zip(*both, strict=True):
        assert relative_error(ours, theirs) < largest
        assert kept == wanted


@pytest.mark.every(2)
@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["", "positions"])
@pytest.mark.parametrize(("number", "policy"), thinned(
    [pair.values for pair in pairs(NATIVE) if FAMILIES[pair.values[0]].native],
    lambda number, policy: FAMILIES[number].name == DIFFERENT[[*NATIVE].index(policy) % 2],
))  # fmt: skip
def test_every_family_and_policy(number: int, policy: str, others: bool) -> None:
    """Rows 1, then 3, then 1 again, with the default positions or with all others.

    `make test` takes those of the other families in the tests of native prompts and of the oracle.
    """
    family = FAMILIES[number]
    for positions in family.positions[1:] if others else family.positions[:1]:
        if positions == "absolute" and "LongRoPE" in family.name:
            continue  # its frequencies depend on the text's length, so it runs eagerly
        batches = [tokens_of(rows, PROMPT + 12) for rows in (1, 3, 1)]
        assert_same(family.make(), config_of(family, policy, 8, positions), *batches, largest=exact(family))


@pytest.mark.parametrize(
    ("side", "kv_bits"), with_exhaustive([("left", 8), ("right", 16)], [("left", 16), ("right", 8)])
)
def test_padded_batches(side: str, kv_bits: int) -> None:
    mask = torch.ones(4, PROMPT, dtype=torch.int64)
    for row, padding in enumerate((0, 3, 17, 25)):
        mask[row, slice(0, padding) if side == "left" else slice(PROMPT - padding, PROMPT)] = 0
    config = CacheConfig(window=24, chunk=8, kv_bits=kv_bits)
    rounding = EXACT if kv_bits == 16 else 2e-2  # a key halfway between two levels may round either way
    assert_same(make_llama(), config, tokens_of(4, PROMPT + 40), mask=mask, largest=rounding)


@pytest.mark.every(3)
@pytest.mark.parametrize(("kv_bits", "positions"), thinned(
    product((8, 6, 4, 2), ("gap", "rolling", "absolute")),
    lambda bits, positions: positions == {8: "rolling", 2: "absolute"}.get(bits, "gap"),
))  # fmt: skip
def test_few_bits(kv_bits: int, positions: Any) -> None:
    config = CacheConfig(window=32, kv_bits=kv_bits, positions=positions, long_term=2.0)
    assert_same(make_llama(), config, *(tokens_of(rows, PROMPT + 20) for rows in (1, 2)), largest=2e-2)


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
    assert_same(scaled, CacheConfig(window=48, kv_bits=kv_bits), tokens_of(2, PROMPT + 50), largest=rounding)


@pytest.mark.parametrize("groups", [3, 6])
def test_fixed_point(monkeypatch: pytest.MonkeyPatch, groups: int) -> None:
    """Attention to keys of 8 bits loses little beside their own rounding, of large keys too."""
    model = make_llama(heads=1, size=64, groups=groups, layers=1, context=4096)
    keys = model.model.layers[0].self_attn.k_proj.weight.data
    keys *= 0.2
    keys[[5, 40]] *= 10
    config, tokens = CacheConfig(window=300, kv_bits=8), tokens_of(1, PROMPT + 200)
    ours, _ = run(model, config, tokens, "auto")
    monkeypatch.setattr(Rotations, "codes", lambda *_: None)
    floats, _ = run(model, config, tokens, "auto")
    exactly, _ = run(model, CacheConfig(window=300), tokens, "auto")
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
    model(tokens_of(1, PROMPT))
    hook.remove()
    assert gates[0].min() < -50
    assert gates[0].max() > 50
    assert_same(model, CacheConfig(window=32), tokens_of(1, PROMPT + 40))


def test_windows_by_head_that_grow_and_shrink() -> None:
    batches = [tokens_of(rows, PROMPT + 90) for rows in (1, 3)]
    assert_same(make_llama(), CacheConfig(window=32, budgets="measured"), *batches)


def test_pins_in_the_middle_of_a_stream() -> None:
    model, kept = make_llama(), []
    for engine in ("auto", "eager"):
        with torch.no_grad(), attach(model, CacheConfig(window=32), engine=engine) as cache:
            tokens = tokens_of(1, 120)
            model(tokens[:, :20], past_key_values=cache)
            cache.pin(5, 12)
            for part in tokens[:, 20:].split(1, 1):
                model(part, past_key_values=cache)
            kept.append(cache.kept(1).tolist())
    assert kept[0] == kept[1]
    assert all(set(range(5, 12)) <= set(head) for head in kept[0][0])


def test_a_stream_continues_with_another_engine() -> None:
    model, tokens = make_llama(), tokens_of(1, 80)
    config = CacheConfig(window=24)
    whole, _ = run(model, config, tokens, "eager")
    with torch.no_grad(), attach(model, config) as cache:
        model(tokens[:, :PROMPT], past_key_values=cache)
        first = [model(part, past_key_values=cache).logits for part in tokens[:, PROMPT:50].split(1, 1)]
        state = cache.state_dict()
    with torch.no_grad(), attach(model, config, engine="eager") as cache:
        cache.load_state_dict(state)
        rest = [model(part, past_key_values=cache).logits for part in tokens[:, 50:].split(1, 1)]
    assert relative_error(torch.cat([*first, *rest], 1), whole) < EXACT


def test_bfloat16_is_as_near_to_float32_as_transformers_is() -> None:
    exact = make_llama()
    model, config, tokens = copy.deepcopy(exact).bfloat16(), CacheConfig(window=64), tokens_of(4, PROMPT + 30)
    wanted, _ = run(exact, config, tokens, "eager")
    ours, theirs = (run(model, config, tokens, engine)[0].float() - wanted for engine in ("auto", "eager"))
    assert ours.norm() < 1.2 * theirs.norm() < 0.5 * wanted.norm()


@pytest.mark.parametrize("threads", with_exhaustive([3], [1, 2, 5]))
def test_results_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    model, before, results = make_llama(), torch.get_num_threads(), []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            results.append(run(model, CacheConfig(window=80), tokens_of(2, PROMPT + 90), "auto")[0])
    finally:
        torch.set_num_threads(before)
    assert relative_error(*results) < EXACT  # the prompt runs in torch, whose results depend on it


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


def test_a_model_that_computes_something_else_fails_verification() -> None:
    """Its modules have a Llama's names, but its forward does more."""

    class Twice(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.weight, self.variance_epsilon, self.calls = norm.weight, norm.variance_epsilon, 0
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.norm(x) if x.dim() == 2 else self.norm(x) * 1.5

    Twice.__module__ = "transformers.models.llama.modeling_llama"
    model = copy.deepcopy(make_llama())
    model.model.norm = Twice(model.model.norm)
    with attach(model, CacheConfig(window=24)) as cache:
        assert cache.engine_note.startswith("eager"), cache.engine_note


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


def test_a_step_that_is_cut_off_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = make_llama(), tokens_of(1, 40)

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with torch.no_grad(), attach(model, CacheConfig(window=24)) as cache:
        model(tokens[:, :20], past_key_values=cache)
        with monkeypatch.context() as patched:
            patched.setattr(library.loaded(), "h2o_step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model(tokens[:, 20:21], past_key_values=cache)
        with pytest.raises(H2OStreamError, match="cut off"):
            model(tokens[:, 21:22], past_key_values=cache)
        cache.reset()
        model(tokens[:, :20], past_key_values=cache)
        model(tokens[:, 20:21], past_key_values=cache)
        assert cache.seen_tokens == 21


@pytest.mark.parametrize("token", [-1, 64, 2**40])
def test_a_token_that_does_not_exist_is_refused(token: int) -> None:
    model = make_llama()
    with torch.no_grad(), attach(model, CacheConfig(window=24)) as cache:
        model(tokens_of(1, 20), past_key_values=cache)
        with pytest.raises(IndexError):
            model(torch.tensor([[token]]), past_key_values=cache)


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
