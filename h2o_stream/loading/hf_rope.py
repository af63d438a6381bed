"""RoPE of a GGUF file as transformers' configs have it."""

from __future__ import annotations

import math
from typing import Any

import numpy

from h2o_stream.errors import UnsupportedModelError
from h2o_stream.models.gguf import UNROTATED, GgufFile
from h2o_stream.runtime.families import ARCHITECTURES
from h2o_stream.runtime.file_ropes import rope_factors
from h2o_stream.runtime.parameters import Parameters
from h2o_stream.runtime.rotations import Floats

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Llama 3.1, 3.2 and 3.3 share these; only their factor differs (8 or 32)."""

_ONLY = {"yarn_ext_factor": 1, "yarn_attn_factor": 1, "yarn_log_multiplier": 0}
"""Parameters of YaRN that transformers has only at these values."""


def set_rope(config: Any, file: GgufFile, parameters: Parameters) -> None:
    """Set ``rope_parameters`` of a config; raises UnsupportedModelError if transformers has no equivalent."""
    _RopeReader(file, parameters).set(config)


class _RopeReader:
    def __init__(self, file: GgufFile, parameters: Parameters) -> None:
        self._file, self._parameters = file, parameters

    def set(self, config: Any) -> None:
        ropes, architecture = config.rope_parameters, ARCHITECTURES[self._file.architecture]
        whole = ropes.get("full_attention", ropes)
        whole["rope_theta"] = theta = float(self._get("rope.freq_base") or 10_000.0)
        if whole is not ropes:
            local = self._get("rope.freq_base_swa") or architecture.local_theta or theta
            ropes["sliding_attention"]["rope_theta"] = float(local)
        if self._parameters.layer_shapes:
            whole.update(self._proportional())
            return
        latent = self._parameters.latent
        size = latent.rope_size if latent else self._parameters.head_size
        dims = self._get("rope.dimension_count") or size
        if dims != size or "partial_rotary_factor" in whole:
            whole["partial_rotary_factor"] = dims / size
        whole.update({"rope_type": "default"} | self._scaling(theta, dims))

    def _get(self, key: str) -> Any:
        return self._file.metadata.get(f"{self._file.architecture}.{key}")

    def _unsupported(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._file.path.name} has {what}; its output would be wrong")

    def _scaling(self, theta: float, dims: int) -> dict[str, Any]:
        kind, factor = self._get("rope.scaling.type") or "none", self._get("rope.scaling.factor")
        attention = self._get("rope.scaling.attn_factor") or 1
        if "rope_factors_short.weight" in self._file.tensors:
            return self._longrope(dims, attention)
        if kind != "yarn" and attention != 1:
            raise self._unsupported(f"rope.scaling.attn_factor {attention} without YaRN")
        if "rope_freqs.weight" in self._file.tensors:
            return self._llama3(theta, dims)
        if kind not in ("none", "linear", "yarn"):
            raise self._unsupported(f"RoPE scaling of type {kind!r}")
        if kind == "none" or not factor or factor == 1:
            return {}
        return self._yarn(factor, attention) if kind == "yarn" else {"rope_type": "linear", "factor": factor}

    def _factors(self, name: str, dims: int) -> Floats:
        return rope_factors(self._file, name, dims // 2)

    def _longrope(self, dims: int, attention: float) -> dict[str, Any]:
        return {
            "rope_type": "longrope",
            "short_factor": self._factors("rope_factors_short", dims).tolist(),
            "long_factor": self._factors("rope_factors_long", dims).tolist(),
            "original_max_position_embeddings": self._get("rope.scaling.original_context_length"),
            "attention_factor": attention,
        }

    def _yarn(self, factor: float, attention: float) -> dict[str, Any]:
        """The file's attention factor is on top of what follows from the scaling factor."""
        temperature, latent = self._parameters.temperature, self._parameters.latent
        for name, only in _ONLY.items():
            value = self._get(f"rope.scaling.{name}")
            if value not in (None, only) and not ((temperature or latent) and name == "yarn_log_multiplier"):
                raise self._unsupported(f"rope.scaling.{name} {value!r}, not {only}")
        scaling = {
            "original_max_position_embeddings": self._get("rope.scaling.original_context_length"),
            "beta_fast": self._get("rope.scaling.yarn_beta_fast"),
            "beta_slow": self._get("rope.scaling.yarn_beta_slow"),
        }
        if attention != 1:
            scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1)
        share = self._get("rope.scaling.yarn_log_multiplier")
        if temperature:
            scaling |= {"llama_4_scaling_beta": temperature[0], "mscale": 1.0, "mscale_all_dim": share}
        if latent and share:  # its converter multiplies it by 0.1
            scaling["mscale"] = scaling["mscale_all_dim"] = share / 0.1
        return {"rope_type": "yarn", "factor": factor} | {name: value for name, value in scaling.items() if value}

    def _proportional(self) -> dict[str, Any]:
        """RoPE that leaves the slowest pairs of elements as they are."""
        dims = self._parameters.head_size
        factors = self._factors("rope_freqs", dims)
        rotated = int((factors == 1).sum())
        if not (numpy.all(factors[:rotated] == 1) and numpy.all(factors[rotated:] >= UNROTATED)):
            raise self._unsupported("RoPE factors that are neither 1 nor stand for no rotation")
        return {"rope_type": "proportional", "partial_rotary_factor": 2 * rotated / dims}

    def _llama3(self, theta: float, dims: int) -> dict[str, Any]:
        """Llama 3's scaling, if it reproduces the factors in the file."""
        factors, (low, high, context) = self._factors("rope_freqs", dims), _LLAMA3.values()
        if numpy.all(factors == 1):
            return {}
        factor = float(factors.max())
        wavelengths = 2 * math.pi * theta ** (numpy.arange(0, dims, 2) / dims)
        smooth = ((context / wavelengths - low) / (high - low)).clip(0, 1)
        if not numpy.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
            raise self._unsupported("RoPE factors that differ from Llama 3's")
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
