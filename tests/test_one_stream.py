"""One stream at a time: which forwards continue it, which are refused, and the state after an interrupted forward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from h2o_stream import CacheConfig, ConfigError, H2OStreamError, attach
from h2o_stream.native import library
from tests.fixtures import ids
from tests.tolerance import assert_close


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def forward(count: int) -> Callable[[Any, Any], Any]:
    return lambda model, cache: model(ids(count, rows=2), past_key_values=cache)


def last_of(model: Any) -> Any:
    return model.model.layers[1].self_attn.o_proj


def choose_rows(model: Any, cache: Any) -> None:
    cache.reorder_cache(torch.tensor([1, 1]))


CUT_OFF: dict[str, tuple[str, Any, Callable[[Any, Any, pytest.MonkeyPatch], Any], Callable[[Any, Any], Any]]] = {
    **{
        f"{count} tokens in the last layer, {policy}": (
            policy, "eager", lambda model, cache, patch: patch.setitem(last_of(model)._forward_pre_hooks, 0, interrupt),
            forward(count),
        )
        for policy in ("h2o", "full")
        for count in (1, 5)
    },
    "scores": ("h2o", "eager",
        lambda model, cache, patch: patch.setattr(cache.head_groups[1].policy, "update_scores", interrupt), forward(1)),
    "a slot": ("h2o", "eager",
        lambda model, cache, patch: patch.setattr(cache.head_groups[1], "add_newest", interrupt), forward(1)),
    "a native step": ("h2o", "auto",
        lambda model, cache, patch: patch.setattr(library.loaded(), "h2o_step", interrupt), forward(1)),
    "rows": ("h2o", "auto", lambda model, cache, patch: patch.setattr(cache.head_groups[1], "select_rows", interrupt),
        choose_rows),
    "rows, full": ("full", "auto",
        lambda model, cache, patch: patch.setattr(cache.layers[1], "reorder_cache", interrupt), choose_rows),
    **{
        f"a reset, {policy}": (
            policy, "auto", lambda model, cache, patch: patch.setattr(cache.layers[1], "reset", interrupt),
            lambda model, cache: cache.reset(),
        )
        for policy in ("h2o", "full")
    },
}  # fmt: skip
"""Policy, engine, where it is cut off, and what is."""


@pytest.mark.parametrize("name", CUT_OFF)
def test_what_is_cut_off_is_refused_until_reset(tiny: LlamaForCausalLM, name: str, monkeypatch: Any) -> None:
    policy, engine, cut, act = CUT_OFF[name]
    with attach(tiny, CacheConfig(policy, window=16), engine=engine) as cache:
        tiny(ids(10, rows=2), past_key_values=cache)
        with monkeypatch.context() as patch:
            cut(tiny, cache, patch)
            with pytest.raises(KeyboardInterrupt):
                act(tiny, cache)
        assert cache.torn
        if "reset" not in name:
            assert cache.seen_tokens == 10 or policy == "full", "a forward that is cut off is not counted"
            assert len({layer.get_seq_length() for layer in cache.layers}) == 1
        for call in (lambda: forward(1)(tiny, cache), lambda: forward(5)(tiny, cache), cache.state_dict):
            with pytest.raises(H2OStreamError, match="cut off halfway"):
                call()
        cache.reset()
        assert not cache.torn
        forward(5)(tiny, cache)
        assert cache.seen_tokens == 5


@pytest.mark.parametrize("policy", ["h2o", "full"])
class TestUntouched:
    def test_a_forward_that_touched_nothing_is_gone_on_with(self, tiny: LlamaForCausalLM, policy: str) -> None:
        expected = tiny(ids(12)).logits[:, -1]
        with attach(tiny, CacheConfig(policy, window=16)) as cache:
            tiny(ids(12)[:, :10], past_key_values=cache)
            with pytest.raises(IndexError):
                tiny(torch.tensor([[64]]), past_key_values=cache)  # the vocabulary ends at 63
            assert not cache.torn
            assert_close(tiny(ids(12)[:, 10:], past_key_values=cache).logits[:, -1], expected)

    def test_a_first_forward_that_was_cut_off_leaves_nothing(self, tiny: LlamaForCausalLM, policy: str) -> None:
        expected = tiny(ids(10)).logits
        with attach(tiny, CacheConfig(policy, window=16)) as cache:
            hook = tiny.model.layers[1].register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                tiny(ids(5), past_key_values=cache)
            hook.remove()
            assert_close(tiny(ids(10), past_key_values=cache).logits, expected)


def test_a_refused_forward_leaves_no_tear(tiny: LlamaForCausalLM) -> None:
    with attach(tiny, CacheConfig(window=16)) as cache:
        tiny(ids(10), past_key_values=cache)
        with pytest.raises(H2OStreamError, match="cannot take tokens back"):
            cache.crop(1)
        tiny(ids(1), past_key_values=cache)


@pytest.mark.parametrize("policy", ["h2o", "full"])
class TestStreams:
    def test_a_stream_goes_by_its_own_name(self, tiny: LlamaForCausalLM, policy: str) -> None:
        with attach(tiny, CacheConfig(policy, window=16)) as cache:
            one = tiny(ids(10)).past_key_values
            assert one.seen_tokens == len(one.kept()[0, 0]) == 10
            assert isinstance(one, type(cache))
            assert tiny(ids(1), past_key_values=one).past_key_values is one
            assert tiny(ids(1), past_key_values=cache).past_key_values is cache
            assert tiny(ids(1), past_key_values=one, return_dict=False)[1] is one
            two = tiny(ids(5)).past_key_values
            with pytest.raises(H2OStreamError, match="a newer one has replaced"):
                tiny(ids(1), past_key_values=one)
            with pytest.raises(H2OStreamError, match="a newer one has replaced"):
                one.get_seq_length()
            tiny(ids(1), past_key_values=two)
            assert cache.seen_tokens == 6
            cache.reset()
            with pytest.raises(H2OStreamError, match="a newer one has replaced"):
                tiny(ids(1), past_key_values=two)

    def test_a_forward_without_a_cache_leaves_the_stream_alone(self, tiny: LlamaForCausalLM, policy: str) -> None:
        expected = tiny(ids(12)).logits
        with attach(tiny, CacheConfig(policy, window=16)) as cache:
            tiny(ids(12)[:, :11], past_key_values=cache)
            without = tiny(ids(12), use_cache=False)
            assert without.past_key_values is None
            assert_close(without.logits, expected)
            tiny.config.use_cache = False
            assert tiny(ids(12)).past_key_values is None
            assert cache.seen_tokens == 11
            last = tiny(ids(12)[:, 11:], past_key_values=cache).logits
            assert_close(last, expected[:, -1:])
            assert cache.seen_tokens == 12

    def test_the_callers_cache_without_ours(self, tiny: LlamaForCausalLM, policy: str) -> None:
        """With ``use_cache=False``, a cache passed by the caller is still filled."""
        expected = tiny(ids(12)).logits[:, -1:]
        with attach(tiny, CacheConfig(policy, window=16)) as cache:
            mine = DynamicCache(config=tiny.config)
            tiny(ids(12)[:, :11], past_key_values=mine, use_cache=False)
            assert_close(tiny(ids(12)[:, 11:], past_key_values=mine, use_cache=False).logits, expected)
            assert (mine.get_seq_length(), cache.seen_tokens) == (11 + 1, 0)

    def test_other_rows_are_refused(self, tiny: LlamaForCausalLM, policy: str) -> None:
        with attach(tiny, CacheConfig(policy, window=16)) as cache:
            tiny(ids(10), past_key_values=cache)
            with pytest.raises(H2OStreamError, match=r"the stream has 1 row\(s\), the forward brings 2"):
                tiny(ids(1, rows=2), past_key_values=cache)
            tiny(ids(1), past_key_values=cache)
            assert cache.seen_tokens == 11

    def test_gradients_are_refused_or_right(self, tiny: LlamaForCausalLM, policy: str) -> None:
        with torch.enable_grad(), attach(tiny, CacheConfig(policy, window=16)) as cache:
            first = tiny(ids(5), past_key_values=cache).logits
            second = tiny(ids(1), past_key_values=cache).logits
            assert first.requires_grad
            assert second.requires_grad
            for logits in (first, second) if policy == "h2o" else ():
                with pytest.raises(H2OStreamError, match="for inference"):
                    logits.sum().backward()
            tiny.zero_grad()
            tiny.requires_grad_(False)
            assert not tiny(ids(5)).logits.requires_grad
            for parameter in tiny.lm_head.parameters():
                parameter.requires_grad_(True)
            tiny(ids(5)).logits.sum().backward()
            gradient = tiny.lm_head.weight.grad.clone()
            tiny.lm_head.weight.grad = None
            tiny(ids(5), use_cache=False).logits.sum().backward()
            assert_close(gradient, tiny.lm_head.weight.grad)


class TestArguments:
    def test_padding_in_a_single_column_is_not_a_token(self, tiny: LlamaForCausalLM) -> None:
        with attach(tiny, CacheConfig(window=16)) as cache:
            tiny(ids(6, rows=2), past_key_values=cache)
            mask = torch.tensor([[1] * 7, [1] * 6 + [0]])
            tiny(ids(1, rows=2), attention_mask=mask, past_key_values=cache)
            assert cache.tokens.lengths == (7, 6)

    @pytest.mark.parametrize(
        ("first", "places"),
        [(6, [[0, 1, 2, 0, 1, 2]]), (6, [[3, 4, 5, 6, 7, 8]]), (0, [[0]]), (0, [[5]]), (0, [[7]]), (0, [[6, 7]])],
    )
    def test_positions_of_another_text_are_refused(self, tiny: Any, first: int, places: list[list[int]]) -> None:
        with attach(tiny, CacheConfig(window=16)) as cache:
            tiny(ids(6), past_key_values=cache, position_ids=torch.arange(6)[None])
            past = None if first else cache
            with pytest.raises(ConfigError, match="position_ids"):
                tiny(ids(first or 1), past_key_values=past, position_ids=torch.tensor(places))

    def test_a_mask_that_hides_what_was_seen_is_refused(self, tiny: LlamaForCausalLM) -> None:
        with attach(tiny, CacheConfig(window=16)) as cache:
            tiny(ids(6), past_key_values=cache)
            for new in (1, 3):
                mask = torch.tensor([[1, 0, 1, 1, 1, 1] + [1] * new])
                with pytest.raises(ConfigError, match=r"shows \[5\] tokens of the past, the stream has seen \[6\]"):
                    tiny(ids(new), attention_mask=mask, past_key_values=cache)

    def test_another_attention_is_refused_until_ours_is_back(self, tiny: LlamaForCausalLM) -> None:
        with attach(tiny, CacheConfig(window=16)) as cache:
            tiny(ids(6), past_key_values=cache)
            tiny.set_attn_implementation("sdpa")
            with pytest.raises(H2OStreamError, match="was set to sdpa"):
                tiny(ids(1), past_key_values=cache)
            tiny.set_attn_implementation("h2o_stream")
            tiny(ids(1), past_key_values=cache)
            assert cache.seen_tokens == 7

    def test_a_submodule_on_its_own_is_refused(self, tiny: LlamaForCausalLM) -> None:
        with attach(tiny, CacheConfig(window=16)), pytest.raises(H2OStreamError, match="called by itself"):
            tiny.model(ids(3))

    def test_no_tokens_are_refused(self, tiny: LlamaForCausalLM) -> None:
        with attach(tiny, CacheConfig(window=16)), pytest.raises(H2OStreamError, match="needs input_ids"):
            tiny()


def test_a_stream_is_the_same_where_every_step_is_checked(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.CHECK_VARIABLE, "1")
    how = {"attention_mask": torch.ones(1, 10), "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = tiny.generate(ids(10), **how)
    with attach(tiny, CacheConfig(window=64)) as cache:
        assert tiny.generate(ids(10), **how).equal(expected)
        assert not cache.torn
