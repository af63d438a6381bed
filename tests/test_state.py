"""A saved cache continues as if it had never stopped."""

import random
import zlib
from collections.abc import Callable
from contextlib import suppress
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from h2o_stream import CacheConfig, H2OStreamError, attach
from h2o_stream.cache.arrays import to_arrays, to_tensors
from h2o_stream.cache.state import FINGERPRINT, checksummed, decode_json, encode_json
from h2o_stream.config import POLICIES
from tests.disturbances import interrupted
from tests.families import each_family
from tests.fixtures import ids, make_llama, thinned, with_exhaustive
from tests.states import with_checksums

TOKENS = ids(80, 2)


def going_on(model: Any, cache: Any) -> torch.Tensor:
    """Decode steps, a prefill and more steps: the logits."""
    chunks = TOKENS[:, 40:].split([1, 1, 1, 20, 1, 1, 15], 1)
    return torch.cat([model(part, past_key_values=cache).logits for part in chunks], 1)


@pytest.mark.every(2)
@pytest.mark.parametrize(("policy", "kv_bits"), thinned(
    product(POLICIES, [16, 4]), lambda policy, kv_bits: (kv_bits == 4) == (policy in ("h2o", "tova"))
))  # fmt: skip
def test_it_continues_bit_for_bit(tmp_path: Path, grouped: LlamaForCausalLM, policy: str, kv_bits: int) -> None:
    config = CacheConfig(policy, window=24, chunk=8, kv_bits=16 if policy == "full" else kv_bits)
    mask = torch.ones(2, 40).index_fill(1, torch.arange(9), 0).logical_or(torch.tensor([[True], [False]])).long()
    with attach(grouped, config) as cache:
        cache.pin(6, 9)
        grouped(TOKENS[:, :40], attention_mask=mask, past_key_values=cache)
        cache.evict_first(22, 30)
        cache.evict_first(90, 95)
        save_file(cache.state_dict(), tmp_path / "state.safetensors")
        expected, seen = going_on(grouped, cache), cache.seen_tokens
    with attach(grouped, config) as cache:
        cache.evict_first(3, 4)
        cache.load_state_dict(load_file(tmp_path / "state.safetensors"))
        assert cache.transient == (() if policy == "full" else (range(22, 30), range(90, 95)))
        assert going_on(grouped, cache).equal(expected)
        assert cache.seen_tokens == seen
        if policy != "full":
            assert cache.pins == (range(6, 9),)


@pytest.mark.parametrize("kv_bits", [16, 4])
def test_it_costs_what_its_tokens_cost(grouped: LlamaForCausalLM, kv_bits: int) -> None:
    with attach(grouped, CacheConfig(window=60, chunk=8, kv_bits=kv_bits)) as cache:
        grouped(TOKENS[:, :20], past_key_values=cache)
        short = cache.state_dict()
        first = going_on(grouped, cache)
        full = cache.state_dict()
        assert sum(x.nbytes for x in short.values()) < 0.7 * sum(x.nbytes for x in full.values())
        assert short["1.index"].shape[-1] < 25 < 60 <= full["1.index"].shape[-1]
        cache.load_state_dict(short)
        assert going_on(grouped, cache).equal(first)


@each_family
def test_every_family(family: Any) -> None:
    model = family.make()
    with attach(model, CacheConfig(window=12, positions=family.positions[0], chunk=5)) as cache:
        model(TOKENS[:, :40], past_key_values=cache)
        state = cache.state_dict()
        first = going_on(model, cache)
        for _ in range(2):  # a state is a copy
            cache.load_state_dict(state)
            assert going_on(model, cache).equal(first)


@pytest.mark.parametrize("settings", [{"window": 24}, {"window": 40, "kv_bits": 6}])
def test_a_window_that_chose_itself_is_that_of_the_saved_stream(
    grouped: LlamaForCausalLM, settings: dict[str, Any]
) -> None:
    """Another version, or less free memory, may have chosen another one; and a stream of 0.2 may have had a memory."""
    with attach(grouped, CacheConfig(**settings, chunk=8)) as cache:
        grouped(TOKENS[:, :40], past_key_values=cache)
        state, expected = to_arrays(cache.state_dict()), going_on(grouped, cache)
    fingerprint = decode_json(state, FINGERPRINT)
    fingerprint["policy"]["memory"] = True
    saved = checksummed(state | {FINGERPRINT: encode_json(fingerprint), "memory.counts": state["progress"]})
    with attach(grouped, CacheConfig(auto_window=1, chunk=8)) as cache:
        cache.load_state_dict(to_tensors(saved))
        assert (cache.plan.window, cache.plan.kv_bits) == (settings["window"], settings.get("kv_bits", 16))
        assert going_on(grouped, cache).equal(expected)


