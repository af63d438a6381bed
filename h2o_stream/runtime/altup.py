"""Versions of the residual stream and residuals of low rank of a model from a file, see `native.altup`."""

from __future__ import annotations

from h2o_stream.native.altup import AltUp, Laurel, Versions
from h2o_stream.native.description import Norm
from h2o_stream.runtime.parameters import AltUpParameters
from h2o_stream.runtime.weights import Weights


def versions_of(altup: AltUpParameters, weights: Weights, hidden: int) -> Versions:
    """The versions of the residual stream, of `hidden` elements."""
    first, last = (
        [weights.matrix(f"{name}.{number}", None, hidden, hidden) for number in range(altup.count - 1)]
        for name in ("altup_proj", "altup_unembd_proj")
    )
    return Versions(first, last, altup.active)


def layer_altup(altup: AltUpParameters, weights: Weights, number: int, norm: Norm, input_scale: float) -> AltUp:
    """How the layer with this number updates them; the norm is that before the router, whose input has a factor.

    Raises:
        DescriptionError: weights are missing, or of another size.
    """
    assert norm.weight is not None
    count, hidden = altup.count, norm.weight.size
    scale = weights.sized_vector("altup_correct_scale", number, hidden)
    router = weights.sized_vector("altup_router", number, count * hidden).reshape(count, hidden)
    return AltUp(
        router * norm.weight * input_scale,
        norm.epsilon,
        weights.sized_vector("altup_predict_coef", number, count**3).reshape(count**2, count),
        weights.sized_vector("altup_correct_coef", number, count**2).reshape(count, count),
        scale if altup.corrects_scale else None,
    )


def layer_laurel(altup: AltUpParameters, weights: Weights, number: int, norm: Norm, hidden: int) -> Laurel:
    """The residual of low rank of a layer."""
    left = weights.matrix("laurel_l", number, altup.rank, hidden)
    return Laurel(left, weights.matrix("laurel_r", number, hidden, altup.rank), norm)
