"""Replies with guesses and without, by `h2o-compare speculation`, which `speed --task` is, too."""

import json
from pathlib import Path

import pytest

from h2o_lab.speculation import comparison
from tests.commands import invoke


def test_replies_with_guesses_and_without(long_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(comparison, "_TOKENS", 6)
    monkeypatch.setattr(comparison, "_ROUNDS", 1)
    monkeypatch.setattr(comparison, "_MANUAL", 200)
    monkeypatch.setattr(comparison, "bandwidth", lambda threads: 1e10)
    out = tmp_path / "records.jsonl"
    asked = "--task", "edit,json,recall", "-m", long_folder, "--policies", "h2o", "--jsonl", out
    done = invoke("h2o-compare", "speed", *asked)
    assert done.exit_code == 0, done.output
    timed = [record for record in map(json.loads, out.read_text().splitlines()) if record["type"] == "speculation"]
    assert [(record["task"], record["speculate"]) for record in timed] == [
        (task, mode) for task in ("edit", "json", "recall") for mode in ("off", "auto")
    ]
    replies = [(record["text"], record["state"]) for record in timed]
    assert replies[::2] == replies[1::2]
