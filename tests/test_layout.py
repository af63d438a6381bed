"""How many slots groups of heads have, what is in them, and who may look at their attention."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from h2o_stream import CacheConfig, attach
from h2o_stream.cache.audit import audit
from h2o_stream.cache.eager import EagerKernels
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.windows import HeadWindow
from tests.fixtures import ids, make_grouped
from tests.tolerance import FLOAT32, assert_close

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
    return make_grouped(monkeypatch, GROUPS)


class TestWindows:
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
    @pytest.mark.parametrize("kv_bits", [16, 8])
    def test_they_never_take_the_way_of_a_prompt(
        self, model: Any, monkeypatch: pytest.MonkeyPatch, kv_bits: int
    ) -> None:
        """Rows of different lengths with windows of different sizes: every row gives the same result as alone."""
        lengths, steps, config = (5, 22, 41), 50, CacheConfig("h2o", WINDOW, kv_bits=kv_bits)
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
            # On some machines a batch rounds differently from a single row, by one code of 256.
            assert_close(together[row], alone[0], FLOAT32 if kv_bits == 16 else 0.02)
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


def test_a_layer_whose_attention_is_watched_shows_it(tiny: LlamaForCausalLM) -> None:
    shown: list[Sequence[int]] = []
    with attach(tiny, CacheConfig("h2o", WINDOW)) as cache:
        cache.head_groups[0].watch = lambda probs, *_: shown.append(probs.shape)
        tiny(ids(20), past_key_values=cache)
    assert shown == [torch.Size((1, 2, 1, 20, 20))]


def test_counting_walks_no_layers(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with attach(model, CacheConfig("h2o", WINDOW)) as cache:
        model(ids(60), past_key_values=cache)
        before = cache.counts()
        monkeypatch.setattr(HeadGroup, "nbytes", property(lambda self: 1 / 0))
        monkeypatch.setattr(HeadGroup, "held", property(lambda self: 1 / 0))
        model(ids(1), past_key_values=cache)
        assert cache.counts() == replace(before, seen=61)
