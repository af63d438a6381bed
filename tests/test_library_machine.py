"""The library used at random: models attached side by side, native and eager, under any settings of torch.

Every operation is done to both of a pair; logits, tokens kept and refusals must agree.
``H2O_OPERATIONS=20000 make test-all ARGS=tests/test_library_machine.py`` does more of them.
"""

import copy
import os
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from h2o_stream import CacheConfig, H2OStreamError, attach
from h2o_stream.cache.audit import check_slots
from h2o_stream.cache.tolerance import error_of
from h2o_stream.native.abi import MatrixKind
from tests.fixtures import make_llama
from tests.native_builds import needs_library
from tests.test_native_boundary import default_dtype, run_all
from tests.test_packed import packed_model

pytestmark = needs_library

OPERATIONS = int(os.environ.get("H2O_OPERATIONS", "40"))
"""For each seed."""

EXACT, ROUNDED = 1e-3, 0.3
"""How far logits may be off, as a share of their rms: in float32; with rounded weights, keys or products."""

CONFIGS = {
    "h2o": CacheConfig("h2o", window=24, chunk=8),
    "absolute": CacheConfig("h2o", window=16, positions="absolute"),
    "8 bits": CacheConfig("h2o", window=24, kv_bits=8, chunk=8),
    "tova": CacheConfig("tova", window=16, chunk=5),
    "recent": CacheConfig("recent", window=12, chunk=4),
}

SETTINGS: list[Callable[[], AbstractContextManager[Any]]] = [
    nullcontext, nullcontext, nullcontext, torch.inference_mode, torch.enable_grad, lambda: torch.device("meta"),
    lambda: default_dtype(torch.bfloat16), lambda: default_dtype(torch.float64),
]  # fmt: skip


class Pair:
    """A model and its copy, attached natively and eagerly."""

    def __init__(self, make: Callable[[], PreTrainedModel], config: CacheConfig, stack: ExitStack) -> None:
        model = make()
        self.models = model, copy.deepcopy(model)
        attached = [
            stack.enter_context(attach(model, config, engine=engine))
            for model, engine in zip(self.models, ("auto", "eager"), strict=True)
        ]
        self.native, self.eager = attached
        assert self.native.engine_note.startswith("native"), self.native.engine_note
        self.rows, self.saved = 1, None
        self.coarse = (
            config.kv_bits == 8
            or model.dtype != torch.float32
            or not isinstance(model.get_input_embeddings(), nn.Embedding)
        )
        self.rounded = self.coarse

    @property
    def caches(self) -> tuple[Any, Any]:
        return self.native, self.eager

    def both(self, do: Callable[[PreTrainedModel, Any], Any]) -> list[Any]:
        """What an operation gives for each of the two; a refusal is its text."""
        results: list[Any] = []
        for model, cache in zip(self.models, self.caches, strict=True):
            try:
                results.append(do(model, cache))
            except H2OStreamError as error:
                results.append(str(error))
        refused = [result for result in results if isinstance(result, str)]
        assert len(refused) in (0, 2) or self.rounded, results  # rounding decides what is still held
        assert not any("\n" in refusal for refusal in refused)
        return results

    def compare(self, results: list[Any]) -> None:
        if not isinstance(results[0], Tensor):
            assert results[0] == results[1] or self.rounded
            return
        assert results[0].dtype == results[1].dtype
        assert error_of(results[0].detach(), results[1].detach()) < (ROUNDED if self.rounded else EXACT)

    def check(self) -> None:
        for group in self.native.head_groups:
            if group.is_initialized:
                check_slots(group, "slots")
        assert self.native.seen_tokens == self.eager.seen_tokens
        assert self.native.counts() == self.eager.counts()
        if not self.rounded:
            for layer in range(2):
                assert self.native.kept(layer).equal(self.eager.kept(layer))

    def begin(self) -> None:
        """A new stream: what autocast has rounded is gone."""
        self.both(lambda model, cache: cache.reset())
        self.rounded, self.saved = self.coarse, None


