"""A head group on its own, without a cache to count its tokens."""

from torch import Tensor

from h2o_stream.cache.attend import attend as attend_with
from h2o_stream.cache.attention import LogitTransform
from h2o_stream.cache.head_group import HeadGroup
from h2o_stream.cache.kernels import Kernels
from h2o_stream.cache.padding import Padding


def attend(
    group: HeadGroup,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    transform: LogitTransform,
    padding: Padding | None = None,
    kernels: Kernels | None = None,
) -> Tensor:
    """Feed new tokens and count them."""
    group.tokens.expect(padding.counts if padding else (key.shape[2],) * len(key), key.shape[2])
    output = attend_with(group, query, key, value, transform, padding, kernels)
    group.tokens.advance()
    return output