def test_ratios_are_those_of_the_saved_stream(tiny: LlamaForCausalLM) -> None:
    config = CacheConfig("h2o-paper", heavy_ratio=0.25, recent_ratio=0.25)
    with attach(tiny, config) as cache:
        tiny(TOKENS[:, :40], past_key_values=cache)
        state = cache.state_dict()
    with attach(tiny, config) as cache:
        cache.load_state_dict(state)
        assert (cache.plan.heavy, cache.plan.recent) == (10, 10)
        tiny(TOKENS[:, 40:41], past_key_values=cache)
        assert cache.kept().shape[-1] == 20


class TestRefused:
    def state(self, model: Any, **settings: Any) -> dict[str, torch.Tensor]:
        with attach(model, CacheConfig(**{"window": 24, **settings})) as cache:
            model(TOKENS[:, :40], past_key_values=cache)
            return cache.state_dict()

    @pytest.mark.parametrize(("other", "settings", "words"), [
        (make_llama(seed=1), {}, "another model"), (make_llama().bfloat16(), {}, "another"),
        *((make_llama(), {name: value}, "another policy")
          for name, value in (("window", 25), ("policy", "tova"), ("kv_bits", 4), ("decay", 0.5))),
    ])  # fmt: skip
    def test_another_model_or_policy(self, other: Any, settings: Any, words: str) -> None:
        state = self.state(make_llama())
        with (
            attach(other, CacheConfig(**{"window": 24, **settings})) as cache,
            pytest.raises(H2OStreamError, match=words),
        ):
            cache.load_state_dict(state)

    @pytest.mark.parametrize("policy", ["h2o", "full"])
    @pytest.mark.parametrize("what", ["fingerprint", "1.keys", "progress", "checksums"])
    def test_an_incomplete_state(self, tiny: LlamaForCausalLM, policy: str, what: str) -> None:
        state = self.state(tiny, policy=policy)
        del state[what]
        words = "an older version" if what == "checksums" else None
        with attach(tiny, CacheConfig(policy, window=24)) as cache, pytest.raises(H2OStreamError, match=words):
            cache.load_state_dict(state)

    @pytest.mark.parametrize("policy", ["h2o", "full"])
    def test_a_torn_cache_has_no_state(self, tiny: LlamaForCausalLM, policy: str) -> None:
        """Until a complete state is loaded."""
        state = self.state(tiny, policy=policy)
        with attach(tiny, CacheConfig(policy, window=24)) as cache:
            cache.torn = True
            with pytest.raises(H2OStreamError, match="cut off halfway"):
                cache.state_dict()
            with pytest.raises(H2OStreamError):
                cache.load_state_dict({**state, "progress": torch.tensor([-1, 7])})
            assert cache.torn
            cache.load_state_dict(state)
            assert not cache.torn
            assert equal(cache.state_dict(), state)

    @pytest.mark.parametrize("change", with_exhaustive(["pin", "unpin", "evict_first", "reset"], ["load_state_dict"]))
    def test_a_change_cut_off_at_any_line_is_torn_or_did_not_happen(self, tiny: LlamaForCausalLM, change: str) -> None:
        """Regression: a window that grew for a pin had a plan that its heads did not follow."""
        arguments = {"unpin": (), "load_state_dict": (self.state(tiny, chunk=8),), "reset": ()}.get(change, (49, 70))
        with attach(tiny, CacheConfig(window=24, chunk=8)) as cache:

            def state() -> dict[str, torch.Tensor]:
                return cache.state_dict() if cache.seen_tokens else {}

            tiny(TOKENS[:1, :50], past_key_values=cache)
            if change == "unpin":
                cache.pin(49, 70)
            before = state()
            getattr(cache, change)(*arguments)
            after, done = state(), False
            for line in count(1, 11):
                cache.load_state_dict(before)
                with suppress(KeyboardInterrupt), interrupted(line, ("cache",)):
                    getattr(cache, change)(*arguments)
                    done = True
                assert cache.torn or equal(state(), before) or equal(state(), after)
                if done:
                    break
            assert line > 20

    @pytest.mark.parametrize("policy", ["h2o", "full"])
    def test_an_empty_cache_has_no_state(self, tiny: LlamaForCausalLM, policy: str) -> None:
        with attach(tiny, CacheConfig(policy, window=24)) as cache, pytest.raises(H2OStreamError, match="empty"):
            cache.state_dict()


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


def flipped(tensor: torch.Tensor, drawn: random.Random) -> torch.Tensor:
    bytes_ = tensor.flatten().view(torch.uint8)
    bytes_[drawn.randrange(len(bytes_))] ^= 1 << drawn.randrange(8)
    return tensor


def filled(tensor: torch.Tensor, drawn: random.Random) -> torch.Tensor:
    values = [-1, 0, 1, 2**31 - 1, -(2**31)]
    if tensor.dtype == torch.int64:
        values += [2**63 - 1, -(2**63)]
    elif tensor.is_floating_point():
        values = [torch.inf, torch.nan, -1.0, 0.0]
    return tensor.fill_(0 if tensor.dtype == torch.uint8 else drawn.choice(values))


