"""Command R, R7B and A; their norms have no bias, and there are none of queries and keys."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from h2o_stream.native.abi import NormKind
from h2o_stream.runtime.families.architecture import AS_MLP, FINAL_NORM, NAMES, Architecture, ModelType

_COHERE = Architecture(
    model_type="cohere",
    adjacent=True,
    parallel=True,
    norm=NormKind.LAYER,
    norms={"before_attention": "attn_norm", "before_mlp": "attn_norm"},
    checkpoint_names={
        name: part for name, part in NAMES.items() if not name.endswith("_norm") or name in ("attn_norm", FINAL_NORM)
    },
)

_COHERE_2 = replace(_COHERE, model_type="cohere2", full_every=4, rotates_sliding=True)


def _checked(config: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ValueError for what no published model has: shared experts, dense layers, norms of queries."""
    named = ("use_qk_norm", "rms_norm_eps", "num_shared_experts")
    if any(config.get(name) for name in named) or "dense" in (config.get("mlp_layer_types") or ()):
        raise ValueError("norms of queries, dense layers, or shared experts")
    return {}


ARCHITECTURES = {"command-r": _COHERE, "cohere2": _COHERE_2}
MODEL_TYPES = {
    "cohere": ModelType(_COHERE, numbers=_checked),
    "cohere2": ModelType(_COHERE_2),
    "cohere2_moe": ModelType(
        _COHERE_2.with_names({}, normalizes_experts=True),
        fixed=AS_MLP,
        numbers=_checked,
    ),
}
