"""Models that cannot be described are refused with the reason, as are changed modules."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from h2o_stream import CacheConfig, attach
from h2o_stream.attachment.describe import describe
from h2o_stream.native.altup import Versions
from h2o_stream.native.description import DescriptionError
from tests.families import EXPERTS, FAMILIES, GROUPED, PARTIAL, PER_HEAD, SIZES, tiny
from tests.more_families import MORE
from tests.native_builds import needs_library

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "other names": (tiny("GPTBigCode", **SIZES), "gpt_bigcode is not in the table"),
    "norms of each head": (tiny("StableLm", **PER_HEAD, **PARTIAL, qk_layernorm=True),
        "norms of each head"),
    "clipped norms": (tiny("Olmoe", **GROUPED, **EXPERTS, clip_qkv=1.0), "it clips what it has normed"),
    "norms after the sublayers": (tiny("OPT", **{**SIZES, "word_embed_proj_dim": 32, "ffn_dim": 32,
        "do_layer_norm_before": False}), "norms after the blocks"),
    "projected embedding": (tiny("OPT", **{**SIZES, "word_embed_proj_dim": 16, "ffn_dim": 32}),
        "token_embd has 64 rows of 16, not 64 of 32"),
    "activation": (tiny("Llama", **GROUPED, hidden_act="mish"), "its activation is mish"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(DescriptionError, match=reason):
        describe(make())


@pytest.fixture
def llama() -> Any:
    return copy.deepcopy(FAMILIES[1].make())


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * 2


class DoubledLinear(nn.Linear):
    forward = nn.Linear.forward


class TestChanged:
    """Changes to a model's modules are detected; unchanged modules pass."""

    def refused(self, model: Any, reason: str) -> None:
        with pytest.raises(DescriptionError, match=reason):
            describe(model)

    def test_hooks(self, llama: Any) -> None:
        norm = llama.model.layers[1].input_layernorm
        for register in (norm.register_forward_hook, norm.register_forward_pre_hook):
            handle = register(lambda *args: None)
            self.refused(llama, "model.layers.1.input_layernorm has a forward hook")
            handle.remove()
        describe(llama)

    def test_hooks_that_only_look(self, llama: Any) -> None:
        llama(torch.ones(1, 8, dtype=torch.int64), output_hidden_states=True)
        assert any(module._forward_hooks for module in llama.modules())
        describe(llama)

    def test_accelerate(self, llama: Any) -> None:
        llama.model.norm._hf_hook = object()
        self.refused(llama, "model.norm has a hook of accelerate")

    def test_patched_forward(self, llama: Any) -> None:
        mlp = llama.model.layers[0].mlp
        mlp.forward = lambda x: x
        self.refused(llama, "model.layers.0.mlp has a patched forward")

    def test_adapter(self, llama: Any) -> None:
        attention = llama.model.layers[0].self_attn
        attention.q_proj = LoraLinear(attention.q_proj)
        self.refused(llama, "model.layers.0.self_attn.q_proj is a LoraLinear, whose forward is from tests")

    def test_subclass(self, llama: Any) -> None:
        llama.model.layers[0].self_attn.q_proj = DoubledLinear(32, 32)
        self.refused(llama, "q_proj is a DoubledLinear where a linear layer is expected")

    def test_left_over(self, llama: Any) -> None:
        llama.model.layers[0].mlp.extra = nn.Linear(32, 32)
        self.refused(llama, "model.layers.0.mlp.extra.weight is left over")
        del llama.model.layers[0].mlp.extra
        llama.model.layers[0].mlp.scale = nn.Parameter(torch.ones(1))
        self.refused(llama, "model.layers.0.mlp.scale is left over")

    def test_other_numbers(self, llama: Any) -> None:
        self.refused(llama.half(), "weights of float16")

    def test_elsewhere(self, llama: Any) -> None:
        self.refused(llama.to("meta"), "has weights that are not there")

    def test_not_contiguous(self, llama: Any) -> None:
        linear = llama.model.layers[0].mlp.up_proj
        linear.weight = nn.Parameter(linear.weight.detach().T.contiguous().T)
        self.refused(llama, "up_proj has weights that are not contiguous")

    def test_training(self, llama: Any) -> None:
        describe(llama.train())
        llama.model.layers[1].self_attn.attention_dropout = 0.1
        self.refused(llama, "model.layers.1.self_attn uses dropout in training mode")
        describe(llama.eval())


@needs_library
@pytest.mark.parametrize("change", [
    lambda layer: setattr(layer.self_attn, "scaling", 0.5),
    lambda layer: setattr(layer.mlp, "act_fn", nn.Mish()),
    lambda layer: setattr(layer.post_attention_layernorm, "variance_epsilon", 0.5),
])  # fmt: skip
def test_what_only_logits_show(change: Callable[[Any], None], llama: Any) -> None:
    """Also of a model that ran natively before."""
    config = CacheConfig(window=12)
    with attach(llama, config) as cache:
        assert cache.engine_note.startswith("native")
    change(llama.model.layers[1])
    with attach(llama, config) as cache:
        assert not cache.engine_note.startswith("native")


def test_a_router_without_a_norm_is_refused() -> None:
    model = copy.deepcopy(MORE["Gemma 3n, three versions"]())
    model.model.layers[1].altup.router_norm = nn.Identity()
    with pytest.raises(DescriptionError, match="it has no altup_router_norm"):
        describe(model)


def test_too_many_versions_are_refused() -> None:
    versions = describe(MORE["Gemma 3n, three versions"]()).versions
    assert versions is not None
    with pytest.raises(DescriptionError, match="there are 5 versions"):
        Versions(versions.first * 2, versions.last * 2, 0)
