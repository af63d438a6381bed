"""Files that are mapped without a descriptor."""

import gc
from pathlib import Path

import numpy
import pytest

from h2o_stream.session.mapped_file import map_file

needs_proc = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not say what is mapped")


def is_mapped(path: Path) -> bool:
    """Whether this process has the file in its memory."""
    return str(path) in Path("/proc/self/maps").read_text()


@needs_proc
def test_mapped_as_long_as_a_view_is_used(tmp_path: Path) -> None:
    """With no file descriptor, and though the file is deleted."""
    path, content = tmp_path / "file", numpy.arange(10_000, dtype=numpy.uint8)
    path.write_bytes(content.tobytes())
    opened = len([*Path("/proc/self/fd").iterdir()])
    view = map_file(path)[5:]
    assert len([*Path("/proc/self/fd").iterdir()]) == opened
    path.unlink()
    gc.collect()
    assert is_mapped(path)
    assert numpy.array_equal(view, content[5:])
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    del view
    gc.collect()
    assert not is_mapped(path)


def test_an_empty_file_and_none(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert map_file(tmp_path / "empty").size == 0
    with pytest.raises(FileNotFoundError):
        map_file(tmp_path / "none")
    with pytest.raises(OSError, match="directory"):
        map_file(tmp_path)