class Machine:
    """Draws operations.

    Args:
        seed: of all that is drawn.
        stack: what is attached is left with it.
    """

    def __init__(self, seed: int, stack: ExitStack) -> None:
        self.random = random.Random(seed)
        makers = {
            "dense": make_llama,
            "grouped": lambda: make_llama(heads=2, groups=3, seed=1),
            "packed": lambda: packed_model(MatrixKind.INT8),
            "bfloat16": lambda: make_llama(seed=2).bfloat16(),
        }
        self.pairs = [
            Pair(makers[self.random.choice(["dense", "grouped"])], CONFIGS[name], stack)
            for name in self.random.sample(sorted(CONFIGS), 2)
        ]
        self.pairs.append(Pair(makers["packed"], CONFIGS["h2o"], stack))
        self.pairs.append(Pair(makers["bfloat16"], CONFIGS["recent"], stack))  # rounding decides on no eviction

    def ids(self, rows: int, count: int) -> Tensor:
        seeded = torch.Generator("cpu").manual_seed(self.random.randrange(2**31))
        dtype = self.random.choice([torch.int64, torch.int64, torch.int32])
        return torch.randint(3, 64, (rows, count), generator=seeded, device="cpu").to(dtype)

    def operate(self) -> str:
        pair = self.random.choice(self.pairs)
        names = [name for name in dir(self) if name.startswith("do_")]
        weights = [20 if name == "do_step" else 6 if name == "do_prompt" else 2 for name in names]
        name = self.random.choices(names, weights)[0]
        getattr(self, name)(pair)
        pair.check()
        return name

    def forward(self, pair: Pair, tokens: Tensor, mask: Tensor | None = None) -> None:
        setting = self.random.choice(SETTINGS)
        if pair.rows != len(tokens) or not pair.native.seen_tokens:
            pair.begin()
            pair.rows = len(tokens)

        def feed(model: PreTrainedModel, cache: Any) -> Tensor:
            with setting():
                return model(tokens, attention_mask=mask, past_key_values=cache).logits[:, -1]

        pair.compare(pair.both(feed))

    def do_step(self, pair: Pair) -> None:
        for _ in range(self.random.randrange(1, 12)):
            self.forward(pair, self.ids(pair.rows, 1))

    def do_prompt(self, pair: Pair) -> None:
        rows = self.random.choice([pair.rows, pair.rows, self.random.randrange(1, 4)])
        self.forward(pair, self.ids(rows, self.random.randrange(2, 40)))

    def do_padded_prompt(self, pair: Pair) -> None:
        rows, count = self.random.randrange(1, 4), self.random.randrange(4, 30)
        pair.begin()
        pair.rows = rows
        starts = torch.tensor([self.random.randrange(count - 1) for _ in range(rows)])
        mask = (torch.arange(count) >= starts[:, None]).long()
        self.forward(pair, self.ids(rows, count), mask)

    def do_reset(self, pair: Pair) -> None:
        pair.begin()

    def do_generate(self, pair: Pair) -> None:
        pair.begin()
        tokens, beams = self.ids(1, self.random.randrange(2, 20)).long(), self.random.choice([1, 1, 2])
        how = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "num_beams": beams}
        made = pair.both(lambda model, _: model.generate(tokens, attention_mask=torch.ones_like(tokens), **how))
        if not pair.coarse:
            assert made[0].equal(made[1])
        pair.begin()

    def do_autocast(self, pair: Pair) -> None:
        pair.rounded = True
        tokens = self.ids(pair.rows, self.random.choice([1, 1, 7]))

        def feed(model: PreTrainedModel, cache: Any) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(tokens, past_key_values=cache).logits[:, -1]
            assert logits.isfinite().all()
            return logits

        pair.both(feed)
        self.do_step(pair)
        pair.begin()

    def do_change_weights(self, pair: Pair) -> None:
        kind, factor = self.random.randrange(4), self.random.choice([0.9, 1.1])
        for model in pair.models:
            layer = model.model.layers[kind % 2]
            match kind:
                case 0:
                    layer.input_layernorm.weight.data.mul_(factor)
                case 1:
                    layer.input_layernorm._parameters["weight"] = nn.Parameter(layer.input_layernorm.weight * factor)
                case 2:
                    model.model.norm.weight.mul_(factor)
                case 3:
                    layer.post_attention_layernorm.weight.data = layer.post_attention_layernorm.weight.data * factor
        self.do_step(pair)
        for model in pair.models:  # so that weights stay of one size
            for name, weight in model.named_parameters():
                if "norm" in name:
                    weight.data.clamp_(0.8, 1.25)

    def do_functional_call(self, pair: Pair) -> None:
        tokens = self.ids(pair.rows, 1)
        scaled = {name: weight * 1.5 for name, weight in pair.models[0].named_parameters() if "norm" in name}
        pair.compare(
            pair.both(lambda model, cache: functional_call(model, scaled, (tokens,), {"past_key_values": cache}).logits)
        )

    def do_state(self, pair: Pair) -> None:
        saved = pair.both(lambda model, cache: cache.state_dict())
        if isinstance(saved[0], dict):
            pair.saved = saved, pair.rows, pair.rounded

    def do_load(self, pair: Pair) -> None:
        if pair.saved is None:
            return
        states, rows, rounded = pair.saved
        loaded = []
        for cache, state in zip(pair.caches, states, strict=True):
            try:
                loaded.append(cache.load_state_dict(state))
            except H2OStreamError as error:  # of other weights
                loaded.append(str(error))
        assert loaded[0] == loaded[1] or "another model" in str(loaded[0]) or "model" in str(loaded[0])
        if loaded == [None, None]:
            pair.rows, pair.rounded = rows, rounded
        elif None in loaded:
            pair.begin()

    def do_rows(self, pair: Pair) -> None:
        order = torch.tensor([self.random.randrange(pair.rows) for _ in range(self.random.randrange(1, 4))])
        pair.both(lambda model, cache: cache.reorder_cache(order))
        if pair.native.seen_tokens:
            pair.rows = len(order)

    def do_protect(self, pair: Pair) -> None:
        start = self.random.randrange(12)
        name = self.random.choice(["pin", "evict_first", "unpin"])
        pair.compare(pair.both(lambda model, cache: getattr(cache, name)(start, start + 3)))
        if name == "pin":
            pair.both(lambda model, cache: cache.unpin())

    def do_two_threads(self, pair: Pair) -> None:
        """Another thread uses the native model at the same time."""
        pair.begin()
        pair.rows, tokens, errors = 1, [self.ids(1, 1) for _ in range(20)], list[str]()

        def feed() -> None:
            with torch.no_grad():
                for token in tokens:
                    try:
                        pair.models[0](token, past_key_values=pair.native)
                    except H2OStreamError as error:
                        errors.append(str(error))

        run_all(feed, feed)
        assert all("another thread" in error for error in errors)
        assert pair.native.seen_tokens + len(errors) == 40
        pair.begin()

    def do_two_models(self, pair: Pair) -> None:
        """Every pair is used in a thread of its own."""

        def feed(one: Pair, tokens: list[Tensor]) -> None:
            with torch.no_grad():
                for token in tokens:
                    one.compare(one.both(lambda model, cache: model(token, past_key_values=cache).logits))  # noqa: B023

        run_all(*(partial(feed, one, [self.ids(one.rows, 1) for _ in range(6)]) for one in self.pairs))

    def do_without_a_cache(self, pair: Pair) -> None:
        tokens = self.ids(2, 9)
        pair.compare(pair.both(lambda model, cache: model(tokens, use_cache=False).logits))

    def do_wrong_calls(self, pair: Pair) -> None:
        wrong: list[Callable[[PreTrainedModel, Any], Any]] = [
            lambda model, cache: model(torch.ones(pair.rows, 1), past_key_values=cache),
            lambda model, cache: model(torch.full((pair.rows, 1), 10**6), past_key_values=cache),
            lambda model, cache: model(torch.full((pair.rows, 1), -1, dtype=torch.int32), past_key_values=cache),
            lambda model, cache: copy.deepcopy(model),
            lambda model, cache: model(self.ids(5, 3), past_key_values=cache),
        ]
        chosen = self.random.choice(wrong)
        before = pair.native.seen_tokens
        if not before:
            return
        for model, cache in zip(pair.models, pair.caches, strict=True):
            with pytest.raises((H2OStreamError, TypeError, RuntimeError, IndexError)):
                chosen(model, cache)
            assert not cache.torn
            assert cache.seen_tokens == before


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (1, 2))])
def test_any_use(seed: int) -> None:
    with ExitStack() as stack:
        machine = Machine(seed, stack)
        done: list[str] = []
        try:
            while len(done) < OPERATIONS:
                done.append(machine.operate())
        except BaseException as error:
            error.add_note(f"after {len(done)} operations, the last of them {done[-8:]}")
            raise
