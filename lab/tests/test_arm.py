"""The tests that run on an emulated processor are there; `make test-arm` runs them each night only."""

from lab.tools.arm import KERNEL_TESTS, ROOT


def test_the_kernel_tests_are_there() -> None:
    assert [name for name in KERNEL_TESTS if not (ROOT / f"tests/test_{name}.py").exists()] == []
