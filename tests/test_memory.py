import os
import subprocess
import sys

import psutil
import pytest

from h2o_stream.base.memory import limit_kernel_caches, trim_heap

LIMITS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def test_kernel_caches_are_limited_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LIMITS:
        monkeypatch.setenv(name, "of before")
        monkeypatch.delenv(name)
    limit_kernel_caches()
    assert [os.environ[name] for name in LIMITS] == ["200", "16"]
    monkeypatch.setenv(LIMITS[0], "7")
    limit_kernel_caches()
    assert os.environ[LIMITS[0]] == "7"


@pytest.mark.skipif(sys.platform != "linux", reason="only there is it known how to")
def test_free_memory_is_given_back() -> None:
    """Every hundredth block stays allocated, so the memory between them is returned only on request."""
    process = psutil.Process()
    pieces = [bytearray(1000) for _ in range(100_000)]
    kept = pieces[::100]
    del pieces
    before = process.memory_info().rss
    trim_heap()
    assert len(kept) == 1000
    assert before - process.memory_info().rss > 30e6


def test_the_peak_is_one_that_nobody_looked_at() -> None:
    """In a new process, whose parent's size must not matter."""
    code = """
import psutil
from h2o_stream.base.memory import peak_bytes
from h2o_stream.session.report import RunReport
report, before = RunReport(), psutil.Process().memory_info().rss
held = bytearray(b"x") * 300_000_000
del held
print(peak_bytes() - before, report.record()["peak_rss_bytes"] - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(299e6 < int(grown) < 400e6 for grown in done.stdout.split())
