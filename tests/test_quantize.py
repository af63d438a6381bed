"""Grids, codes, and a cache with quantized keys and values."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from h2o_stream import CacheConfig, ConfigError, attach
from h2o_stream.cache.attention import LogitTransform
from h2o_stream.cache.group_rules import HeadShape
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.quantize import decode, encode, fit, spread
from h2o_stream.engine.served import serve
from h2o_stream.loading.transformers_model import LoadedModel
from tests.fixtures import make_llama, with_exhaustive
from tests.slots import attend
from tests.tolerance import assert_close


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class TestGrids:
    @pytest.mark.parametrize("bits", [2, 4, 6, 8])
    def test_codes_come_back(self, bits: int) -> None:
        grid = spread(torch.full((3, 1), -1.0), torch.full((3, 1), 2.0), bits, covers=1.0)
        codes = torch.randint(0, 256, (3, 16 * bits // 8), dtype=torch.uint8)
        assert encode(decode(codes, grid, bits, torch.float32), grid, bits).equal(codes)

    @pytest.mark.parametrize("bits", [2, 4, 6, 8])
    def test_the_error_is_at_most_half_a_step_inside_the_grid(self, bits: int) -> None:
        x = numbers(5, 64)
        grid = spread(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), bits, covers=1.0)
        error = (decode(encode(x, grid, bits), grid, bits, torch.float32) - x).abs()
        assert bool((error <= grid[1] * 0.5001).all())

    @pytest.mark.parametrize(("bits", "largest"), [(8, 0.01), (6, 0.03), (4, 0.12), (2, 0.42)])
    def test_relative_error_of_normal_numbers(self, bits: int, largest: float) -> None:
        x = numbers(200, 64)
        grid = fit(x, bits).half()
        assert (decode(encode(x, grid, bits), grid, bits, torch.float32) - x).norm() / x.norm() < largest

    @pytest.mark.parametrize("bits", [2, 4, 6, 8])
    def test_what_is_on_a_grid_keeps_it(self, bits: int) -> None:
        """So that a token does not drift when read and stored again."""
        x = numbers(50, 64)
        grid = fit(x, bits).half()
        codes = encode(x, grid, bits)
        again = decode(codes, grid, bits, torch.float32)
        assert fit(again, bits).half().equal(grid)
        assert encode(again, fit(again, bits).half(), bits).equal(codes)

    @pytest.mark.parametrize("bits", [2, 4, 6, 8])
    def test_equal_numbers_and_nans(self, bits: int) -> None:
        x = torch.full((1, 8), 3.5)
        assert decode(encode(x, fit(x, bits), bits), fit(x, bits), bits, torch.float32).equal(x)
        nothing = spread(torch.full((1,), torch.inf), torch.full((1,), -torch.inf), bits)
        assert nothing.equal(torch.zeros(2, 1))


class TestLayer:
    def feed(self, layer: HeadGroup, lengths: list[int], seed: int = 0) -> None:
        for number, length in enumerate(lengths):
            q, k, v = (numbers(1, heads, length, 8, seed=seed + number + 100 * heads) for heads in (4, 2, 2))
            attend(layer, q, k, v, LogitTransform(0.3))

    @settings(max_examples=20, deadline=None, derandomize=True)
    @given(
        policy=st.sampled_from(["h2o", "h2o-paper", "sink", "recent", "random", "tova"]),
        window=st.integers(2, 40),
        bits=st.sampled_from([8, 6, 4, 2]),
        lengths=st.lists(st.integers(1, 20), min_size=1, max_size=20),
    )
    def test_every_token_is_where_it_belongs(self, policy: str, window: int, bits: int, lengths: list[int]) -> None:
        """Each slot's key is near the key of its token, and exact for sinks and the newest."""
        plan = CacheConfig(policy, window, positions="absolute", chunk=7, kv_bits=bits).plan()
        layer = HeadGroup(plan)
        keys: list[torch.Tensor] = []
        for number, length in enumerate(lengths):
            k = numbers(1, 2, length, 8, seed=number)
            keys.append(k)
            attend(layer, numbers(1, 4, length, 8, seed=number + 50), k, -k, LogitTransform(0.3))
        fed, (stored, values) = torch.cat(keys, 2), layer.store.read()
        occupied = layer.index >= 0
        assert occupied.sum(-1).eq(min(sum(lengths), window)).all()
        assert not occupied.gather(-1, layer.free).any()
        truth = fed.gather(2, layer.index.clamp_min(0).long()[..., None].expand(-1, -1, -1, 8))
        exact = occupied & ((layer.rank < plan.residual - 1) | (layer.index < plan.exact_sinks))
        assert stored[exact].equal(truth[exact])
        assert values[exact].equal(-truth[exact])
        rest = occupied & ~exact
        widest = {8: 0.08, 6: 0.3, 4: 0.9, 2: 3.5}[bits]
        assert bool(((stored - truth)[rest].abs() < widest).all())
        assert bool(((values + truth)[rest].abs() < widest).all())

    def test_grids_are_widened_by_a_margin(self) -> None:
        """So that a key which lies a little further out changes no grid, and stored keys are seldom rounded again."""
        group = HeadGroup(CacheConfig(window=18, kv_bits=8).plan())
        group.allocate(HeadShape(1, 1, 8, 8), "float32", 1, 20)
        store: Any = group.store

        def widened(*keys: float) -> tuple[float, float]:
            x = torch.tensor(keys)[:, None].expand(1, 1, len(keys), 8)
            store._widen(x, torch.ones(1, 1, len(keys), dtype=torch.bool))
            low, high = store.key_range[0, 0, :, 0].tolist()
            return low, high

        first = widened(-1.0, 1.0)
        assert first == pytest.approx((-1.2, 1.2))
        assert widened(1.19, -1.1) == first
        assert widened(1.6) == pytest.approx((-1.2, 1.6 + 0.28))
        widened(math.nan)
        assert all(map(math.isnan, widened(0.0))), "NaN stays"

    def test_a_token_does_not_drift_while_it_stays(self) -> None:
        """Once the ranges are stable, reading and storing again changes no code."""
        plan = CacheConfig("sink", 40, sinks=30, positions="absolute", chunk=5, kv_bits=4).plan()
        layer = HeadGroup(plan)
        self.feed(layer, [60])
        layer.store.key_range[:, :, 0], layer.store.key_range[:, :, 1] = -9.0, 9.0
        self.feed(layer, [10])
        place = layer.index[0, 0].tolist().index(20)
        before = [x[0, 0, place].clone() for x in layer.store.read()]
        self.feed(layer, [5, 1, 1, 1, 20, 1, 1], seed=7)
        place = layer.index[0, 0].tolist().index(20)
        assert all(x[0, 0, place].equal(old) for x, old in zip(layer.store.read(), before, strict=True))


