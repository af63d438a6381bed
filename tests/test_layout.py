"""Where the slots' tensors are stored and which code works on them, as native code requires."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from h2o_stream import CacheConfig, attach
from h2o_stream.cache.audit import audit
from h2o_stream.cache.eager import EagerKernels
from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.windows import HeadWindow
from tests.fixtures import ids, make_llama
from tests.in_turn import in_turn

WINDOW = 24
GROUPS = (
    (HeadWindow((0, 1, 2), 1.1),),
    (HeadWindow((0, 2), 0.5), HeadWindow((1,), 2.0)),
    (HeadWindow((0, 2), 1.0), HeadWindow((1,), 0.7)),
)
"""Three layers of three KV heads: windows that grow, that shrink (losing many slots over a few tokens), that stay."""


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> LlamaForCausalLM:
    """A model whose heads are grouped as in `GROUPS`."""

    def grouped(model: Any, specs: Any, progress: Any) -> Any:
        return [replace(spec, windows=groups) for spec, groups in zip(specs, GROUPS, strict=True)]

    monkeypatch.setattr("h2o_stream.attachment.attach.give_retrieval_heads_more", grouped)
    return make_llama(heads=3, groups=2, layers=3, context=256)


def addresses(cache: H2OCache) -> list[int]:
    return [tensor.data_ptr() for group in cache.head_groups for tensor in group.tensors().values()]


class TestAddresses:
    @in_turn("policy, kv_bits", [("h2o", 2), ("h2o-paper", 8), ("tova", 16), ("random", 8), ("recent", 16)])
    def test_they_stay_while_the_layout_does(self, model: LlamaForCausalLM, policy: str, kv_bits: int) -> None:
        """Through prompts, single tokens, windows that change size and rows that change places."""
        config = CacheConfig(policy, WINDOW, chunk=7, kv_bits=kv_bits)
        with attach(model, config) as cache:
            model(ids(9, 2), past_key_values=cache)
            layouts, before = [cache.revision], addresses(cache)
            for number, part in enumerate(ids(100, 2, seed=1).split([3, *[1] * 40, 20, *[1] * 30, 7], 1)):
                if number % 10 == 5:
                    cache.reorder_cache(torch.tensor([1, 0]))
                model(part, past_key_values=cache)
                if cache.revision == layouts[-1]:
                    assert addresses(cache) == before
                else:
                    layouts.append(cache.revision)
                    before = addresses(cache)
            stages = max(len(layer.schedule.stages) for layer in cache.head_groups)
            assert len(layouts) <= 1 + 2 * stages, "some heads grow when a stage ends, the others shrink a token later"
            assert cache.steady
            for layer in cache.head_groups:
                assert layer.store.slots == layer.schedule.window + (1 if kv_bits == 16 else 2)

    def test_what_changes_the_layout(self, model: LlamaForCausalLM) -> None:
        with attach(model, CacheConfig("h2o", WINDOW)) as cache:
            model(ids(60, 2), past_key_values=cache)
            state = cache.state_dict()

            def grows(change: Callable[[], Any]) -> bool:
                before = cache.revision
                change()
                return cache.revision > before

            assert not grows(lambda: model(ids(1, 2), past_key_values=cache))
            assert not grows(lambda: model(ids(30, 2), past_key_values=cache))
            assert not grows(lambda: cache.reorder_cache(torch.tensor([1, 1])))
            assert not grows(cache.counts)
            assert grows(lambda: cache.batch_select_indices(torch.tensor([0])))
            assert grows(lambda: cache.batch_repeat_interleave(3))
            assert grows(lambda: cache.pin(200, 202))
            assert grows(cache.unpin)
            assert grows(lambda: setattr(cache.head_groups[0], "watch", lambda *_: None))
            assert grows(cache.reset)
            assert grows(lambda: cache.load_state_dict(state))
            assert grows(lambda: model(ids(5)))

    def test_pins_that_go_before_the_window_is_full_make_room(self, model: LlamaForCausalLM) -> None:
        """Budgets are reassigned: growing windows grow further."""
        tokens = ids(90)
        with attach(model, CacheConfig("h2o", WINDOW)) as cache:
            cache.pin(0, 10)
            model(tokens[:, :12], past_key_values=cache)
            before = [layer.schedule.window for layer in cache.head_groups]
            cache.unpin()
            assert any(layer.schedule.window > window for layer, window in zip(cache.head_groups, before, strict=True))
            got = [model(token, past_key_values=cache).logits for token in tokens[:, 12:].split(1, 1)]
            audit(cache.evicting_groups)
        with attach(model, CacheConfig("h2o", WINDOW)) as cache:
            model(tokens[:, :12], past_key_values=cache)
            wanted = [model(token, past_key_values=cache).logits for token in tokens[:, 12:].split(1, 1)]
        torch.testing.assert_close(torch.cat(got), torch.cat(wanted), rtol=1e-4, atol=1e-4)


class TestSingleTokens:
    def test_they_never_take_the_way_of_a_prompt(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rows of different lengths with windows of different sizes: every row gives the same result as alone."""
        lengths, steps, config = (5, 22, 41), 50, CacheConfig("h2o", WINDOW)
        tokens, fed = ids(41, 3), ids(steps, 3, seed=1)
        mask = torch.stack([torch.arange(41) >= 41 - length for length in lengths]).long()

        def run(rows: slice, prompt: Tensor, **more: Any) -> tuple[Tensor, list[list[int]], list[Tensor]]:
            with attach(model, config) as cache, monkeypatch.context() as patch:
                model(prompt, past_key_values=cache, **more)
                patch.setattr(EagerKernels, "prefill", None)
                logits, evictions = [], []
                for token in fed[rows].split(1, 1):
                    counts = [group.schedule.num_evictions for group in cache.head_groups]
                    evictions += [[*map(count, cache.tokens.lengths)] for count in counts]
                    logits.append(model(token, past_key_values=cache).logits)
                return torch.cat(logits, 1), evictions, [cache.kept(layer) for layer in range(3)]

        together, evictions, kept = run(slice(0, 3), tokens * mask, attention_mask=mask)
        assert any(len(set(rows)) > 1 for rows in evictions), "rows differ"
        assert max(max(rows) for rows in evictions) > 2, "some tokens evict many"
        for row, length in enumerate(lengths):
            alone, _, held = run(slice(row, row + 1), tokens[row : row + 1, 41 - length :])
            torch.testing.assert_close(together[row], alone[0], rtol=1e-3, atol=2e-4)
            for layer in range(3):
                mine = kept[layer][row]
                assert mine[mine >= 0].tolist() == held[layer][0][held[layer][0] >= 0].tolist()

    def test_what_is_held_at_every_step(self, model: LlamaForCausalLM) -> None:
        with attach(model, CacheConfig("h2o", WINDOW)) as cache:
            model(ids(3), past_key_values=cache)
            for token in ids(70, seed=1).split(1, 1):
                model(token, past_key_values=cache)
                audit(cache.evicting_groups)


