"""The parameters of a GGUF file, from its header."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from h2o_stream.models.gguf import GgufFile
from h2o_stream.native.abi import NormKind, Scoring
from h2o_stream.native.description import DescriptionError
from h2o_stream.native.latent import LatentSizes
from h2o_stream.runtime.config_ropes import latent_magnitude
from h2o_stream.runtime.families import ARCHITECTURES
from h2o_stream.runtime.families.architecture import EMBEDDING, OUTPUT, Architecture
from h2o_stream.runtime.file_ropes import rope_of_file, ropes_of
from h2o_stream.runtime.gguf_checks import check_rope, check_sizes
from h2o_stream.runtime.parameters import (
    AltUpParameters,
    ExpertParameters,
    LayerShape,
    MixerParameters,
    Parameters,
    tensor_name,
)

_READ = """
activation_sparsity_scale altup.active_idx altup.num_inputs
attention.head_count attention.head_count_kv attention.key_length attention.key_length_mla attention.key_length_swa
attention.kv_lora_rank attention.layer_norm_epsilon attention.q_lora_rank attention.recurrent_layers
attention.shared_kv_layers attention.value_length_mla attention.value_length_swa embedding_length_per_layer_input
rope.dimension_count_swa
attention.layer_norm_rms_epsilon attention.scale attention.sliding_window attention.sliding_window_pattern
attention.temperature_scale rope.scaling.yarn_log_multiplier
attention.value_length attn_logit_softcapping block_count context_length embedding_length embedding_scale
expert_count expert_feed_forward_length expert_gating_func expert_group_count expert_group_used_count
expert_shared_count expert_shared_feed_forward_length expert_used_count expert_weights_norm expert_weights_scale
feed_forward_length final_logit_softcapping full_attention_interval
interleave_moe_layer_step leading_dense_block_count logit_scale nextn_predict_layers residual_scale
rope.dimension_count rope.dimension_sections rope.freq_base rope.freq_base_swa rope.scale_linear
rope.scaling.attn_factor
rope.scaling.factor rope.scaling.finetuned rope.scaling.original_context_length rope.scaling.type
rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.yarn_ext_factor shortconv.l_cache
ssm.conv_kernel ssm.group_count ssm.inner_size ssm.state_size ssm.time_step_rank vocab_size
"""
_KEYS = frozenset(_READ.split())
"""Keys of GGUF files that are read, or follow from weights."""

_NEUTRAL = {
    "attention.causal": (True,),
    "rope.scaling.yarn_attn_factor": (1,),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
"""Keys that are not, with values that change nothing."""

NOT_WEIGHTS = re.compile(r"rope_(freqs|factors_(long|short))\.weight|blk\.\d+\.attn_rot_embd")
"""Tensors of GGUF files that are no weights in transformers."""


def parameters_of_gguf(file: GgufFile) -> Parameters:
    """The parameters of a GGUF file.

    Raises:
        DescriptionError: it has parameters or weights that are not known here, or misses one.
        ModelNotFoundError: its parameters do not fit each other or the weights.
    """
    check_sizes(file)
    check_rope(file)
    name, metadata = file.architecture, file.metadata
    if name not in ARCHITECTURES:
        raise DescriptionError(f"{name} is not in the table of architectures")
    architecture = ARCHITECTURES[name]

    def get(key: str) -> Any:
        return metadata.get(f"{name}.{key}")

    for key, value in file.metadata.items():
        inner = key.removeprefix(f"{name}.")
        if inner != key and inner not in _KEYS and value not in _NEUTRAL.get(inner, ()):
            raise DescriptionError(f"{key} is {value}")
    try:
        heads, hidden = int(get("attention.head_count")), int(get("embedding_length"))
        count = int(get("block_count")) - int(get("nextn_predict_layers") or 0)
        _check_names(file, architecture, count)
        latent = _latent(get)
        head_size = latent.head_size if latent else int(get("attention.key_length") or hidden // heads)
        if not latent and int(get("attention.value_length") or head_size) != head_size:
            raise DescriptionError("heads of keys and values have different sizes")
        epsilon, sliding = get("attention.layer_norm_rms_epsilon"), _sliding(architecture, count, get)
        plain_scaling = (
            architecture.scaling
            or (hidden / heads if architecture.scales_by_hidden_at_layers == count else head_size) ** -0.5
        )
        logit_scale, shared_layers = float(get("logit_scale") or 1.0), get("attention.shared_kv_layers")
        has_versions = "blk.0.altup_router.weight" in file.tensors
        return Parameters(
            num_layers=count,
            hidden_size=hidden,
            inner_size=_largest(get("feed_forward_length")),
            vocabulary=file.tensors[f"{EMBEDDING}.weight"].shape[0],
            query_heads=heads,
            kv_heads=heads if latent else _largest(get("attention.head_count_kv")) or heads,
            head_size=head_size,
            norm=architecture.norm or (NormKind.LAYER if epsilon is None else NormKind.RMS),
            epsilon=float(get("attention.layer_norm_epsilon") if epsilon is None else epsilon),
            context=int(get("context_length")),
            ropes=ropes_of(file, architecture, head_size, sliding),
            tied=f"{OUTPUT}.weight" not in file.tensors,
            scaling=float(get("attention.scale") or plain_scaling)
            * (latent_magnitude(rope_of_file(file, architecture, latent.rope_size)) if latent else 1.0),
            sliding=sliding,
            softcap=float(metadata.get(f"{name}.attn_logit_softcapping", architecture.softcaps[0])),
            logit_softcap=float(metadata.get(f"{name}.final_logit_softcapping", architecture.softcaps[1])),
            embedding_scale=float(get("embedding_scale") or (hidden**0.5 if architecture.scales_embeddings else 1.0)),
            residual_scale=float(get("residual_scale") or 1.0),
            logit_scale=1 / logit_scale if architecture.divides_logits else logit_scale,
            temperature=(float(scale), int(get("rope.scaling.original_context_length")))
            if (scale := get("attention.temperature_scale"))
            else None,
            norms_after_rope=architecture.norms_after_rope and "blk.0.attn_q_norm.weight" in file.tensors,
            experts=_experts(file, architecture, get) if get("expert_count") else None,
            latent=latent,
            layer_shapes=_layer_shapes(count, head_size, sliding, get),
            shared_kv_layers=int(shared_layers if has_versions else shared_layers or 0),
            own_embedding=int(get("embedding_length_per_layer_input") or 0),
            altup=_altup(file, get) if has_versions else None,
            latent_queries=int(get("attention.q_lora_rank") or 0),
            mixer=_mixer(get) if get("ssm.time_step_rank") else None,
        )
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise DescriptionError(f"a parameter is missing or no number: {error}") from error


def _latent(get: Callable[[str], Any]) -> LatentSizes | None:
    """Sizes of latent keys and values. Newer files have those of all heads together where older ones have a head's."""
    if not (rank := get("attention.kv_lora_rank")):
        return None
    size, value_size = (get(f"attention.{name}_length_mla") or get(f"attention.{name}_length") for name in _KEY_VALUE)
    rotated = int(get("rope.dimension_count"))
    return LatentSizes(int(rank), rotated, int(size) - rotated, int(value_size))


