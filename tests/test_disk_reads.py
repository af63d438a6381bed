"""Weights that do not stay in memory: what is read from disk is counted, and the user is told once."""

import mmap
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from h2o_stream.base.memory import disk_bytes
from h2o_stream.cache.counts import CacheCounts
from h2o_stream.config import Settings
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.session.turn import Timings, Turn
from h2o_stream.ui.start import LoadedConversation
from h2o_stream.ui.terminal import Terminal

SIZE = 4 * 2**20


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(os.urandom(SIZE))
    return path


def turn(nbytes: int) -> Turn:
    return Turn(1, "", "", Timings(), CacheCounts(*[0] * 8), 0, "stop", disk_bytes=nbytes)


@pytest.mark.skipif(not disk_bytes(), reason="this system does not count what is read from disk")
def test_pages_of_a_mapped_file_are_counted(weights: Path) -> None:
    if not os.major(weights.stat().st_dev):
        pytest.skip("this folder is on no disk")
    with weights.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    before = disk_bytes()
    assert sum(data[:: mmap.PAGESIZE]) > 0
    assert disk_bytes() - before in range(SIZE, 2 * SIZE)
    again = disk_bytes()
    assert sum(data[:: mmap.PAGESIZE]) > 0
    assert disk_bytes() == again


@pytest.mark.parametrize("verbose", [True, False])
def test_the_user_is_told_once(verbose: bool, weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, missing = LoadedModel("name", None, None, file=weights), LoadedModel("name", None, None)
    conversation: Any = LoadedConversation(None, None, model, Settings())  # type: ignore[arg-type]
    terminal, shown = Terminal(verbose=verbose), list[str]()
    for nbytes in (2**30, 0, 2**29, 2**30):
        conversation.note_disk(turn(nbytes), terminal)
        shown.append(capsys.readouterr().err)
    assert ["do not stay in memory" in lines for lines in shown] == [False, False, True, False]
    assert ["were read from disk" in lines for lines in shown] == [verbose and count > 0 for count in (1, 0, 1, 1)]
    unknown = replace(conversation, model=missing)
    unknown.note_disk(turn(2**31), terminal)
    assert "memory" not in capsys.readouterr().err


def test_other_files_are_no_weights(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A small model's first turns read more than its weights: libraries and texts."""
    model = LoadedModel("name", None, None, file=weights)
    conversation: Any = LoadedConversation(None, None, model, Settings())  # type: ignore[arg-type]
    conversation.note_disk(turn(10 * SIZE), Terminal())
    assert "memory" not in capsys.readouterr().err
