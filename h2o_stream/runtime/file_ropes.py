"""RoPE of a model, from the header of a GGUF file and its tables of factors.

Frequencies are computed in float32 as transformers does, so that the numbers are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from h2o_stream.models.gguf import UNROTATED, GgufFile
from h2o_stream.native.matrix import DescriptionError, check_count, require
from h2o_stream.runtime.families.architecture import Architecture
from h2o_stream.runtime.rotations import Floats, RopeParameters, rope_frequencies, yarn_frequencies


@numpy.errstate(all="ignore")
def ropes_of(
    file: GgufFile, architecture: Architecture, head_size: int, sliding: Sequence[int | None]
) -> tuple[RopeParameters | None, ...]:
    """RoPE of each layer by the window of each, None in a layer without positions.

    Raises:
        DescriptionError: it is of a kind that is not known here.
    """

    def get(key: str) -> Any:
        return file.metadata.get(f"{file.architecture}.rope.{key}")

    dims, theta = int(get("dimension_count") or head_size), float(get("freq_base") or 10_000.0)
    whole = _scaled(file, get, theta, dims, architecture.whole_ramp)
    local_theta = float(get("freq_base_swa") or architecture.local_theta or theta)
    local_dims = int(get("dimension_count_swa") or dims)
    local = RopeParameters(rope_frequencies(local_theta, local_dims)) if architecture.local_plain else whole
    slides, every = any(sliding), architecture.unrotated_every
    if architecture.unrotated_if_original and get("scaling.finetuned") is False:
        every = 1
    return tuple(
        None
        if (every and (number + 1) % every == 0) or (architecture.rotates_sliding and slides and window is None)
        else (whole if window is None else local)
        for number, window in enumerate(sliding)
    )


def _scaled(file: GgufFile, get: Callable[[str], Any], theta: float, dims: int, whole_ramp: bool) -> RopeParameters:
    """RoPE with the scaling that the file states."""
    plain = rope_frequencies(theta, dims)
    kind, factor, attention = get("scaling.type"), get("scaling.factor"), float(get("scaling.attn_factor") or 1.0)
    if "rope_factors_short.weight" in file.tensors:
        limit = int(get("scaling.original_context_length"))
        return RopeParameters(plain / rope_factors(file, "rope_factors_short", len(plain)), attention, False, limit)
    if "rope_freqs.weight" in file.tensors:
        factors = rope_factors(file, "rope_freqs", len(plain))
        return RopeParameters(numpy.where(factors < UNROTATED, plain / factors, numpy.float32(0)), attention)
    if kind in (None, "none") or not factor or factor == 1:
        scaled = RopeParameters(plain, attention)
    elif kind == "linear":
        scaled = RopeParameters(plain / numpy.float32(factor), attention)
    elif kind == "yarn":
        scaled = _yarn(file, get, theta, dims, attention, whole_ramp)
    else:
        raise DescriptionError(f"it has RoPE scaling of type {kind}")
    return scaled


def _yarn(
    file: GgufFile, get: Callable[[str], Any], theta: float, dims: int, attention: float, whole_ramp: bool
) -> RopeParameters:
    if (value := get("scaling.yarn_ext_factor")) not in (None, 1):
        raise DescriptionError(f"rope.scaling.yarn_ext_factor is {value}")
    share, factor, context = yarn_share(file), float(get("scaling.factor")), int(get("scaling.original_context_length"))
    if share and not is_latent(file) and f"{file.architecture}.attention.temperature_scale" not in file.metadata:
        raise DescriptionError(f"rope.scaling.yarn_log_multiplier is {share}")
    betas = float(get("scaling.yarn_beta_fast") or 32), float(get("scaling.yarn_beta_slow") or 1)
    frequencies = yarn_frequencies(theta, dims, factor, context, betas, whole_ramp)
    whole = yarn_magnitude(factor, share) if share and is_latent(file) else yarn_magnitude(factor)
    return RopeParameters(frequencies, attention * whole / yarn_magnitude(factor, share))


def is_latent(file: GgufFile) -> bool:
    """Whether keys and values are latent."""
    return f"{file.architecture}.attention.kv_lora_rank" in file.metadata


def yarn_share(file: GgufFile) -> float:
    """The share of YaRN's magnitude that RoPE leaves out; a latent attention has its square in its scaling."""
    share = float(file.metadata.get(f"{file.architecture}.rope.scaling.yarn_log_multiplier") or 0)
    return share / 0.1 if is_latent(file) else share  # their converter multiplies it


def yarn_magnitude(factor: float, share: float = 1.0) -> float:
    """What YaRN multiplies queries and keys by, each."""
    return 0.1 * share * math.log(factor) + 1


def rope_factors(file: GgufFile, name: str, count: int) -> Floats:
    """What divides so many frequencies."""
    tensor = file.tensors[f"{name}.weight"]
    if tensor.type.name != "F32":
        raise DescriptionError(f"its RoPE factors are {tensor.type.name}")
    factors: Floats = file.blocks(tensor).view(numpy.float32)
    check_count(factors, count, f"{name}.weight")
    require(bool((factors > 0).all()), f"{name}.weight has factors that are not positive")
    return factors
