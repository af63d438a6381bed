"""The check that models give the same results with and without the cache, and what it leaves unchanged."""

import copy
import inspect
from typing import Any

import pytest
import torch
from accelerate import disk_offload
from torch import Tensor
from transformers import BertConfig, BertLMHeadModel, DiffLlamaConfig, DiffLlamaForCausalLM, LlamaForCausalLM

from h2o_stream import CacheConfig, attach
from h2o_stream.attachment import verification
from h2o_stream.attachment.attention_interface import attention_names
from h2o_stream.native.tensor_stepper import TensorStepper
from tests.causal_models import make
from tests.families import GROUPED, SIZES, tiny
from tests.fixtures import make_llama, refusal

pytestmark = pytest.mark.usefixtures("nothing_is_known")


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the forwards of Llama models."""
    lengths: list[int] = []
    forward = LlamaForCausalLM.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        lengths.append((args[0] if args else kwargs["input_ids"]).shape[1])
        return forward(self, *args, **kwargs)

    counted.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(LlamaForCausalLM, "forward", counted)
    return lengths


class TestRefuses:
    def test_an_attention_of_another_kind(self) -> None:
        torch.manual_seed(0)
        message = refusal(DiffLlamaForCausalLM(DiffLlamaConfig(**GROUPED)).eval())
        assert "its logits are off by" in message
        assert message.endswith("only --policy full can serve it")

    @pytest.mark.parametrize("positions", ["gap", "absolute"])
    def test_an_encoder(self, positions: str) -> None:
        torch.manual_seed(0)
        model = BertLMHeadModel(BertConfig(**SIZES)).eval()
        assert "attend to later ones" in refusal(model, positions=positions)

    def test_an_encoder_is_right_as_a_decoder(self) -> None:
        torch.manual_seed(0)
        model = BertLMHeadModel(BertConfig(**SIZES, is_decoder=True)).eval()
        with attach(model, CacheConfig(window=32, positions="absolute")):
            pass

    @pytest.mark.parametrize("positions", ["gap", "absolute"])
    def test_gemma_3_that_is_bidirectional(self, positions: str) -> None:
        settings = {"sliding_window": 10, "layer_types": ["sliding_attention", "full_attention"]}
        settings |= {"query_pre_attn_scalar": 8, "use_bidirectional_attention": True}
        model = tiny("Gemma3", "Gemma3Text", **GROUPED, **settings)()
        assert "attend to later ones" in refusal(model, positions=positions)

    def test_a_patched_attention_of_a_verified_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = make_llama()
        with attach(model, CacheConfig(window=32)):
            pass
        attention = model.model.layers[1].self_attn
        forward = attention.forward

        def patched(hidden_states: Tensor, **kwargs: Any) -> Any:
            output, probs = forward(hidden_states, **kwargs)
            return output * (1 if "h2o_cache" in kwargs else 2), probs

        attention.forward = patched
        assert "computes something else" in refusal(model)
        del attention.forward
        with attach(model, CacheConfig(window=32)):
            pass

    def test_nan_logits(self) -> None:
        model = make_llama()
        model.model.norm.weight.data.fill_(torch.nan)
        assert "logits of LlamaForCausalLM are NaN" in refusal(model)

    def test_a_forward_that_fails(self) -> None:
        model = make_llama()
        model.model.norm.forward = lambda x: x[..., :3]
        assert "RuntimeError" in refusal(model)


class TestAccepts:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_rounding(self, dtype: torch.dtype) -> None:
        """Large weights and routers amplify it."""
        model = copy.deepcopy(make("granitemoe")).to(dtype)
        with attach(model, CacheConfig(window=32)):
            pass

    @pytest.mark.parametrize("seed", [2, 17])
    def test_rounding_that_changes_experts(self, seed: int) -> None:
        """Rounding changes those of few tokens, whose routers nearly tie, and by much."""
        model = copy.deepcopy(make("mixtral")).to(torch.bfloat16)
        generator = torch.Generator().manual_seed(seed)
        for name, weight in model.named_parameters():
            if name.endswith("gate.weight"):
                weight.data.normal_(0, 0.02, generator=generator)
        with attach(model, CacheConfig(window=32)):
            pass

    def test_rounding_in_float32(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Deep models with large weights amplify it, Gemma 4 in its real shape for one."""
        errors = list[float]()
        last_error = verification.last_error
        monkeypatch.setattr(verification, "last_error", lambda *both: errors.append(last_error(*both)) or errors[-1])
        model = make_llama(layers=24, heads=2, groups=2)
        for name, weight in model.named_parameters():
            weight.data *= 4 if "proj" in name else 1
        with attach(model, CacheConfig(window=32)):
            assert max(errors) > 1e-4, "this one does"

    def test_fewer_positions_than_tokens_of_the_proof(self) -> None:
        model = make_llama(context=20)
        with attach(model, CacheConfig(window=12, span=0, chunk=4)):
            pass

    def test_several_tokens_that_end_a_text(self) -> None:
        """As in the configs of Llama 3 and GLM-4."""
        settings = {**GROUPED, "eos_token_id": [2, 3], "bos_token_id": None}
        with attach(tiny("Llama", **settings)(), CacheConfig(window=8)) as cache:
            assert cache.engine_note.startswith("native")

    def test_a_prompt_of_one_part(self) -> None:
        """JetMoE needs contiguous attention outputs."""
        model, ids = make("jetmoe"), torch.arange(3, 23)[None]
        expected = model(ids, use_cache=False).logits
        with attach(model, CacheConfig(window=32), engine="eager"):
            assert (model(ids).logits - expected).abs().max() < 1e-5 * expected.abs().max()

    def test_logits_that_stand_for_never(self) -> None:
        theirs = torch.tensor([1.0, 2.0, -torch.inf, torch.finfo(torch.float32).min])
        assert verification.error_of(theirs * torch.tensor([1.01, 1.01, 1, 1]), theirs) == pytest.approx(0.01, rel=1e-3)
        assert verification.error_of(torch.zeros(4), theirs) == float("inf")
        assert not verification.error_of(theirs.where(theirs != 1, torch.nan), theirs) < 1


