"""What a token is worth and which tokens stay: one policy per file; `base` has the interface and the eviction rule.

Pure functions of tensors: nothing here knows layers, models, or where keys and values are stored.
"""

from h2o_stream.cache.policies.base import (
    Attention,
    Candidates,
    NewQueries,
    Policy,
    make_policy,
    select,
)

__all__ = [
    "Attention",
    "Candidates",
    "NewQueries",
    "Policy",
    "make_policy",
    "select",
]
