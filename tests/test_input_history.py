"""The history of typed messages: private, limited, and only if it is wanted."""

import stat
from pathlib import Path

import pytest
from prompt_toolkit.history import FileHistory, InMemoryHistory

from h2o_stream.base import resources
from h2o_stream.ui import message_prompt as module
from h2o_stream.ui.message_prompt import LimitedHistory, input_history


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(resources, "data_folder", lambda: tmp_path / "data")
    return tmp_path / "data"


def messages(path: Path) -> list[str]:
    """Oldest first."""
    return list(FileHistory(str(path)).load_history_strings())[::-1]


def test_without_it_nothing_is_written(data: Path) -> None:
    history = input_history(False, pytest.fail)
    history.append_string("secret")
    assert isinstance(history, InMemoryHistory)
    assert not data.exists()


def test_folder_and_file_are_private(data: Path) -> None:
    data.mkdir(mode=0o755)
    (data / "history").touch(0o644)
    input_history(True, pytest.fail).append_string("hello")
    assert stat.S_IMODE(data.stat().st_mode) == 0o700
    assert stat.S_IMODE((data / "history").stat().st_mode) == 0o600
    assert messages(data / "history") == ["hello"]


def test_the_oldest_messages_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MESSAGES", 3)
    path = tmp_path / "history"
    path.touch(0o600)
    history = LimitedHistory(path)
    for text in ("1", "2\n# 2\n\n+2", "3", "4\n", "5 ü"):
        history.append_string(text)
    assert messages(path) == ["3", "4\n", "5 ü"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["history"]


def test_a_message_of_many_lines_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MESSAGES", 2)
    path = tmp_path / "history"
    path.touch()
    history = LimitedHistory(path)
    for text in ("old", "a\n# b\n\n# c", "new"):
        history.append_string(text)
    assert messages(path) == ["a\n# b\n\n# c", "new"]


def test_bytes_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 1000)
    path = tmp_path / "history"
    path.touch()
    history = LimitedHistory(path)
    for number in range(20):
        history.append_string(f"{number} " + "x" * 90)
        assert path.stat().st_size <= 1000
    history.append_string("y" * 5000)
    assert [text.split()[0] for text in messages(path)][-1] == "19"
    assert len(messages(path)) > 3


def test_what_earlier_versions_kept_is_trimmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "history"
    unlimited = FileHistory(str(path))
    for number in range(30):
        unlimited.store_string(str(number))
    monkeypatch.setattr(module, "MAX_MESSAGES", 10)
    LimitedHistory(path)
    assert messages(path) == [str(number) for number in range(20, 30)]


def test_a_folder_that_cannot_be_written(data: Path) -> None:
    data.write_text("a file")
    said: list[str] = []
    assert isinstance(input_history(True, said.append), InMemoryHistory)
    assert len(said) == 1
    assert "no input history" in said[0]
