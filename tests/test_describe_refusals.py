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


CHANGES: list[tuple[Callable[[Any, Any], Any], str]] = [
    (lambda llama, _: setattr(llama.model.norm, "_hf_hook", object()), "model.norm has a hook of accelerate"),
    (lambda _, layer: setattr(layer.mlp, "forward", lambda x: x), "model.layers.1.mlp has a patched forward"),
    (lambda _, layer: setattr(layer.self_attn, "q_proj", LoraLinear(layer.self_attn.q_proj)),
        "model.layers.1.self_attn.q_proj is a LoraLinear, whose forward is from tests"),
    (lambda _, layer: setattr(layer.self_attn, "q_proj", DoubledLinear(32, 32)),
        "q_proj is a DoubledLinear where a linear layer is expected"),
    (lambda _, layer: setattr(layer.mlp, "extra", nn.Linear(32, 32)), "model.layers.1.mlp.extra.weight is left over"),
    (lambda _, layer: setattr(layer.mlp, "scale", nn.Parameter(torch.ones(1))), "layers.1.mlp.scale is left over"),
    (lambda llama, _: llama.half(), "weights of float16"),
    (lambda llama, _: llama.to("meta"), "has weights that are not there"),
    (lambda _, layer: setattr(layer.mlp.up_proj, "weight", nn.Parameter(torch.ones(32, 32).T[:, ::2])),
        "up_proj has weights that are not contiguous"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), CHANGES)
def test_changed_modules_are_refused(llama: Any, change: Callable[[Any, Any], Any], reason: str) -> None:
    change(llama, llama.model.layers[1])
    with pytest.raises(DescriptionError, match=reason):
        describe(llama)


def test_hooks(llama: Any) -> None:
    """Those that only look are taken."""
    llama(torch.ones(1, 8, dtype=torch.int64), output_hidden_states=True)
    assert any(module._forward_hooks for module in llama.modules())
    norm = llama.model.layers[1].input_layernorm
    for register in (norm.register_forward_hook, norm.register_forward_pre_hook):
        describe(llama)
        handle = register(lambda *args: None)
        with pytest.raises(DescriptionError, match="model.layers.1.input_layernorm has a forward hook"):
            describe(llama)
        handle.remove()


def test_training(llama: Any) -> None:
    describe(llama.train())
    llama.model.layers[1].self_attn.attention_dropout = 0.1
    with pytest.raises(DescriptionError, match="model.layers.1.self_attn uses dropout in training mode"):
        describe(llama)
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
