"""What a saved state has of an engine, beside what the cache has: tokens, what is pinned, and the random generator."""

from __future__ import annotations

from collections.abc import Mapping

import numpy

from h2o_stream.base.logs import NumberLog
from h2o_stream.cache.state import Array, State, checksummed, load_log, log_state, require_array, verify_checksums
from h2o_stream.engine.sampling import RngState, check_rng_state
from h2o_stream.errors import H2OStreamError

_CHECKSUMS = "engine.checksums"


def state_of(tokens: NumberLog, pinned_prefix: int, rng_state: RngState) -> State:
    """The arrays that an engine adds to a state."""
    arrays: State = {"engine.opening": numpy.array(pinned_prefix, numpy.int64), "engine.draws": rng_state}
    return checksummed(arrays, _CHECKSUMS) | log_state("engine.tokens", tokens)


def read_state(state: Mapping[str, Array]) -> tuple[NumberLog, int, RngState]:
    """What `state_of` was given; raises H2OStreamError if the state is damaged."""
    verify_checksums(state, _CHECKSUMS)
    tokens = load_log(state, "engine.tokens")
    pinned_prefix = int(require_array(state, "engine.opening", like=numpy.array(0)))
    rng_state = require_array(state, "engine.draws")
    check_rng_state(rng_state)
    if not 0 <= pinned_prefix <= len(tokens):
        raise H2OStreamError(f"the state is damaged: {pinned_prefix} of {len(tokens)} tokens are pinned")
    return tokens, pinned_prefix, rng_state
