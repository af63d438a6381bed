"""Command R, R7B and A; their norms have no bias, and there are none of queries and keys."""

from dataclasses import replace

from h2o_stream.runtime.families.architecture import FINAL_NORM, NAMES, Architecture

_COHERE = Architecture(
    model_type="cohere",
    adjacent=True,
    parallel=True,
    norms={"before_attention": "attn_norm", "before_mlp": "attn_norm"},
    checkpoint_names={
        name: part for name, part in NAMES.items() if not name.endswith("_norm") or name in ("attn_norm", FINAL_NORM)
    },
)

ARCHITECTURES = {
    "command-r": _COHERE,
    "cohere2": replace(_COHERE, model_type="cohere2", full_every=4, rotates_sliding=True),
}
