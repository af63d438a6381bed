"""Models whose weights or modules change: PEFT adapters, and changes to an attached model."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import set_module_tensor_to_device
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from h2o_stream import CacheConfig, UnsupportedModelError, attach
from h2o_stream.cache.tolerance import error_of
from h2o_stream.config import ModelConfig
from h2o_stream.errors import ModelNotFoundError
from h2o_stream.loading.loading import load_model
from h2o_stream.loading.transformers_model import load
from tests.fixtures import make_llama
from tests.in_turn import in_turn
from tests.tolerance import assert_close

peft = pytest.importorskip("peft")

ROOMY = CacheConfig(window=64)
WAYS = [("h2o", "auto"), ("h2o", "eager"), ("full", "auto")]
LINEAR = ["q_proj", "v_proj", "down_proj"]


def with_adapter(alpha: float, model: LlamaForCausalLM | None = None, seed: int = 5) -> Any:
    """PEFT's wrapper around a tiny Llama, with a LoRA that has an effect."""
    model = model or make_llama()
    torch.manual_seed(seed)
    how = peft.LoraConfig(r=2, lora_alpha=alpha, target_modules=LINEAR, init_lora_weights=False)
    return peft.get_peft_model(model, how).eval()


def logits_of(model: Any, steps: int = 4) -> Tensor:
    """Logits of a prompt's last token and of `steps` more, fed one by one."""
    ids = torch.randint(3, 64, (1, 9 + steps), generator=torch.Generator().manual_seed(0))
    output = model(input_ids=ids[:, :9], use_cache=True)
    logits = [output.logits[:, -1]]
    for token in ids[:, 9:].split(1, 1):
        output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
        logits.append(output.logits[:, -1])
    return torch.cat(logits)


