"""Mamba-2 natively: sizes that no vector divides, forms of the norm, factors, limits of steps."""

from __future__ import annotations

from typing import Any

import pytest

from h2o_stream import CacheConfig
from h2o_stream.attachment.describe import describe
from h2o_stream.attachment.verification import Verification
from h2o_stream.native.description import DescriptionError
from tests.families import FAMILIES, GROUPED, MULTIPLIERS, STATE_SPACE, nudged, tiny
from tests.native_builds import needs_library
from tests.native_streams import EXACT, streamed, tokens_of
from tests.tolerance import relative_error

pytestmark = needs_library

SIZES = {"mamba_n_heads": 4, "mamba_d_head": 25, "mamba_n_groups": 2, "mamba_d_ssm": 100}
FORMS = {
    "many columns": {"mamba_d_state": 237},
    "norm after the gate": {"mamba_d_state": 72, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "norm before the gate": {"mamba_d_state": 7, "mamba_rms_norm": True, "mamba_norm_before_gate": True},
    "biases and factors": {"mamba_d_state": 16, "mamba_proj_bias": True, "projectors_bias": True, "mlp_bias": True,
        "attention_bias": True, "mamba_conv_bias": False, **MULTIPLIERS},
}  # fmt: skip


def nemotron() -> Any:
    return nudged(next(family for family in FAMILIES if family.name == "Nemotron-H").make())


def limit(model: Any) -> None:
    """Steps of the first layer, in the module and in the config."""
    model.model.layers[0].mixer.time_step_limit = model.config.time_step_limit = (0.9, 1.0)
    model.config.time_step_min = 0.9


@pytest.mark.every(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("dense_too")
def test_sizes_and_forms(form: str) -> None:
    """Prompts of several blocks of tokens, single ones, and a turn of several; against transformers."""
    model = nudged(tiny("FalconH1", **GROUPED, **{**STATE_SPACE, **SIZES, **FORMS[form]})())
    tokens, config = tokens_of(2, 70), CacheConfig(window=80)
    ours, theirs = (streamed(model, config, tokens, engine, parts=[37, 1, 1, 1])[0] for engine in ("auto", "eager"))
    assert relative_error(ours, theirs) < EXACT


def test_factors_are_scales_of_matrices() -> None:
    """Weights are not copied, and parts of the projection have factors of their own."""
    model = tiny("FalconH1", **GROUPED, **{**STATE_SPACE, "mamba_d_state": 16}, **MULTIPLIERS, mamba_d_ssm=32)()
    layer = describe(model).layers[0]
    assert layer.mixer is not None
    assert layer.attention is not None
    found = [matrix.scale for matrix in layer.mixer.projections]
    assert found == pytest.approx([1.3 * factor for factor in MULTIPLIERS["ssm_multipliers"]])
    assert [matrix.scale for matrix in layer.attention.qkv] == pytest.approx([0.9, 0.9 * 0.8, 0.9])
    assert [layer.attention.out.scale, layer.mixer.out.scale] == pytest.approx([1.1, 0.5])
    assert layer.mixer.projections[0].weights.data_ptr() == model.model.layers[0].mamba.in_proj.weight.data_ptr()


@pytest.mark.usefixtures("dense_too")
def test_steps_are_limited_as_transformers_limits_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """In prompts and for a stream's first token, but not for single tokens later, so that its own routes differ."""
    monkeypatch.setattr(Verification, "cached", lambda self, engine, check: "")
    model, tokens = nemotron(), tokens_of(1, 60)
    limit(model)
    assert describe(model).layers[0].mixer.step_limits == (0.9, 1.0)
    for parts in ([1, 1], [30, 1, 1], [30]):
        ours, theirs = (
            streamed(model, CacheConfig(window=80), tokens, engine, parts=parts)[0] for engine in ("auto", "eager")
        )
        assert relative_error(ours, theirs) < EXACT


def test_latent_experts_are_refused() -> None:
    config = {key: GROUPED[key] for key in GROUPED if key not in ("num_hidden_layers", "initializer_range")}
    model = tiny("NemotronH", **config, layer_types=["linear_attention", "moe"], mamba_num_heads=4, mamba_head_dim=8,
        n_groups=1, ssm_state_size=8, n_routed_experts=4, moe_intermediate_size=16, moe_latent_size=16,
        moe_shared_expert_intermediate_size=16, initializer_range=0.1)()  # fmt: skip
    with pytest.raises(DescriptionError, match="64 rows of 16"):
        describe(model)
