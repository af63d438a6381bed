"""Versions of the residual stream that layers update one after another (AltUp), and residuals of low rank (LAuReL)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from h2o_stream.native import abi
from h2o_stream.native.abi import MAX_VERSIONS
from h2o_stream.native.matrix import DescriptionError, Matrix, Norm, check_count
from h2o_stream.native.pointers import Array, pointer


@dataclass(frozen=True, eq=False)
class AltUp:
    """How a layer updates n versions of the residual stream, see `abi.h`.

    Attributes:
        router: [n, hidden] float32, with all factors on what goes into it.
        epsilon: epsilon of the RMS norm before it.
        prediction: [n * n, n] float32.
        correction: [n, n] float32.
        embedding_scale: [hidden] float32, on what the token's embedding for the layer is multiplied with, or None.
    """

    router: Array
    epsilon: float
    prediction: Array
    correction: Array
    embedding_scale: Array | None

    def check_sizes(self, hidden: int, versions: int) -> None:
        """Raises DescriptionError if it is not of so many versions of the residual stream."""
        check_count(self.router, versions * hidden, "the router of versions")
        check_count(self.prediction, versions**3, "the prediction of versions")
        check_count(self.correction, versions**2, "the correction of versions")
        check_count(self.embedding_scale, hidden, "the scale of an embedding")


@dataclass(frozen=True, eq=False)
class Laurel:
    """scale * (x + attention + y + norm(right(left(y)))) for the attention's input y."""

    left: Matrix
    right: Matrix
    norm: Norm
    scale: float = 2**-0.5

    def __post_init__(self) -> None:
        self.right.check_shape(self.left.columns, self.left.rows, "the second matrix of a residual of low rank")
        self.norm.check_size(self.right.rows, "the norm of a residual of low rank")


@dataclass(frozen=True, eq=False)
class Versions:
    """The versions of the residual stream.

    Attributes:
        first: [hidden, hidden], of the embedding to every version but the first.
        last: [hidden, hidden], of these to what the final norm is of.
        active: the version that layers read.
    """

    first: Sequence[Matrix]
    last: Sequence[Matrix]
    active: int

    def __post_init__(self) -> None:
        if not (0 < len(self.first) == len(self.last) < MAX_VERSIONS and 0 <= self.active <= len(self.first)):
            raise DescriptionError(f"there are {1 + len(self.first)} versions of the residual stream")


def fill_altup(altup: AltUp, struct: abi.AltUp, hidden: int) -> None:
    """Fill the structure of a layer."""
    count = len(altup.correction)
    struct.router, struct.epsilon = pointer(altup.router, "float32", count * hidden), altup.epsilon
    struct.prediction = pointer(altup.prediction, "float32", count**3)
    struct.correction = pointer(altup.correction, "float32", count**2)
    struct.embedding_scale = pointer(altup.embedding_scale, "float32", hidden)


def fill_laurel(laurel: Laurel, struct: abi.Laurel) -> None:
    """Fill the structure of a layer."""
    struct.left, struct.right = laurel.left.to_struct(), laurel.right.to_struct()
    struct.norm, struct.scale = laurel.norm.to_struct(laurel.right.rows), laurel.scale


def fill_versions(versions: Versions, struct: abi.Model) -> None:
    """Fill the structure of a model."""
    struct.versions, struct.active_version = 1 + len(versions.first), versions.active
    for index, (first, last) in enumerate(zip(versions.first, versions.last, strict=True)):
        struct.to_versions[index], struct.from_versions[index] = first.to_struct(), last.to_struct()