HARMS: list[Callable[[torch.Tensor, random.Random], Any]] = [
    flipped, flipped, filled,
    lambda tensor, drawn: tensor.narrow(axis := drawn.randrange(tensor.dim()), 0, tensor.shape[axis] - 1),
    lambda tensor, drawn: torch.cat((tensor, tensor), drawn.randrange(tensor.dim())),
    lambda tensor, drawn: tensor.flip(drawn.randrange(tensor.dim())),
    lambda tensor, drawn: tensor.to(drawn.choice([torch.float16, torch.int32, torch.bool, torch.float64])),
    lambda tensor, drawn: tensor.flatten(), lambda tensor, drawn: tensor.flatten()[:0],
    lambda tensor, drawn: tensor.sum(), lambda tensor, drawn: [1, 2],
]  # fmt: skip
"""Possible corruptions of a state's tensor."""


@pytest.mark.every(3)
@pytest.mark.parametrize("resealed", [False, True], ids=["damaged", "with checksums that fit"])
@pytest.mark.parametrize(
    "settings",
    [{"kv_bits": 4, "budgets": "equal"}, {"policy": "full"}, {"positions": "absolute", "policy": "tova"}, {}],
)
def test_damaged_states(grouped: LlamaForCausalLM, settings: Any, resealed: bool) -> None:
    """Each is refused in one line and changes nothing, or leaves the stream the same.

    With valid checksums, other numbers can be another stream, which continues normally.
    """
    drawn = random.Random(str(settings))
    with attach(grouped, CacheConfig(**{"window": 24, "chunk": 8, **settings})) as cache:
        cache.pin(6, 9)
        cache.evict_first(20, 30)
        grouped(TOKENS[:, :40], past_key_values=cache)
        state = cache.state_dict()
        names = [name for name in state if name != "checksums"]
        refused = 0
        for _ in range(20):
            harmed: dict[str, Any] = {name: tensor.clone() for name, tensor in state.items()}
            name, other = drawn.choice(names), drawn.choice(names)
            harm = drawn.choice([None, None, *HARMS])
            if harm is None:
                harmed[name], harmed[other] = harmed[other], harmed[name]
            else:
                harmed[name] = harm(harmed[name], drawn)
            if resealed:
                tensors = {name: tensor for name, tensor in harmed.items() if isinstance(tensor, torch.Tensor)}
                del tensors["checksums"]
                harmed = with_checksums(tensors)
            line = None
            try:
                cache.load_state_dict(harmed)
            except H2OStreamError as error:
                line = str(error)
            assert line is None or "\n" not in line
            assert (resealed and line is None) or equal(cache.state_dict(), state)
            refused += line is not None
            if line is None:
                going_on(grouped, cache)
                cache.load_state_dict(state)
        assert refused > (5 if resealed else 15)


def test_checksums_are_those_of_earlier_versions() -> None:
    """They begin with what torch says of a tensor."""
    tensors = {
        "bfloat16": torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16), "float16": torch.ones(3, 1).half(),
        "int64": torch.tensor(7), "uint8": torch.arange(3, dtype=torch.uint8), "int16": torch.empty(0).short(),
        "float32": torch.rand(2, 3).T,
    }  # fmt: skip
    for name, crc in decode_json(checksummed(to_arrays(tensors)), "checksums").items():
        tensor = tensors[name]
        data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        assert crc == zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + data)


def storages(held: Any) -> dict[int, int]:
    """Sizes in bytes of the storages referenced by these objects' tensor attributes, by address."""
    named = [pair for one in held for pair in vars(one).items() if pair[0] != "heads"]  # only head indices
    tensors = [value for _, value in named if isinstance(value, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_bits", [16, 8, 4, None])
def test_bytes_are_what_is_really_held(grouped: LlamaForCausalLM, dtype: torch.dtype, kv_bits: int | None) -> None:
    """After a prompt, steps, copied rows and a loaded state; None is the full cache."""
    config = CacheConfig(window=24, chunk=8, kv_bits=kv_bits) if kv_bits else CacheConfig("full")
    model = grouped.to(dtype)

    def check(cache: Any) -> None:
        held = cache.layers if kv_bits is None else [x for group in cache.head_groups for x in (group, group.store)]
        assert sum(storages(held).values()) == cache.nbytes

    with attach(model, config) as cache:
        model(TOKENS[:, :40], past_key_values=cache)
        check(cache)
        model(TOKENS[:, 40:41], past_key_values=cache)
        check(cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        check(cache)
        cache.batch_repeat_interleave(2)
        check(cache)
        cache.load_state_dict(cache.state_dict())
        check(cache)
