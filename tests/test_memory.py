import os
import sys

import psutil
import pytest

from h2o_stream.memory import bound_kernel_caches, give_back_free_memory

LIMITS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def test_kernels_are_bounded_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LIMITS:
        monkeypatch.setenv(name, "of before")
        monkeypatch.delenv(name)
    bound_kernel_caches()
    assert [os.environ[name] for name in LIMITS] == ["200", "16"]
    monkeypatch.setenv(LIMITS[0], "7")
    bound_kernel_caches()
    assert os.environ[LIMITS[0]] == "7"


@pytest.mark.skipif(sys.platform != "linux", reason="only there is it known how to")
def test_free_memory_is_given_back() -> None:
    """Every hundredth piece stays, so that what is between them stays too unless it is asked for."""
    process = psutil.Process()
    pieces = [bytearray(1000) for _ in range(100_000)]
    kept = pieces[::100]
    del pieces
    before = process.memory_info().rss
    give_back_free_memory()
    assert len(kept) == 1000
    assert before - process.memory_info().rss > 30e6