_KEY_VALUE = ("key", "value")


def _largest(sizes: Any) -> int:
    """Largest size over the layers; a file gives one number or a list."""
    return max(map(int, sizes)) if isinstance(sizes, list) else int(sizes or 0)


def _altup(file: GgufFile, get: Callable[[str], Any]) -> AltUpParameters:
    deviations = [float(number) for number in get("activation_sparsity_scale")]
    return AltUpParameters(
        int(get("altup.num_inputs")),
        int(get("altup.active_idx")),
        file.tensors["blk.0.laurel_l.weight"].shape[0],
        tuple(None if number == -math.inf else number for number in deviations),
    )


def _mixer(get: Callable[[str], Any]) -> MixerParameters:
    heads = int(get("ssm.time_step_rank"))
    return MixerParameters(
        int(get("ssm.group_count")), heads, int(get("ssm.state_size")), int(get("ssm.inner_size")) // heads
    )


def _layer_shapes(
    layers: int, head_size: int, sliding: Sequence[int | None], get: Callable[[str], Any]
) -> tuple[LayerShape, ...]:
    """Sizes of each layer, if layers with a sliding window have heads of their own size.

    Raises:
        DescriptionError: heads of keys and values have different sizes.
    """
    local = get("attention.key_length_swa")
    if local is None:
        return ()
    if local != get("attention.value_length_swa"):
        raise DescriptionError("heads of keys and values have different sizes")
    heads, inner = (
        size if isinstance(size, list) else [size] * layers
        for size in (get("attention.head_count_kv"), get("feed_forward_length"))
    )
    return tuple(
        LayerShape(head_size if window is None else int(local), int(heads[number]), int(inner[number]))
        for number, window in enumerate(sliding)
    )


def _check_names(file: GgufFile, architecture: Architecture, layers: int) -> None:
    """Check that the weights of a file are among those of its architecture; later layers only guess further tokens."""
    for name in file.tensors:
        layer, inner, _ = tensor_name(name)
        known = inner in architecture.checkpoint_names or inner in architecture.stored_as_in_gguf
        if not known and not NOT_WEIGHTS.fullmatch(name) and (layer is None or layer < layers):
            raise DescriptionError(f"it has {name}")


def _sliding(architecture: Architecture, layers: int, get: Callable[[str], Any]) -> tuple[int | None, ...]:
    """The sliding window of each layer."""
    window, every = get("attention.sliding_window"), architecture.full_every
    slides = get("attention.sliding_window_pattern")
    if not isinstance(slides, list):
        every = slides or every
        slides = [not every or (number + 1) % every != 0 for number in range(layers)]
    return tuple(int(window) if window and slides[number] else None for number in range(layers))


_SCORINGS = {1: Scoring.SOFTMAX, 2: Scoring.SIGMOID, 3: Scoring.SOFTMAX}
"""By llama.cpp's number, ``expert_gating_func``."""


def _experts(file: GgufFile, architecture: Architecture, get: Callable[[str], Any]) -> ExpertParameters:
    normalized, scoring = get("expert_weights_norm"), get("expert_gating_func")
    groups, chosen_groups = (int(get(f"expert_group_{name}") or 1) for name in ("count", "used_count"))
    matrices = {name: tensor for name, tensor in file.tensors.items() if re.search(r"ffn_(gate_)?up_\w+\.weight", name)}
    sizes = {name.split(".")[2]: tensor.shape[-2] for name, tensor in matrices.items()}
    return ExpertParameters(
        count=int(get("expert_count")),
        chosen=int(get("expert_used_count")),
        inner_size=sizes["ffn_up_exps"] if "ffn_up_exps" in sizes else sizes["ffn_gate_up_exps"] // 2,
        shared_size=sizes.get("ffn_up_shexp", 0),
        scoring=_SCORINGS[scoring] if scoring else architecture.scoring,
        normalized=architecture.normalizes_experts if normalized is None else bool(normalized),
        scale=float(get("expert_weights_scale") or 1.0),
        groups=groups if groups > chosen_groups else 0,
        chosen_groups=chosen_groups if groups > chosen_groups else 0,
    )