class TestCache:
    @pytest.mark.parametrize(("bits", "largest"), [(8, 0.04), (6, 0.15), (4, 0.5), (2, 1.2)])
    def test_fewer_bits_are_further_from_the_truth(self, grouped: LlamaForCausalLM, bits: int, largest: float) -> None:
        ids = torch.randint(3, 64, (1, 120), generator=torch.Generator().manual_seed(1))
        logits = []
        for kv_bits in (16, bits):
            with attach(grouped, CacheConfig("sink", 100, kv_bits=kv_bits, chunk=10)):
                logits.append(grouped(ids).logits)
        off = (logits[1] - logits[0]).norm() / logits[0].norm()
        assert 0 < off < largest

    def test_nothing_is_lost_before_a_token_leaves_the_ring(self, grouped: LlamaForCausalLM) -> None:
        ids = torch.randint(3, 64, (1, 16))
        expected = grouped(ids).logits
        with attach(grouped, CacheConfig(window=64, kv_bits=2)):
            assert_close(grouped(ids).logits, expected)

    @pytest.mark.parametrize("bits", [8, 6, 4, 2])
    def test_rows_of_a_padded_batch_are_as_alone(self, grouped: LlamaForCausalLM, bits: int) -> None:
        generator = torch.Generator().manual_seed(2)
        rows = [torch.randint(3, 64, (1, n), generator=generator) for n in (60, 33, 7)]
        batch = torch.cat([torch.nn.functional.pad(row, (60 - row.shape[1], 0)) for row in rows])
        more = torch.randint(3, 64, (3, 12), generator=generator)
        mask = torch.tensor([[0] * (60 - row.shape[1]) + [1] * row.shape[1] for row in rows])
        with attach(grouped, CacheConfig(window=24, kv_bits=bits, chunk=8)) as cache:
            together = [grouped(batch, attention_mask=mask, past_key_values=cache).logits[:, -1:]]
            together += [grouped(part, past_key_values=cache).logits for part in more.split(1, 1)]
            for number, row in enumerate(rows):
                cache.reset()
                alone = [grouped(row, past_key_values=cache).logits[:, -1:]]
                alone += [grouped(p, past_key_values=cache).logits for p in more[number : number + 1].split(1, 1)]
                ours = torch.cat(together, 1)[number : number + 1]
                assert_close(ours, torch.cat(alone, 1))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_bytes(self, dtype: torch.dtype) -> None:
        """At window 1024 and head size 64, 4 bits save a factor of 3.1 and 2 bits a factor of 5, including scales."""
        model, sizes = make_llama(heads=1, size=64, context=2048).to(dtype), {}
        for bits in (16, 8, 6, 4, 2):
            with attach(model, CacheConfig(window=1024, kv_bits=bits)) as cache:
                model(torch.randint(3, 64, (1, 8)))
                sizes[bits] = cache.nbytes
        assert sizes[16] / sizes[4] >= 3.1
        assert sizes[16] / sizes[2] >= 5.0
        books = 1026 * (4 + 2 + 4 + 4) + 8 + 8
        for bits, exact in ((8, 1), (6, 5), (4, 16)):
            coded = (1026 - exact) * (2 * 64 * bits // 8 + 2 * 2) + 2 * 64 * 4
            assert sizes[bits] == 2 * (books + exact * 2 * 64 * dtype.itemsize + coded)

    def test_h2o_has_its_long_term_score(self) -> None:
        assert [CacheConfig(kv_bits=bits).plan().long_term for bits in (16, 8, 6, 4, 2)] == [2.0] * 5
        assert CacheConfig(kv_bits=8, long_term=0.0).plan().long_term == 0

    def test_heads_that_do_not_fill_bytes(self) -> None:
        model = make_llama(size=6)
        with attach(model, CacheConfig(window=16, kv_bits=2)), pytest.raises(ConfigError, match="heads of size 6"):
            model(torch.randint(3, 64, (1, 8)))

    @pytest.mark.every(2)
    @pytest.mark.parametrize("bits", with_exhaustive([4, 2], [8, 6]))
    def test_the_real_model_still_knows_its_text(self, served_embedded: LoadedModel, bits: int) -> None:
        text = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is Madrid. " * 3
        ids = served_embedded.tokenizer(text + "The capital of France is")["input_ids"]
        served = serve(served_embedded.model, CacheConfig(window=48, kv_bits=bits), "auto", print)
        best = int(served.forward(ids).argmax())
        assert served_embedded.tokenizer.decode([best]).strip() == "Paris"
