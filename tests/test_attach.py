"""A model with a cache attached, used as in user code: generate, pipelines, batches, beams."""

import itertools
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from h2o_stream import CacheConfig, ConfigError, Engine, H2OStreamError, SamplingConfig, attach
from tests.causal_models import make
from tests.families import SIZES, each_family, tiny
from tests.fixtures import ids, make_llama, refusal, thinned
from tests.fixtures import ids as tokens
from tests.in_turn import in_turn
from tests.tolerance import assert_close

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None}


def padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows [1, n] as one batch, padded on the left."""
    width = max(row.shape[1] for row in rows)
    return {
        "input_ids": torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - row.shape[1]) + [1] * row.shape[1] for row in rows]),
    }


def alone(row: torch.Tensor) -> dict[str, torch.Tensor]:
    return padded([row])


class TestGenerate:
    @pytest.mark.parametrize("policy", ["h2o", "full"])
    def test_generate_starts_a_new_stream_each_time(self, tiny: LlamaForCausalLM, policy: str) -> None:
        alone = tiny.generate(ids(10), attention_mask=torch.ones(1, 10), max_new_tokens=15, do_sample=False)
        with attach(tiny, CacheConfig(policy, window=64)) as cache:
            for _ in range(2):
                out = tiny.generate(ids(10), attention_mask=torch.ones(1, 10), max_new_tokens=15, do_sample=False)
                assert out.equal(alone)
                assert cache.seen_tokens == out.shape[1] - 1
                assert cache.kept(0).shape == (1, 2, out.shape[1] - 1)

    def test_generate_continues_with_the_cache_passed_to_it(self, tiny: LlamaForCausalLM) -> None:
        with attach(tiny, CacheConfig(window=16)) as cache:
            first = tiny.generate(ids(10), max_new_tokens=20, do_sample=False, eos_token_id=None)
            longer = torch.cat((first, ids(5, seed=1)), 1)
            out = tiny.generate(longer, past_key_values=cache, max_new_tokens=3, do_sample=False, eos_token_id=None)
            assert cache.seen_tokens == out.shape[1] - 1 == 37
            assert cache.kept(0).shape[-1] == 16

    def test_reordered_rows_carry_their_whole_state(self, tiny: LlamaForCausalLM) -> None:
        with attach(tiny, CacheConfig(window=12)) as cache:
            tiny(ids(30, rows=2), past_key_values=cache)
            before = cache.kept(1).clone(), cache.head_groups[1].scores.clone()
            cache.reorder_cache(torch.tensor([1, 1]))
            assert cache.kept(1)[0].equal(before[0][1])
            assert cache.head_groups[1].scores[0].equal(before[1][1])

    def test_assisted_generation_is_refused(self, tiny: LlamaForCausalLM) -> None:
        mask = torch.ones(1, 10)
        with attach(tiny), pytest.raises(H2OStreamError, match="assistant"):
            tiny.generate(ids(10), attention_mask=mask, assistant_model=make_llama(), max_new_tokens=5)

    def test_two_models_do_not_interfere(self) -> None:
        one, two = make_llama(seed=1), make_llama(seed=2)
        with attach(one, CacheConfig(window=8)) as first, attach(two, CacheConfig("recent", 16)) as second:
            one(ids(20), past_key_values=first)
            two(ids(30), past_key_values=second)
            assert (first.seen_tokens, second.seen_tokens) == (20, 30)
            assert (first.kept().shape[-1], second.kept().shape[-1]) == (8, 16)

    def test_a_foreign_cache_is_refused(self, tiny: LlamaForCausalLM) -> None:
        foreign = DynamicCache(config=tiny.config)
        tiny(ids(5), past_key_values=foreign)
        with attach(tiny), pytest.raises(H2OStreamError, match="5 tokens of another cache"):
            tiny(ids(1), past_key_values=foreign)

    def test_a_mask_that_is_not_of_padding_is_refused(self, tiny: LlamaForCausalLM) -> None:
        with attach(tiny), pytest.raises(ConfigError, match=r"attention_mask has shape \(2, 1, 3, 3\)"):
            tiny(ids(3, rows=2), attention_mask=torch.ones(2, 1, 3, 3))


class TestBatches:
    ROWS = [ids(count, seed=count) for count in (40, 3, 17, 1, 29)]

    @pytest.mark.every(2)
    @pytest.mark.parametrize(("policy", "chunk"), thinned(
        itertools.product(("h2o", "h2o-paper", "random", "tova", "sink", "full"), (0, 6)),
        lambda policy, chunk: (chunk == 6) == (policy in ("random", "sink", "h2o")),
    ))  # fmt: skip
    def test_rows_of_different_lengths_say_what_they_say_alone(self, grouped: Any, policy: str, chunk: int) -> None:
        with attach(grouped, CacheConfig(policy, window=16, chunk=chunk)) as cache:
            together = grouped.generate(**padded(self.ROWS), max_new_tokens=20, **GREEDY)
            kept = cache.kept(1) if policy != "full" else None
            for number, row in enumerate(self.ROWS):
                said = grouped.generate(**alone(row), max_new_tokens=20, **GREEDY)[0, row.shape[1] :]
                assert together[number, -20:].equal(said)
                if kept is not None:
                    mine = kept[number][kept[number] >= 0].view(2, -1)
                    assert cache.kept(1)[0].equal(mine)

    def test_beams_of_a_padded_batch(self, grouped: LlamaForCausalLM) -> None:
        how = {"num_beams": 3, "max_new_tokens": 12, **GREEDY}
        with attach(grouped, CacheConfig(window=16, chunk=6)):
            together = grouped.generate(**padded(self.ROWS[:3]), **how)
            for number, row in enumerate(self.ROWS[:3]):
                assert together[number, -12:].equal(grouped.generate(**alone(row), **how)[0, -12:])

    def test_padding_counts_nowhere(self, tiny: LlamaForCausalLM) -> None:
        with attach(tiny, CacheConfig(window=64)) as cache:
            tiny(**padded([ids(5), ids(2)]), past_key_values=cache)
            assert cache.seen_tokens == 5
            assert cache.kept()[1].tolist() == [[-1, -1, -1, 0, 1]] * 2
            assert cache.head_groups[0].scores[1].isfinite().sum() == 4

    def test_padding_on_the_right_and_in_between(self, tiny: LlamaForCausalLM) -> None:
        tokens = ids(12)
        spread = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 1, 0]])
        wide = torch.zeros(1, 18, dtype=torch.int64)
        wide[spread.bool()] = tokens[0]
        how = {"attention_mask": spread, "position_ids": (spread.cumsum(1) - 1).clamp_min(0)}
        for chunk in (0, 5):
            with attach(tiny, CacheConfig(window=8, chunk=chunk)) as cache:
                expected, kept = tiny(tokens).logits[0], cache.kept(1)
                assert_close(tiny(wide, **how).logits[0][spread[0].bool()], expected)
                assert cache.kept(1).equal(kept)

    def test_padding_in_between_needs_positions(self, tiny: LlamaForCausalLM) -> None:
        """By itself, transformers counts it: what is hidden still sets its neighbours apart."""
        hole, columns = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 1, 1, 1]]), torch.arange(5)[None]
        with attach(tiny, CacheConfig(window=16)) as cache:
            for positions in ({}, {"position_ids": columns}):
                with pytest.raises(ConfigError, match=r"attention_mask hides tokens between|position_ids are not"):
                    tiny(ids(5, 2), attention_mask=hole, **positions)
            assert not cache.seen_tokens

    def test_a_second_prompt_may_be_padded_too(self, grouped: LlamaForCausalLM) -> None:
        """A batch of conversations in which every turn is padded separately."""
        first, second = [ids(9), ids(4, seed=1)], [ids(3, seed=2), ids(11, seed=3)]
        with attach(grouped, CacheConfig(window=12, chunk=4)) as cache:
            grouped(**padded(first), past_key_values=cache)
            turn = padded(second)
            logits = grouped(**turn, past_key_values=cache).logits[:, -1]
            for number in range(2):
                cache.reset()
                grouped(first[number], past_key_values=cache)
                said = grouped(second[number], past_key_values=cache).logits[:, -1]
                assert_close(said[0], logits[number])

    def test_a_mask_without_tokens_is_refused(self, tiny: LlamaForCausalLM) -> None:
        with attach(tiny), pytest.raises(ConfigError, match="hides every token"):
            tiny(ids(3), attention_mask=torch.zeros(1, 3))


class TestGivenBack:
    @each_family
    @in_turn("policy", ["h2o", "full"])
    def test_every_family_as_it_was(self, family: Any, policy: str) -> None:
        model: PreTrainedModel = family.make()
        before, expected = self.state(model), model(ids(9)).logits
        for _ in range(2):
            config = CacheConfig(policy, window=8, positions=family.positions[0])
            with pytest.raises(IndexError), attach(model, config):
                model(torch.tensor([[3, 64, 5]]))  # the vocabulary ends at 63
        assert self.state(model) == before
        assert model(ids(9)).logits.equal(expected)

    def state(self, model: PreTrainedModel) -> tuple[Any, ...]:
        hooks = [
            len(hooks) for module in model.modules() for hooks in (module._forward_pre_hooks, module._forward_hooks)
        ]
        configs = [model.config.to_dict(), model.generation_config.to_dict(), model.config._attn_implementation]
        return configs, hooks, set(vars(model)), [module.training for module in model.modules()]

    def test_a_refused_attach_leaves_no_trace(self, tiny: LlamaForCausalLM) -> None:
        before = self.state(tiny)
        with pytest.raises(ConfigError), attach(tiny, CacheConfig(window=10_000)):
            pass
        assert self.state(tiny) == before

    def test_a_nested_attach_leaves_the_outer_one_in_place(self, tiny: LlamaForCausalLM) -> None:
        with attach(tiny, CacheConfig(window=8)) as cache:
            with pytest.raises(H2OStreamError, match="attached already"), attach(tiny, CacheConfig(window=16)):
                pass
            tiny(ids(30))
            assert cache.kept().shape[-1] == 8


@pytest.mark.parametrize(("entry", "words"), [
    ("gptj", "does not take its attention from transformers' registry"),
    ("bloom", "does not take its attention from transformers' registry"),
    ("mpt", "does not take its attention from transformers' registry"),
    ("nemotron", "does not pass extra keywords on"),
])  # fmt: skip
@pytest.mark.parametrize("positions", ["gap", "absolute"])
def test_refused_before_any_work(entry: str, words: str, positions: str) -> None:
    refused = make(entry)
    attention = refused.config._attn_implementation
    assert words in refusal(refused, window=16, positions=positions)
    assert refused.config._attn_implementation == attention
    with attach(refused, CacheConfig("full")):
        pass


def test_another_form_of_rope_is_served_with_true_positions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make_llama(), tokens(14)
    rotary = model.model.rotary_emb
    monkeypatch.setattr(rotary, "forward", lambda x, position_ids, own=rotary.forward: own(x, position_ids**2))
    assert "--positions absolute" in refusal(model, window=16)
    expected = model(ids).logits
    with attach(model, CacheConfig(window=16, positions="absolute")):
        assert_close(model(ids).logits, expected)


def make_opt(**more: Any) -> PreTrainedModel:
    return tiny("OPT", **SIZES | {"word_embed_proj_dim": 32, "ffn_dim": 32, "max_position_embeddings": 40, **more})()


def test_learned_positions() -> None:
    model = make_opt()
    for positions in ("gap", "rolling"):
        reason = f"no rotary positions, which {positions} re-assigns; use --pos"
        assert reason in refusal(model, window=16, positions=positions)
    with attach(model, CacheConfig(window=16)) as cache:
        assert cache.plan.positions == "absolute", "taken where none is given"
        model(tokens(40), past_key_values=cache)
        with pytest.raises(H2OStreamError, match="41 tokens pass the 40 positions"):
            model(tokens(1), past_key_values=cache)


def test_learned_positions_end_a_chat(tokenizer: PreTrainedTokenizerBase) -> None:
    """Whatever --at-context is, no position exceeds the last one."""
    for cache in (CacheConfig(window=16, positions="absolute"), CacheConfig("full")):
        with Engine(make_opt(vocab_size=len(tokenizer)), tokenizer, cache, SamplingConfig(temperature=0)) as engine:
            list(engine.prefill(range(100, 130)))
            *said, finished = engine.decode()
            assert (len(said), finished.reason) == (10, "context")
            assert "learned positions; reset" in finished.detail
            assert [event.reason for event in engine.prefill([100])] == ["context"]
