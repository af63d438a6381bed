"""The forward of an attached model: which calls it handles, and the model's state during and after."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from h2o_stream import CacheConfig, ConfigError, attach
from tests.families import FAMILIES
from tests.fixtures import ids, make_llama


class OneLogit:
    """A stepper that always expects the same token next."""

    takes_prompts = False

    def __init__(self, token: int = 7, serves: bool = True) -> None:
        self.token, self.serves, self.calls, self.cache = token, serves, 0, None

    def logits(self, kwargs: dict[str, Any]) -> Tensor | None:
        if not self.serves:
            return None
        self.calls += 1
        cache = kwargs["past_key_values"]
        with cache.writing():
            cache.count_token()
        logits = torch.zeros(len(kwargs["input_ids"]), 1, 64)
        logits[..., self.token] = 1
        return logits


@pytest.fixture
def stepper(monkeypatch: pytest.MonkeyPatch) -> OneLogit:
    made = OneLogit()
    monkeypatch.setattr("h2o_stream.attachment.native_steps.make_stepper", lambda *_: made)
    return made


class TestWhoTakesIt:
    def test_single_tokens_go_through_the_stepper(self, tiny: LlamaForCausalLM, stepper: OneLogit) -> None:
        with attach(tiny, CacheConfig(window=16)) as cache:
            mask = torch.ones(1, 10)
            out = tiny.generate(ids(10), attention_mask=mask, max_new_tokens=30, do_sample=False, eos_token_id=None)
            assert out[0, 11:].eq(7).all()
            assert stepper.calls == 29
            assert cache.seen_tokens == 39

    def test_what_it_gives_looks_as_the_models_own(self, tiny: LlamaForCausalLM, stepper: OneLogit) -> None:
        with attach(tiny, CacheConfig(window=16)) as cache:
            tiny(ids(10), past_key_values=cache)
            output = tiny(ids(1), past_key_values=cache)
            assert isinstance(output, CausalLMOutputWithPast)
            assert output.past_key_values is cache
            logits, past = tiny(ids(1), past_key_values=cache, return_dict=False)
            assert (logits.shape, past is cache, stepper.calls) == ((1, 1, 64), True, 2)

    @pytest.mark.parametrize("asked", [
        {"output_hidden_states": True},
        {"output_attentions": True},
        {"labels": torch.zeros(1, 1, dtype=torch.int64)},
        {"logits_to_keep": torch.tensor([0])},
    ], ids=lambda asked: next(iter(asked)))  # fmt: skip
    def test_other_outputs_need_the_models_own_forward(
        self, tiny: LlamaForCausalLM, stepper: OneLogit, asked: dict[str, Any]
    ) -> None:
        with attach(tiny, CacheConfig(window=16)) as cache:
            tiny(ids(10), past_key_values=cache)
            output = tiny(ids(1), past_key_values=cache, **asked)
            assert stepper.calls == 0
            assert output.logits.shape == (1, 1, 64)
            if "output_hidden_states" in asked:
                assert len(output.hidden_states) == 3
            embedded = tiny.get_input_embeddings()(ids(1))
            tiny(inputs_embeds=embedded, past_key_values=cache)
            assert (stepper.calls, cache.seen_tokens) == (0, 12)

    def test_a_stepper_may_decline(self, tiny: LlamaForCausalLM, stepper: OneLogit) -> None:
        with attach(tiny, CacheConfig(window=16)) as cache:
            tiny(ids(10), past_key_values=cache)
            stepper.serves = False
            tiny(ids(1), past_key_values=cache)
            assert cache.seen_tokens == 11
            assert (cache.head_groups[0].seen == 11).all()

    def test_another_engine_is_refused(self, tiny: LlamaForCausalLM) -> None:
        with pytest.raises(ConfigError, match="choose one of auto, eager"), attach(tiny, engine="fast"):  # type: ignore[arg-type]
            pass


class TestTheModel:
    def test_its_forward_has_its_signature(self, tiny: LlamaForCausalLM) -> None:
        signature = inspect.signature(tiny.forward)
        with attach(tiny):
            assert inspect.signature(tiny.forward) == signature

    def test_positional_arguments_find_their_names(self, tiny: LlamaForCausalLM) -> None:
        mask = torch.tensor([[0, 0, 1, 1, 1]])
        with attach(tiny, CacheConfig(window=16)) as cache:
            tiny(ids(5), mask)
            assert cache.seen_tokens == 3

    def test_a_forward_of_somebody_else_is_called_and_put_back(self) -> None:
        """Replaced as accelerate does."""
        model = make_llama()
        original, calls = model.forward, []

        def theirs(*args: Any, **kwargs: Any) -> Any:
            calls.append(sorted(kwargs))
            return original(*args, **kwargs)

        model.forward = theirs
        with attach(model, CacheConfig(window=16)) as cache:
            assert calls, "verification calls it"
            calls.clear()
            model(input_ids=ids(5))
            assert cache.seen_tokens == 5
        assert model.forward is theirs
        assert len(calls) == 1


def test_layers_that_share_keys_attend_for_all_tokens() -> None:
    """They would drop the queries of tokens whose logits nobody wants, which have scores to give."""
    model = next(family for family in FAMILIES if family.name == "Gemma 4").make()
    found = []
    for keep in (0, 1):
        with attach(model, CacheConfig("h2o", window=16), engine="eager") as cache:
            logits = model(ids(40), past_key_values=cache, logits_to_keep=keep).logits[:, -1]
            found.append((logits, [cache.kept(layer).tolist() for layer in range(len(cache.layers))]))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
