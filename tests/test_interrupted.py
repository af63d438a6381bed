"""Comparisons that are interrupted keep what they have found, and go on from it."""

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from h2o_lab.recall import asking
from h2o_stream.compare.pause import Pause
from h2o_stream.runtime.model import ServedRuntime
from tests.commands import invoke, records

pytestmark = pytest.mark.usefixtures("no_charts")


class Interrupting:
    """A function whose n-th call is interrupted by Ctrl-C."""

    def __init__(self, function: Any, number: int = 0) -> None:
        self.function, self.number, self.calls = function, number, 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        if self.calls == self.number:
            signal.raise_signal(signal.SIGINT)
        return self.function(*arguments, **named)

    def __get__(self, owner: Any, kind: type) -> Any:
        return partial(self, owner)


def results(text: str) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name != "tok_s"} for record in records(text)[1:]]


@pytest.mark.parametrize(("place", "function", "options"), [
    (ServedRuntime, "losses", ["nll", "--policies", "sink,h2o", "--tokens", "700", "--windows", "32"]),
    (asking, "say", ["recall", "--policies", "sink", "--facts", "1", "--distances", "8", "--windows", "64"]),
])  # fmt: skip
def test_the_same_command_goes_on(
    place: Any,
    function: str,
    options: list[str],
    tiny_folder: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = [*options, "-m", tiny_folder, "--dtype", "float32", "--text", text, "--jsonl", "-", "--out"]
    whole = Interrupting(getattr(place, function))
    monkeypatch.setattr(place, function, whole)
    expected = results(invoke("h2o-compare", *command, tmp_path / "whole").stdout)

    first = Interrupting(whole.function, number=2)
    monkeypatch.setattr(place, function, first)
    left = invoke("h2o-compare", *command, tmp_path / "parts")
    assert left.exit_code == 130
    assert "the same command goes on" in left.stderr
    assert len(list((tmp_path / "parts" / "parts").glob("*.kept"))) == 1

    second = Interrupting(whole.function)
    monkeypatch.setattr(place, function, second)
    done = invoke("h2o-compare", *command, tmp_path / "parts")
    assert done.exit_code == 0, done.stderr
    assert results(done.stdout) == expected
    assert first.calls + second.calls == whole.calls, "nothing is computed twice"
    assert not list((tmp_path / "parts" / "parts").glob("*.kept"))


def test_without_a_folder_what_is_finished_is_shown(
    tiny_folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServedRuntime, "losses", Interrupting(ServedRuntime.losses, number=2))
    options = ["--policies", "sink,h2o", "--tokens", "200", "--windows", "32", "--text", text]
    left = invoke("h2o-compare", "nll", "-m", tiny_folder, *options)
    assert left.exit_code == 130
    assert "--out FOLDER" in left.stderr
    assert "sink" in left.stderr
    assert "nats per token" in left.stderr
    assert "h2o " not in left.stderr.partition("nats per token")[2]


def test_only_the_first_signal_waits_and_only_for_what_keeps() -> None:
    said = list[str]()
    with Pause(lambda: said.append("waits")) as pause:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        pause.keeps = True
        signal.raise_signal(signal.SIGINT)
        assert pause.requested
        assert said == ["waits"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            pause.end()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