@pytest.mark.parametrize("kv_bits", [16, 8, 4, 2])
def test_compacting_moves_and_changes_nothing(model: LlamaForCausalLM, kv_bits: int) -> None:
    with attach(model, CacheConfig("h2o", WINDOW, kv_bits=kv_bits, budgets="equal")) as cache:
        model(ids(60, 2), past_key_values=cache)
        layer = cache.head_groups[0]
        before, kept = by_token(layer), layer.kept()
        layer.resize(layer.store.slots + 9, layer.held)
        assert by_token(layer) == before
        layer.fit(cache.tokens.lengths)
        assert layer.store.slots == WINDOW + (1 if kv_bits == 16 else 2)
        assert by_token(layer) == before
        assert layer.kept().equal(kept)
        assert (layer.index.gather(-1, layer.free) < 0).all()
        model(ids(30, 2), past_key_values=cache)


def by_token(layer: HeadGroup) -> dict[tuple[int, int, int], Any]:
    """Each kept token's bookkeeping, and every bit of its key and value."""
    exact, found = layer.store.exact, {}
    keys, values = layer.store.read()
    tensors = layer.tensors()
    for row, head, slot in (layer.index >= 0).nonzero().tolist():
        place = (row, head, slot)
        codes = []
        if exact and slot >= exact:
            stored = (tensors[name] for name in ("key_codes", "value_codes", "value_grid"))
            codes = [tensor[row, head, slot - exact].tolist() for tensor in stored]
        books = [float(tensors[name][place]) for name in ("scores", "long_term_scores", "rank") if name in tensors]
        found[row, head, int(layer.index[place])] = (books, codes, keys[place].tolist(), values[place].tolist())
    return found


class Recording(EagerKernels):
    """Kernels that behave like the eager ones."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def decode(self, *args: Any) -> Tensor:
        self.calls.append("decode")
        return super().decode(*args)

    def prefill(self, *args: Any) -> Tensor:
        self.calls.append("prefill")
        return super().prefill(*args)


class TestKernels:
    @pytest.fixture
    def kernels(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
        made = Recording()
        monkeypatch.setattr("h2o_stream.native.kernels.make_kernels", lambda: made)
        monkeypatch.setattr("h2o_stream.attachment.native_steps.make_stepper", lambda *_: "a test")
        return made

    def test_they_serve_every_layer(self, model: LlamaForCausalLM, kernels: Recording) -> None:
        with attach(model, CacheConfig("h2o", WINDOW, chunk=8)) as cache:
            model(ids(20), past_key_values=cache)
            model(ids(1), past_key_values=cache)
        assert kernels.calls == ["prefill"] * 15 + ["decode"] * 5
        with attach(model, CacheConfig("h2o", WINDOW, chunk=8), engine="eager"):
            model(ids(20))
        assert len(kernels.calls) == 20

    def test_they_serve_recreated_layers(self, tiny: LlamaForCausalLM, kernels: Recording) -> None:
        with attach(tiny, CacheConfig("h2o-paper", heavy_ratio=0.25, recent_ratio=0.25)):
            tiny(ids(20))
        assert kernels.calls == ["prefill"] * 2

    def test_a_layer_whose_attention_is_watched_is_not_served(self, tiny: LlamaForCausalLM, kernels: Recording) -> None:
        shown: list[Sequence[int]] = []
        with attach(tiny, CacheConfig("h2o", WINDOW)) as cache:
            cache.head_groups[0].watch = lambda probs, *_: shown.append(probs.shape)
            tiny(ids(20), past_key_values=cache)
        assert kernels.calls == ["prefill"]
        assert shown == [torch.Size((1, 2, 1, 20, 20))]


def test_counting_walks_no_layers(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with attach(model, CacheConfig("h2o", WINDOW)) as cache:
        model(ids(60), past_key_values=cache)
        before = cache.counts()
        monkeypatch.setattr(HeadGroup, "nbytes", property(lambda self: 1 / 0))
        monkeypatch.setattr(HeadGroup, "held", property(lambda self: 1 / 0))
        model(ids(1), past_key_values=cache)
        assert cache.counts() == replace(before, seen=61)
