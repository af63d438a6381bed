"""set_up.py: what is missing is done, nothing is done twice, and what was interrupted is done again."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import set_up
from h2o_stream.cli.run import INSTALLED_LATER
from h2o_stream.errors import install_command

ROOT = Path(__file__).parent.parent


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout in which commands of pip, venv and the compiler only write down that they ran."""
    sources = tmp_path / "h2o_stream" / "native" / "src"
    sources.mkdir(parents=True)
    for name in ("CMakeLists.txt", "hatch_build.py", "h2o_stream/native/abi.py", "constraints.txt", "step.cpp"):
        (sources if name == "step.cpp" else tmp_path).joinpath(name).write_text(name)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    (tmp_path / "hatch_build.py").write_text(_NOTES.format(name="compiler", code=0))
    monkeypatch.setattr(set_up, "ROOT", tmp_path)
    monkeypatch.setattr(set_up, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(set_up, "MARKS", tmp_path / ".venv" / "set-up")
    monkeypatch.setattr(set_up, "LOG", tmp_path / "build" / "set-up.log")
    (tmp_path / ".venv").mkdir()
    monkeypatch.setattr(set_up, "new_venv", list)
    monkeypatch.setattr(set_up, "pip", lambda *arguments: _note(arguments[-1]))
    return tmp_path


_NOTES = "import sys; open('ran', 'a').write('{name}\\n'); print('error: it is {name}'); sys.exit({code})"


def _note(name: str, code: int = 0) -> tuple[str, ...]:
    return (sys.executable, "-c", _NOTES.format(name=name, code=code))


def _ran(checkout: Path) -> list[str]:
    """What ran since the last call, in any order."""
    notes = checkout / "ran"
    ran = sorted(notes.read_text().splitlines()) if notes.exists() else []
    notes.unlink(missing_ok=True)
    return ran


_CHAT = ["compiler", set_up.DATA[-1], set_up.requirements("chat")[-1]]
_ALL, _DEV = set_up.requirements("all")[-1], set_up.requirements("dev")[-1]


def test_what_is_done_is_not_done_again(checkout: Path) -> None:
    assert set_up.set_up("chat") == ""
    assert _ran(checkout) == sorted(_CHAT)
    set_up.set_up("chat")
    assert _ran(checkout) == []
    set_up.set_up("all")
    assert _ran(checkout) == [_ALL]
    set_up.set_up("dev")
    assert _ran(checkout) == [_DEV]
    set_up.set_up("all")
    assert _ran(checkout) == []


def test_all_at_once(checkout: Path) -> None:
    set_up.set_up("dev")
    assert _ran(checkout) == sorted([*_CHAT, _DEV])
    for goal in ("chat", "all", "dev"):
        set_up.set_up(goal)
    assert _ran(checkout) == []


@pytest.mark.parametrize(
    ("changed", "again"),
    [("h2o_stream/native/src/step.cpp", ["compiler"]), ("constraints.txt", _CHAT[1:])],
)
def test_what_has_changed_is_done_again(checkout: Path, changed: str, again: list[str]) -> None:
    set_up.set_up("chat")
    _ran(checkout)
    (checkout / changed).write_text("changed")
    set_up.set_up("chat")
    assert _ran(checkout) == sorted(again)


def test_a_failure_is_one_line_and_is_tried_again(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as failing:
        failing.setattr(set_up, "pip", lambda *arguments: _note("no index", 1))
        with pytest.raises(set_up.SetUpError, match=r"^error: it is no index \(all output: build/set-up.log\)$"):
            set_up.set_up("chat")
    assert "it is no index" in (checkout / "build" / "set-up.log").read_text()
    _ran(checkout)
    set_up.set_up("chat")
    assert set(_CHAT[1:]) <= set(_ran(checkout))


def test_without_a_library_all_goes_on_but_a_broken_source_is_an_error(checkout: Path) -> None:
    (checkout / "hatch_build.py").write_text(_NOTES.format(name="no compiler", code=1))
    for _ in range(2):
        assert set_up.set_up("chat") == "error: it is no compiler"
    assert _ran(checkout).count("no compiler") == 1
    (checkout / "hatch_build.py").write_text(_NOTES.format(name="compiler", code=1))
    with pytest.raises(set_up.SetUpError):
        set_up.set_up("chat")


def test_half_installed_packages_are_installed_again(tmp_path: Path) -> None:
    for name in ("whole", "half"):
        (tmp_path / f"{name}-1.dist-info").mkdir()
    (tmp_path / "whole-1.dist-info" / "INSTALLER").touch()
    set_up.remove_half_installed(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["whole-1.dist-info"]


def test_the_compiler_ends_when_it_is_interrupted(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(set_up.time, "sleep", interrupt)
    slow = set_up.Step("Slow", [(sys.executable, "-c", "import time; time.sleep(60)"), _note("next")])
    with pytest.raises(KeyboardInterrupt):
        set_up.run_beside([slow])
    assert not slow.is_alive()
    assert _ran(checkout) == []


def test_chats_require_no_torch() -> None:
    assert set_up.LATER == INSTALLED_LATER
    required = {goal: {re.split(r"[^\w-]", text)[0] for text in set_up.requirements(goal)} for goal in set_up.GOALS}
    assert {"numpy", "hatchling"} <= required["chat"]
    assert required["all"] - required["chat"] == {*INSTALLED_LATER}
    assert {"pytest", "rouge-score", "starlette", "llguidance", *required["all"]} <= required["dev"]


def test_torch_that_is_not_installed_is_one_line() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from h2o_stream.cli.chat import main\n"
        "sys.argv = ['h2o-chat', '-p', 'Hi', '--engine', 'eager']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], input="", capture_output=True, text=True)
    assert done.returncode == 1
    command = "make setup" if Path(sys.prefix) == ROOT / ".venv" else install_command("torch")
    assert done.stderr.splitlines()[-1] == (
        f"h2o-chat: torch is needed (steps are computed in torch, too) but not installed yet; run {command}"
    )


def test_the_command_that_installs_works_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(ROOT / ".venv" / "bin" / "python"))
    monkeypatch.chdir(ROOT)
    assert install_command("rouge-score") == ".venv/bin/python -m pip install -c constraints.txt rouge-score"
    monkeypatch.chdir(ROOT / "docs")
    assert install_command("x") == f"{ROOT}/.venv/bin/python -m pip install -c {ROOT}/constraints.txt x"
    monkeypatch.setattr("h2o_stream.errors.find_spec", lambda name: None)  # as uv makes environments
    assert install_command("x") == f"uv pip install --python {ROOT}/.venv/bin/python -c {ROOT}/constraints.txt x"
