"""The fixtures of the other tests."""

from tests.conftest import pytest_configure

__all__ = ["pytest_configure"]
