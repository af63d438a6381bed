"""RoPE of a model, from the header of a GGUF file and its tables of factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from h2o_stream.models.gguf import GgufFile
from h2o_stream.native.matrix import DescriptionError, check_count, require
from h2o_stream.runtime.config_ropes import scaled_rope, yarn_scale
from h2o_stream.runtime.families.architecture import Architecture
from h2o_stream.runtime.rotations import Floats, RopeParameters, rope_frequencies


@numpy.errstate(all="ignore")
def ropes_of(
    file: GgufFile, architecture: Architecture, head_size: int, sliding: Sequence[int | None]
) -> tuple[RopeParameters | None, ...]:
    """RoPE of each layer by the window of each, None in a layer without positions.

    Raises:
        DescriptionError: it is of a kind that is not known here.
    """
    dims, main = int(_get(file, "dimension_count") or head_size), rope_of_file(file, architecture, head_size)
    whole = scaled_rope(main, dims, int(file.metadata[f"{file.architecture}.context_length"]))
    local_dims = int(_get(file, "dimension_count_swa") or dims)
    local_theta = local_theta_of(file, architecture, main["rope_theta"])
    local = RopeParameters(rope_frequencies(local_theta, local_dims)) if architecture.local_plain else whole
    if architecture.unrotated_if_original and _get(file, "scaling.finetuned") is False:
        return (None,) * len(sliding)
    return tuple(
        (whole if window is None else local) if architecture.rotates(number, window, any(sliding)) else None
        for number, window in enumerate(sliding)
    )


def _get(file: GgufFile, key: str) -> Any:
    return file.metadata.get(f"{file.architecture}.rope.{key}")


def local_theta_of(file: GgufFile, architecture: Architecture, theta: float) -> float:
    """The base in layers with a sliding window, where that of the others is `theta`."""
    return float(_get(file, "freq_base_swa") or architecture.local_theta or theta)


def rope_of_file(file: GgufFile, architecture: Architecture, head_size: int) -> dict[str, Any]:
    """RoPE in layers without a sliding window, as ``rope_parameters`` of transformers; see `scaled_rope` for others.

    Raises:
        DescriptionError: it is of a kind that is not known here.
    """
    kind, factor, scale = (_get(file, f"scaling.{key}") for key in ("type", "factor", "attn_factor"))
    pairs, scale = int(_get(file, "dimension_count") or head_size) // 2, float(scale or 1.0)
    rope = {"rope_theta": float(_get(file, "freq_base") or 10_000.0), "rope_type": "default", "scale": scale}
    if "rope_factors_short.weight" in file.tensors:
        rope = {**rope, "rope_type": "longrope", "scale": 1.0, "attention_factor": scale}
        rope["original_max_position_embeddings"] = int(_get(file, "scaling.original_context_length"))
        return rope | {f"{x}_factor": _factors(file, f"rope_factors_{x}", pairs).tolist() for x in ("short", "long")}
    if "rope_freqs.weight" in file.tensors:
        return rope | {"rope_type": "factors", "factors": _factors(file, "rope_freqs", pairs)}
    factor = factor or _get(file, "scale_linear")
    if kind == "none" or not factor or factor == 1:
        return rope
    if kind == "yarn":
        return {**rope, **_yarn(file, float(factor), scale, architecture.whole_ramp), "scale": 1.0}
    require(kind in (None, "linear"), f"it has RoPE scaling of type {kind}")
    return rope | {"rope_type": "linear", "factor": factor}


def _yarn(file: GgufFile, factor: float, scale: float, whole_ramp: bool) -> dict[str, Any]:
    """YaRN; a file's factor on queries and keys is on top of what follows from the other one."""
    if (value := _get(file, "scaling.yarn_ext_factor")) not in (None, 1):
        raise DescriptionError(f"rope.scaling.yarn_ext_factor is {value}")
    share = float(_get(file, "scaling.yarn_log_multiplier") or 0)
    heat = file.metadata.get(f"{file.architecture}.attention.temperature_scale")
    is_latent = f"{file.architecture}.attention.kv_lora_rank" in file.metadata
    require(not share or is_latent or heat is not None, f"rope.scaling.yarn_log_multiplier is {share}")
    rope = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": int(_get(file, "scaling.original_context_length")),
        "beta_fast": _get(file, "scaling.yarn_beta_fast"),
        "beta_slow": _get(file, "scaling.yarn_beta_slow"),
        "llama_4_scaling_beta": heat,
        "mscale": share / 0.1 if is_latent else 1.0 if heat else 0.0,  # the converter multiplies it
        "mscale_all_dim": share / 0.1 if is_latent else share,
    }
    rope = {name: value for name, value in rope.items() if value} | ({} if whole_ramp else {"truncate": False})
    return rope if scale == 1 else rope | {"attention_factor": scale * yarn_scale(rope, factor)}


def _factors(file: GgufFile, name: str, count: int) -> Floats:
    """What divides so many frequencies."""
    tensor = file.tensors[f"{name}.weight"]
    if tensor.type.name != "F32":
        raise DescriptionError(f"its RoPE factors are {tensor.type.name}")
    factors: Floats = file.blocks(tensor).view(numpy.float32)
    check_count(factors, count, f"{name}.weight")
    require(bool((factors > 0).all()), f"{name}.weight has factors that are not positive")
    return factors
