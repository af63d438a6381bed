"""RoPE of a GGUF file as transformers' configs have it."""

from __future__ import annotations

import math
from typing import Any

import numpy

from h2o_stream.errors import UnsupportedModelError
from h2o_stream.models.gguf import UNROTATED, GgufFile
from h2o_stream.runtime.families import ARCHITECTURES
from h2o_stream.runtime.file_ropes import local_theta_of, rope_of_file
from h2o_stream.runtime.parameters import Parameters
from h2o_stream.runtime.rotations import Floats

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Llama 3.1, 3.2 and 3.3 share these; only their factor differs (8 or 32)."""


def set_rope(config: Any, file: GgufFile, parameters: Parameters) -> None:
    """Set ``rope_parameters`` of a config; raises UnsupportedModelError if transformers has no equivalent."""
    ropes, architecture = config.rope_parameters, ARCHITECTURES[file.architecture]
    size = parameters.latent.rope_size if parameters.latent else parameters.head_size
    rope, whole = rope_of_file(file, architecture, size), ropes.get("full_attention", ropes)
    scale, factors = rope.pop("scale"), rope.pop("factors", None)
    if whole is not ropes:
        ropes["sliding_attention"]["rope_theta"] = local_theta_of(file, architecture, rope["rope_theta"])
    if scale != 1:
        raise _unsupported(file, f"rope.scaling.attn_factor {scale} without YaRN")
    dims = file.metadata.get(f"{file.architecture}.rope.dimension_count") or size
    if parameters.layer_shapes:
        rope |= _proportional(file, factors)
    elif factors is not None:
        rope |= _llama3(file, factors, rope["rope_theta"])
    if not parameters.layer_shapes and (dims != size or "partial_rotary_factor" in whole):
        rope["partial_rotary_factor"] = dims / size
    whole.update(rope)


def _unsupported(file: GgufFile, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{file.path.name} has {what}; its output would be wrong")


def _proportional(file: GgufFile, factors: Floats) -> dict[str, Any]:
    """RoPE that leaves the slowest pairs of elements as they are."""
    rotated = int((factors == 1).sum())
    if not (numpy.all(factors[:rotated] == 1) and numpy.all(factors[rotated:] >= UNROTATED)):
        raise _unsupported(file, "RoPE factors that are neither 1 nor stand for no rotation")
    return {"rope_type": "proportional", "partial_rotary_factor": rotated / len(factors)}


def _llama3(file: GgufFile, factors: Floats, theta: float) -> dict[str, Any]:
    """Llama 3's scaling, if it reproduces the factors in the file."""
    if numpy.all(factors == 1):
        return {"rope_type": "default"}
    factor, (low, high, context) = float(factors.max()), _LLAMA3.values()
    wavelengths = 2 * math.pi * theta ** (numpy.arange(len(factors)) / len(factors))
    smooth = ((context / wavelengths - low) / (high - low)).clip(0, 1)
    if not numpy.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
        raise _unsupported(file, "RoPE factors that differ from Llama 3's")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