@pytest.mark.parametrize(("policy", "engine"), WAYS, ids=["h2o", "h2o eager", "full"])
class TestAdapters:
    @pytest.mark.every(2)
    def test_each_is_itself(self, policy: str, engine: Any) -> None:
        """LoRA's scaling is not a weight."""
        base = make_llama()
        for alpha in (8, 64):
            model = with_adapter(alpha, base)
            expected = logits_of(model)
            with attach(model, CacheConfig(policy, window=64), engine=engine) as cache:
                assert_close(logits_of(model), expected)
                assert cache.seen_tokens == 13
            base = model.unload()

    def test_generate_through_the_wrapper(self, policy: str, engine: Any) -> None:
        model, how = with_adapter(16), {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
        ids = torch.randint(3, 64, (3, 9), generator=torch.Generator().manual_seed(0))
        expected = model.generate(input_ids=ids, num_beams=2, **how)
        with attach(model, CacheConfig(policy, window=64), engine=engine):
            assert model.generate(input_ids=ids, num_beams=2, **how).equal(expected)

    def test_switched_merged_and_taken_off_inside_the_block(self, policy: str, engine: Any) -> None:
        model = with_adapter(32)
        expected = logits_of(model)
        with model.disable_adapter():
            plain = logits_of(model)
        with attach(model, CacheConfig(policy, window=64), engine=engine):
            assert_close(logits_of(model), expected)
            with model.disable_adapter():
                assert_close(logits_of(model), plain)
            model.merge_adapter()
            assert_close(logits_of(model), expected)
            model.unmerge_adapter()
            assert_close(logits_of(model), expected)
            assert_close(logits_of(model.merge_and_unload()), expected)

    def test_put_on_an_attached_model(self, policy: str, engine: Any) -> None:
        expected, base = logits_of(with_adapter(32)), make_llama()
        plain = logits_of(base)
        with attach(base, CacheConfig(policy, window=64), engine=engine):
            assert_close(logits_of(base), plain)
            model = with_adapter(32, base)
            assert_close(logits_of(model), expected)
            assert_close(logits_of(model.unload()), plain)


def test_on_disk(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: beside a model, one engine applied them and the other one did not."""
    with_adapter(8, LlamaForCausalLM.from_pretrained(tiny_folder)).save_pretrained(tmp_path / "alone")
    both = shutil.copytree(tiny_folder, tmp_path / "both")
    shutil.copytree(tmp_path / "alone", both, dirs_exist_ok=True)
    for folder, error in ((tmp_path / "alone", ModelNotFoundError), (both, UnsupportedModelError)):
        for engine in ("auto", "eager"):
            with pytest.raises(error, match=r"adapter \(PEFT\); merge it"):
                load_model(ModelConfig(str(folder)), CacheConfig(), engine, print, print)  # type: ignore[arg-type]
    monkeypatch.setattr(
        "h2o_stream.loading.transformers_model.check_folder", print
    )  # on the Hub there is no folder yet
    with pytest.raises(UnsupportedModelError, match=r"adapter \(PEFT\); merge it"):
        load(ModelConfig(str(both)))


def set_weight(module: Any, weight: Tensor) -> None:
    module.weight = nn.Parameter(weight, requires_grad=False)


def set_data(module: Any, weight: Tensor) -> None:
    module.weight.data = weight


def patch_forward(module: Any) -> None:
    forward = module.forward
    module.forward = lambda x: 2 * forward(x)


UNEVEN = torch.linspace(0.5, 2, 16)
DOWN, QUERY = "model.layers.1.mlp.down_proj", "model.layers.1.self_attn.q_proj"


def scale_entry(module: Any) -> None:
    module._parameters["weight"] = nn.Parameter(module.weight.detach() * 3, requires_grad=False)


def scaled(module: Any, factors: Tensor) -> Tensor:
    return module.weight.data * factors.to(module.weight.dtype)


IN_BOTH_DTYPES: dict[str, Callable[[Any], Any]] = {
    "other data": lambda model: set_data(up := model.model.layers[0].mlp.up_proj, up.weight.data * 2),
    "other data of norms": lambda model: set_data(model.model.norm, scaled(model.model.norm, UNEVEN)),
    "another entry": lambda model: scale_entry(model.get_submodule(QUERY)),
    "by accelerate": lambda model: set_module_tensor_to_device(
        model, f"{DOWN}.weight", "cpu", model.get_submodule(DOWN).weight.detach() * 2
    ),
    "written behind norms": lambda model: model.model.layers[0].input_layernorm.weight.data.mul_(UNEVEN),
    "written behind weights": lambda model: model.lm_head.weight.data.mul_(torch.linspace(0.5, 2, 64)[:, None]),
    "written into norms": lambda model: model.model.norm.weight.mul_(UNEVEN),
}
CHANGES: dict[str, Callable[[Any], Any]] = {
    **IN_BOTH_DTYPES,
    "other weights": lambda model: set_weight(model.get_submodule(QUERY), torch.eye(16)),
    "written into weights": lambda model: model.model.layers[1].mlp.up_proj.weight.mul_(2),
    "loaded": lambda model: model.load_state_dict(make_llama(seed=3).state_dict(), assign=True),
    "another module": lambda model: setattr(model.model.layers[1], "mlp", make_llama(seed=3).model.layers[0].mlp),
    "a bias": lambda model: setattr(
        model.model.layers[1].mlp.up_proj, "bias", nn.Parameter(torch.ones(32), requires_grad=False)
    ),
    "a hook": lambda model: model.model.layers[0].register_forward_hook(lambda module, inputs, output: output * 2),
    "a patched forward": lambda model: patch_forward(model.model.layers[0].mlp),
}


class TestChanged:
    """Changes to an attached model take effect at the next token."""

    @in_turn("name", CHANGES)
    def test_between_streams(self, name: str) -> None:
        other = make_llama()
        CHANGES[name](other)
        expected, model = logits_of(other), make_llama()
        with attach(model, ROOMY):
            logits_of(model)
            CHANGES[name](model)
            assert_close(logits_of(model), expected)

    @in_turn("name, dtype", [
        *((name, torch.float32) for name in CHANGES), *((name, torch.bfloat16) for name in IN_BOTH_DTYPES),
    ])  # fmt: skip
    def test_between_two_tokens(self, name: str, dtype: torch.dtype) -> None:
        parts = torch.randint(3, 64, (1, 24), generator=torch.Generator().manual_seed(0)).split([10, *[1] * 14], 1)
        logits = []
        for engine in ("auto", "eager"):
            model, config = make_llama().to(dtype), CacheConfig(window=16)
            with attach(model, config, engine=engine) as cache:  # type: ignore[arg-type]
                found = [model(part, past_key_values=cache).logits for part in parts[:6]]
                CHANGES[name](model)
                found += [model(part, past_key_values=cache).logits for part in parts[6:]]
            logits.append(torch.cat(found, 1).float())
        if dtype == torch.float32:
            assert_close(*logits)
        else:
            assert error_of(*logits) < 0.1


def test_a_model_that_cannot_be_compiled_gives_the_reason() -> None:
    with (
        pytest.raises(UnsupportedModelError, match=r"torch\.compile"),
        attach(torch.compile(make_llama(), backend="eager")),
    ):
        pass
