"""RoPE of a model, from its ``config.json``; frequencies are computed in float32 as transformers does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy

from h2o_stream.models.gguf import UNROTATED
from h2o_stream.native.matrix import DescriptionError, check_count
from h2o_stream.runtime.families.architecture import Architecture
from h2o_stream.runtime.rotations import Floats, RopeParameters, rope_frequencies, yarn_frequencies, yarn_magnitude

Config = Mapping[str, Any]


def ropes_of_config(
    config: Config, architecture: Architecture, sizes: Sequence[int], sliding: Sequence[int | None]
) -> tuple[RopeParameters | None, ...]:
    """RoPE of each layer by the size of what it rotates and by its window, None in a layer without positions.

    Raises:
        DescriptionError: it is of a kind that is not known here.
        ArithmeticError, LookupError, TypeError, ValueError: an entry is missing or no number.
    """
    (local, main), thetas = rope_entries(config, architecture), config.get("layer_rope_theta")
    context, rotating = int(config["max_position_embeddings"]), config.get("no_rope_layers")
    unrotated = architecture.unrotated_if_original and config.get("position_embedding_type") != "rope"

    @cache
    def rope(size: int, is_local: bool, theta: float | None) -> RopeParameters:
        entries = local if is_local else main
        return scaled_rope(entries if theta is None else {**entries, "rope_theta": theta}, size, context)

    def of_layer(number: int) -> RopeParameters | None:
        theta = None if thetas is None else float(thetas[number])
        rotates = architecture.rotates(number, sliding[number], bool(config.get("sliding_window")))
        if theta == 0 or unrotated or not (rotates if rotating is None else rotating[number]):
            return None
        return rope(sizes[number], sliding[number] is not None, theta)

    return tuple(of_layer(number) for number in range(len(sliding)))


def rope_entries(config: Config, architecture: Architecture) -> tuple[Config, Config]:
    """The entries for RoPE in layers with a sliding window, and in all others."""
    entries = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    named = {key: config[key] for key in entries if config.get(key) is not None}
    if config.get("rotary_dim") is not None and config.get("head_dim"):
        named["partial_rotary_factor"] = config["rotary_dim"] / config["head_dim"]
    rope = config.get("rope_parameters")
    if rope is not None and "full_attention" in rope:
        return rope["sliding_attention"], rope["full_attention"]
    scaling = rope or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    main = {**named, **scaling, "rope_type": kind}
    theta = config.get("rope_local_base_freq")
    return ({**named, "rope_theta": theta or main["rope_theta"]} if theta or architecture.local_plain else main), main


def scaled_rope(rope: Config, size: int, context: int) -> RopeParameters:
    """RoPE of a head of this size, as these entries scale it, in a model for so many positions.

    GGUF files have two things more than transformers: `scale`, on what is rotated by plain or linear RoPE, and the type
    `factors`, for a table of what divides frequencies.
    """
    kind, theta, share = rope.get("rope_type", "default"), float(rope["rope_theta"]), _share(rope)
    if kind == "proportional":
        turned = int(share * size // 2)
        frequencies = rope_frequencies(theta, size) / numpy.float32(rope.get("factor", 1.0))
        return RopeParameters(numpy.where(numpy.arange(len(frequencies)) < turned, frequencies, numpy.float32(0)))
    dims = int(size * share)
    plain = rope_frequencies(theta, dims)
    original = rope.get("original_max_position_embeddings") or context
    scale = float(rope.get("scale", 1.0))
    if kind == "default":
        return RopeParameters(plain, scale)
    if kind == "factors":
        factors = rope["factors"]
        return RopeParameters(numpy.where(factors < UNROTATED, plain / factors, numpy.float32(0)), scale)
    if kind == "dynamic" and rope.get("alpha"):  # a constant base, whatever it is called
        return RopeParameters(rope_frequencies(theta * float(rope["alpha"]) ** (dims / (dims - 2)), dims))
    if kind == "dynamic":  # as it is up to the length that it was trained for
        return RopeParameters(plain, fixed=False, max_distance=context)
    factor = float(rope.get("factor") or context / original)
    if kind == "linear":
        return RopeParameters(plain / numpy.float32(factor), scale)
    if kind == "llama3":
        return RopeParameters(_llama3_frequencies(rope, plain))
    if kind == "longrope":
        factors = numpy.array(rope["short_factor"], numpy.float32)
        check_count(factors, len(plain), "short_factor")
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        scale = float(rope.get("attention_factor") or scale)
        return RopeParameters(plain / factors, scale, fixed=False, max_distance=int(original))
    if kind != "yarn":
        raise DescriptionError(f"it has RoPE of type {kind}")
    betas = float(rope.get("beta_fast") or 32), float(rope.get("beta_slow") or 1)
    frequencies = yarn_frequencies(theta, dims, factor, int(original), betas, bool(rope.get("truncate", True)))
    return RopeParameters(frequencies, float(rope.get("attention_factor") or yarn_scale(rope, factor)))


def _share(rope: Config) -> float:
    """The share of a head that is rotated."""
    share = rope.get("partial_rotary_factor")
    return 1.0 if share is None else float(share)


def yarn_scale(rope: Config, factor: float) -> float:
    """What YaRN multiplies rotated queries and keys by, each."""
    shares = [float(rope.get(key) or 0) for key in ("mscale", "mscale_all_dim")]
    if factor <= 1:
        return 1.0
    return (
        yarn_magnitude(factor, shares[0]) / yarn_magnitude(factor, shares[1]) if all(shares) else yarn_magnitude(factor)
    )


def latent_magnitude(rope: Config) -> float:
    """What YaRN multiplies queries times keys by in a latent attention, beside what RoPE does."""
    share, factor = float(rope.get("mscale_all_dim") or 0), float(rope.get("factor") or 1)
    return yarn_magnitude(factor, share) ** 2 if share and factor > 1 else 1.0


@numpy.errstate(all="ignore")
def _llama3_frequencies(rope: Config, plain: Floats) -> Floats:
    factor, low, high, original = (
        float(rope[key])
        for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    lengths = numpy.float32(2 * math.pi) / plain
    smooth = (numpy.float32(original) / lengths - numpy.float32(low)) / numpy.float32(high - low)
    between = (1 - smooth) * (plain / numpy.float32(factor)) + smooth * plain
    long, short = lengths > original / low, lengths < original / high
    scaled: Floats = numpy.where(long, plain / numpy.float32(factor), numpy.where(short, plain, between))
    return scaled.astype(numpy.float32)