class TestIsMadeOnce:
    def test_for_a_model_on_disk(self, tmp_path: Any) -> None:
        """Its hooks are accelerate's own, which are recognized."""
        model = copy.deepcopy(make_llama(seed=8))
        ids = torch.arange(3, 23)[None]
        expected = model(ids, use_cache=False).logits
        disk_offload(model, tmp_path, torch.device("cpu"))
        with attach(model, CacheConfig(window=32)) as cache:
            assert (model(ids, past_key_values=cache).logits - expected).abs().max() < 1e-5 * expected.abs().max()
        assert verification._known

    def test_for_equal_models(self, forwards: list[int]) -> None:
        config = CacheConfig(window=32, budgets="equal")
        with attach(make_llama(), config):
            assert verification.PROMPT + verification.STEPS in forwards
        forwards.clear()
        with attach(make_llama(), config):
            assert set(forwards) == {1}, "one token at two positions"

    @pytest.mark.parametrize("other", ["dtype", "positions", "weights", "flag"])
    def test_not_for_others(self, forwards: list[int], other: str) -> None:
        with attach(make_llama(), CacheConfig(window=32, budgets="equal")):
            forwards.clear()
        model = make_llama(seed=1 if other == "weights" else 0)
        model = model.bfloat16() if other == "dtype" else model
        model.model.layers[0].self_attn.scaling *= 2 if other == "flag" else 1
        positions = "absolute" if other == "positions" else None
        with attach(model, CacheConfig(window=32, budgets="equal", positions=positions)):
            assert verification.PROMPT + verification.STEPS in forwards

    def test_in_another_process(self, forwards: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(verification, "LONG_S", 0.0)
        for known in (False, True):
            monkeypatch.setattr(verification, "_known", set())
            forwards.clear()
            with attach(make_llama(), CacheConfig(window=32, budgets="equal")):
                assert (verification.PROMPT + verification.STEPS in forwards) != known


class TestLeavesNothingBehind:
    def test_random_numbers_dropout_and_hooks(self) -> None:
        torch.manual_seed(5)
        model = copy.deepcopy(make_llama())
        model.config.attention_dropout = 0.5
        model.train()
        model.model.layers[0].eval()
        training = [module.training for module in model.modules()]
        torch.manual_seed(7)
        before = torch.get_rng_state()
        with attach(model, CacheConfig(window=32)) as cache:
            assert cache.seen_tokens == 0
            assert [module.training for module in model.modules()] == training
        assert torch.equal(torch.get_rng_state(), before)
        assert not any(module._forward_hooks for module in model.modules())

    def test_the_attention_of_every_submodel_is_restored(self) -> None:
        model = make("got_ocr2")
        before = [name for _, name in attention_names(model)]
        assert len(set(before)) > 1
        built = verification.Verification(model, "absolute", "auto", [])
        with pytest.raises(ValueError, match="empty"):
            built.why_not()
        assert [name for _, name in attention_names(model)] == before

    def test_gradients_and_inference_mode(self) -> None:
        with torch.enable_grad(), attach(make_llama(seed=3), CacheConfig(window=32)):
            assert torch.is_grad_enabled()
        with torch.inference_mode(), attach(make_llama(seed=4), CacheConfig(window=32)):
            pass

    def test_a_config_without_a_cache(self) -> None:
        model = make_llama(seed=5)
        model.config.use_cache = False
        with attach(model, CacheConfig(window=32)):
            pass
        assert model.config.use_cache is False


def test_native_code_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TensorStepper.run

    def off(self: Any, tokens: Tensor, trace: Tensor | None = None) -> Tensor | None:
        logits = run(self, tokens, trace)
        return None if logits is None else logits * 1.01

    monkeypatch.setattr(TensorStepper, "run", off)
    with attach(make_llama(seed=6), CacheConfig(window=32)) as cache:
        assert cache.engine_note.startswith("eager: its logits are off by ")
        assert cache.kernels is not None
