"""HunYuan."""

from h2o_stream.runtime.families.architecture import Architecture, mlp_names

_HUNYUAN = Architecture(model_type="hunyuan_v1_dense", norms_after_rope=True).with_names(
    {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
)

ARCHITECTURES = {
    "hunyuan-dense": _HUNYUAN,
    "hunyuan-moe": _HUNYUAN.with_names(
        mlp_names("mlp.shared_mlp", "_shexp") | {"ffn_gate_inp": "mlp.gate.wg"},
        model_type="hunyuan_v1_moe",
        normalizes_experts=True,
    ),
}
