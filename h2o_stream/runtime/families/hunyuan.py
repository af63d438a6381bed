"""HunYuan."""

from h2o_stream.native.abi import Scoring
from h2o_stream.runtime.families.architecture import AS_MLP, Architecture, ModelType, mlp_names

_HUNYUAN = Architecture(model_type="hunyuan_v1_dense", norms_after_rope=True).with_names(
    {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
)

_MOE = _HUNYUAN.with_names(
    mlp_names("mlp.shared_mlp", "_shexp") | {"ffn_gate_inp": "mlp.gate.wg"},
    model_type="hunyuan_v1_moe",
    normalizes_experts=True,
)

ARCHITECTURES = {"hunyuan-dense": _HUNYUAN, "hunyuan-moe": _MOE}
MODEL_TYPES = {
    "hunyuan_v1_dense": ModelType(_HUNYUAN),
    "hunyuan_v1_moe": ModelType(_MOE, fixed={**AS_MLP, "num_shared_experts": 1}),
    "hy_v3": ModelType(
        Architecture(scoring=Scoring.SIGMOID).with_names(
            mlp_names("mlp.shared_mlp", "_shexp")
            | {"ffn_gate_inp": "mlp.router.gate", "exp_probs_b": "mlp.expert_bias"}
        ),
        fixed={"norm_topk_prob": True},
    ),
}
