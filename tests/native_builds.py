"""Compiled libraries for the instruction sets of this processor, for tests of the kernels.

`make test` compiles the set in use, `make test-all` and CI all of them. H2O_LIBRARY_FOLDER selects libraries other than
the installed ones, as `make sanitize` does.
"""

import ctypes

import pytest

from h2o_stream.native import library

needs_library = pytest.mark.skipif(library.loaded() is None, reason="there is no compiled library")

every_choice = [
    pytest.param(choice, marks=() if choice == library.name() else pytest.mark.exhaustive)
    for choice in library.INSTRUCTIONS
]
"""The library that is in use; the others are exhaustive."""


@pytest.fixture(params=every_choice, scope="module")
def native(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The library for each instruction set."""
    return _opened(request.param)


@pytest.fixture(params=every_choice)
def in_use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with the library for each instruction set."""
    library_of_choice = _opened(request.param)
    monkeypatch.setattr(library, "loaded", lambda: library_of_choice)


@pytest.fixture
def portable() -> ctypes.CDLL:
    """The library for any processor, if it is compiled: for a row or two of tests of the kernels."""
    return _opened("portable")


def _opened(choice: str) -> ctypes.CDLL:
    if library.why_not():
        pytest.skip("there is no compiled library")
    if choice not in library.available():
        pytest.skip(f"{choice} is not compiled, or this processor does not have it")
    return library.open_library(choice)
