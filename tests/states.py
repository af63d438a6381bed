"""States of caches as tensors, with checksums that fit whatever is in them; and a comparison of states."""

from collections.abc import Mapping
from typing import Any

import numpy
from torch import Tensor

from h2o_stream.cache.arrays import to_arrays, to_tensors
from h2o_stream.cache.state import checksummed


def with_checksums(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with checksums of them."""
    return to_tensors(checksummed(to_arrays(tensors)))


def equal_states(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two states of arrays have the same numbers."""
    return one.keys() == other.keys() and all(numpy.array_equal(one[name], other[name]) for name in one)
