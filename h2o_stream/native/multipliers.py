"""Factors that modules apply to what their linear layers take and give (Falcon-H1), as scales of matrices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from h2o_stream.native.attention import Attention
from h2o_stream.native.description import Mlp
from h2o_stream.native.matrix import DescriptionError, Matrix


def scaled_attention(attention: Attention, module: Any, layer: Any, name: str) -> Attention:
    """An attention with the factors that its module, and the layer around it, have as attributes.

    Raises:
        DescriptionError: keys have a factor, but no matrix of their own.
    """
    inputs, keys, outputs = _factor(layer, "attention_in"), _factor(module, "key"), _factor(layer, "attn_out")
    if keys != 1.0 and (len(attention.qkv) < 3 or attention.latent):
        raise DescriptionError(f"{name} scales keys by {keys}, which are in one matrix with others")
    qkv = [matrix.scaled(keys if place == 1 else 1.0, inputs) for place, matrix in enumerate(attention.qkv)]
    return replace(attention, qkv=qkv, out=attention.out.scaled(outputs))


def scaled_mlp(mlp: Mlp, module: Any) -> Mlp:
    """An MLP with the factors that its module has as attributes."""
    gate = mlp.gate.scaled(_factor(module, "gate")) if mlp.gate else None
    return replace(mlp, gate=gate, down=mlp.down.scaled(_factor(module, "down")))


def scaled_mixer_output(out: Matrix, layer: Any) -> Matrix:
    """The output projection of a recurrent mixer, with the factor that the layer around it has as an attribute."""
    return out.scaled(_factor(layer, "ssm_out"))


def scaled_projections(module: Any, projection: Matrix, name: str) -> list[Matrix]:
    """The projection of a recurrent mixer: parts of its rows have factors of their own.

    Raises:
        DescriptionError: there are not as many factors as rows, or the parts of a packed matrix do not start at tiles.
    """
    inputs, factors = _factor(module, "ssm_in"), getattr(module, "mup_vector", None)
    if factors is None:
        return [projection.scaled(1.0, inputs)]
    if factors.numel() != projection.rows:
        raise DescriptionError(f"{name} has {factors.numel()} factors for {projection.rows} rows")
    matrices, first = [], 0
    values, counts = factors.flatten().unique_consecutive(return_counts=True)
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        matrices.append(projection.row_range(first, count).scaled(value, inputs))
        first += count
    return matrices


def _factor(module: Any, name: str) -> float:
    return float(getattr(module, f"{name}_multiplier", 1.0))
