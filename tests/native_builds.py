"""Compiled libraries for every instruction set of this processor, for tests of the kernels.

H2O_LIBRARY_FOLDER selects libraries other than the installed ones, as `make sanitize` does.
"""

from __future__ import annotations

import ctypes

import pytest

from h2o_stream.native import library


@pytest.fixture(params=library.INSTRUCTIONS, scope="module")
def native(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The library for each instruction set."""
    if library.missing_reason():
        pytest.skip("there is no compiled library")
    if request.param not in library.available():
        pytest.skip(f"this processor does not have {request.param}")
    return library.open_library(request.param)
