"""Numbers that describe a decoder-only transformer besides its weights, from the header of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy

from h2o_stream.models.gguf import GgufFile
from h2o_stream.native.abi import NormKind, Scoring
from h2o_stream.native.description import DescriptionError
from h2o_stream.runtime.architectures import ARCHITECTURES, EMBEDDING, OUTPUT, Architecture
from h2o_stream.runtime.rotations import Floats, rope_frequencies


@dataclass(frozen=True)
class ExpertParameters:
    """Numbers of the layers with experts.

    Attributes:
        count: experts of a layer.
        chosen: experts per token.
        inner_size: of each.
        shared_size: of the expert for all tokens, 0 if there is none.
        scoring: how a router's logits become scores.
        normalized: whether the weights of a token's experts are divided by their sum.
        scale: factor on weights.
    """

    count: int
    chosen: int
    inner_size: int
    shared_size: int
    scoring: Scoring
    normalized: bool
    scale: float


@dataclass(frozen=True, eq=False)
class Parameters:
    """Numbers of a model.

    Attributes:
        num_layers: decoder layers.
        hidden_size: of the residual stream.
        inner_size: of the MLP.
        vocabulary: tokens.
        query_heads: of each layer.
        kv_heads: of each layer.
        head_size: of queries, keys and values.
        norm: kind of all norms.
        epsilon: of norms.
        context: positions it was trained for.
        frequencies: of RoPE, [rotary_dims / 2] float32.
        tied: whether the output layer is the embedding.
        scaling: of queries times keys.
        sliding: window of each layer, None if it sees everything.
        local_frequencies: of RoPE in layers with a sliding window, if they have their own.
        softcap: of queries times keys, 0 for none.
        logit_softcap: of logits, 0 for none.
        experts: of layers that have experts.
    """

    num_layers: int
    hidden_size: int
    inner_size: int
    vocabulary: int
    query_heads: int
    kv_heads: int
    head_size: int
    norm: NormKind
    epsilon: float
    context: int
    frequencies: Floats
    tied: bool
    scaling: float
    sliding: tuple[int | None, ...]
    local_frequencies: Floats | None = None
    softcap: float = 0.0
    logit_softcap: float = 0.0
    experts: ExpertParameters | None = None

    @property
    def windows(self) -> list[int | None]:
        """The windows of layers that slide while others do not; such layers do not follow the plan of a cache."""
        return [None] * self.num_layers if None not in self.sliding else list(self.sliding)

    @property
    def max_distance(self) -> int:
        """Largest distance it was trained for: its context, or the longest window if all layers slide."""
        windows = [window for window in self.sliding if window]
        return min(self.context, *windows) if windows and None not in self.sliding else self.context


_NEUTRAL = {
    "attention.scale": None,
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "expert_group_count": 1,
    "use_parallel_residual": None,
    "rope.scaling.attn_factor": 1.0,
}
"""Keys of GGUF files that change what is computed, and the value that does not."""


def parameters_of_gguf(file: GgufFile) -> Parameters:
    """The parameters of a GGUF file.

    Raises:
        DescriptionError: it has some that are not known here, or misses one.
    """
    name = file.architecture
    if name not in ARCHITECTURES:
        raise DescriptionError(f"{name} is not in the table of architectures")
    architecture = ARCHITECTURES[name]

    def get(key: str) -> Any:
        return file.metadata.get(f"{name}.{key}")

    for key, neutral in _NEUTRAL.items():
        if (value := get(key)) not in (None, neutral, 0):
            raise DescriptionError(f"{name}.{key} is {value}")
    for tensor in file.tensors:
        if tensor.startswith("rope_factors_"):
            raise DescriptionError(f"it has {tensor}")
    try:
        heads, hidden, count = (int(get(key)) for key in ("attention.head_count", "embedding_length", "block_count"))
        head_size = int(get("attention.key_length") or hidden // heads)
        if int(get("attention.value_length") or head_size) != head_size:
            raise DescriptionError("heads of keys and values have different sizes")
        rotary_dims = int(get("rope.dimension_count") or head_size)
        frequencies = rope_frequencies(float(get("rope.freq_base") or 10_000.0), rotary_dims)
        local_theta = get("rope.freq_base_swa") or architecture.local_theta
        epsilon = get("attention.layer_norm_rms_epsilon")
        return Parameters(
            num_layers=count,
            hidden_size=hidden,
            inner_size=int(get("feed_forward_length")),
            vocabulary=file.tensors[f"{EMBEDDING}.weight"].shape[0],
            query_heads=heads,
            kv_heads=int(get("attention.head_count_kv") or heads),
            head_size=head_size,
            norm=NormKind.LAYER if epsilon is None else NormKind.RMS,
            epsilon=float(get("attention.layer_norm_epsilon") if epsilon is None else epsilon),
            context=int(get("context_length")),
            frequencies=frequencies / _gguf_divisors(file, get("rope.scaling.type"), get("rope.scaling.factor")),
            tied=f"{OUTPUT}.weight" not in file.tensors,
            scaling=(hidden / heads if architecture.large == count else head_size) ** -0.5,
            sliding=_sliding(architecture, count, get("attention.sliding_window")),
            local_frequencies=rope_frequencies(float(local_theta), rotary_dims) if local_theta else None,
            softcap=float(get("attn_logit_softcapping") or 0),
            logit_softcap=float(get("final_logit_softcapping") or 0),
            experts=_experts(architecture, get) if get("expert_count") else None,
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise DescriptionError(f"a parameter is missing or no number: {error}") from error


def _sliding(architecture: Architecture, layers: int, window: Any) -> tuple[int | None, ...]:
    """The sliding window of each layer."""
    every = architecture.full_every
    return tuple(
        None if not window or (every and (number + 1) % every == 0) else int(window) for number in range(layers)
    )


_SCORINGS = {None: Scoring.SOFTMAX, 1: Scoring.SOFTMAX, 2: Scoring.SIGMOID}
"""By llama.cpp's number, ``expert_gating_func``."""


def _experts(architecture: Architecture, get: Callable[[str], Any]) -> ExpertParameters:
    normalized = get("expert_weights_norm")
    return ExpertParameters(
        count=int(get("expert_count")),
        chosen=int(get("expert_used_count")),
        inner_size=int(get("expert_feed_forward_length") or get("feed_forward_length")),
        shared_size=int(get("expert_shared_feed_forward_length") or 0),
        scoring=_SCORINGS[get("expert_gating_func")],
        normalized=architecture.normalizes_experts if normalized is None else bool(normalized),
        scale=float(get("expert_weights_scale") or 1.0),
    )


def _gguf_divisors(file: GgufFile, kind: Any, factor: Any) -> Floats:
    """What divides the frequencies, of any shape that is broadcast over them."""
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is not None:
        if tensor.type.name != "F32":
            raise DescriptionError(f"its RoPE factors are {tensor.type.name}")
        return file.blocks(tensor).view(numpy.float32)
    if kind in (None, "none") or not factor or factor == 1:
        return numpy.ones(1, numpy.float32)
    if kind != "linear":
        raise DescriptionError(f"it has RoPE scaling of type {kind}")
    return numpy.full(1, factor, numpy.float32)
