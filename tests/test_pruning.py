"""What is kept in the user's cache folder does not grow for ever."""

import json
import os
from pathlib import Path

import pytest

from h2o_stream.base import measurements
from h2o_stream.base.resources import oldest
from h2o_stream.models import packed_cache as packed_models


def test_measurements(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "MAX_SAVED", 3)
    for number, path in enumerate(_save("abc")):
        os.utime(path, ns=(number, number))
    assert measurements.read_measurement("reach", "a") == "a"
    measurements.save_measurement("reach", "d", "d")
    measurements.save_measurement("proved", "a", True)
    assert len(list((own_cache / "reach").iterdir())) == 3
    kept = [measurements.read_measurement("reach", key) for key in "abcd"]
    assert kept == ["a", None, "c", "d"], "a was used after b"
    assert measurements.read_measurement("proved", "a") is True


def _save(keys: str) -> list[Path]:
    for key in keys:
        measurements.save_measurement("reach", key, key)
    return [measurements._path("reach", key) for key in keys]


def test_what_another_program_removes_meanwhile(tmp_path: Path) -> None:
    """Regression: two chats that began at once removed the same file, and one of them ended."""
    paths = [tmp_path / name for name in "abc"]
    for time_ns, path in enumerate(paths):
        path.mkdir()
        os.utime(path, ns=(time_ns, time_ns))
    assert oldest([tmp_path / "gone", *paths], 2) == paths[:1]


def test_packed_weights_of_files_that_changed(own_cache: Path) -> None:
    def packed(name: str, **metadata: str) -> Path:
        folder = own_cache / "packed" / name
        folder.mkdir(parents=True)
        (folder / packed_models.METADATA_FILE).write_text(json.dumps(metadata))
        return folder

    before = packed("a-int4-1", model="a", source="/a", quantize="int4")
    others = [
        packed("a-int8-1", model="a", source="/a", quantize="int8"),
        packed("b-int4-1", model="b", source="/b", quantize="int4"),
        own_cache / "packed" / "damaged",
    ]
    others[-1].mkdir()
    now = packed("a-int4-2", model="a", source="/a", quantize="int4")
    packed_models.remove_replaced(now)
    assert not before.exists()
    assert all(folder.exists() for folder in (now, *others))
