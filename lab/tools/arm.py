"""The package on a processor of Arm, emulated: `make test-arm`.

Compiles the library with Debian's compiler for such processors, unpacks Debian's Python for them and the packages that
chats need, and runs with qemu's user-mode emulation: the kernel tests, a reply, a long stream, and a conversation that
was begun on this machine. All of it is in build/arm. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import distribution
from pathlib import Path

from hatch_build import compile_to
from set_up import DATA, requirements

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "arm"
SYSTEM, PACKAGES, LIBRARIES = FOLDER / "system", FOLDER / "packages", FOLDER / "h2o_stream" / "native"
COMPILER, PYTHON = "aarch64-linux-gnu-g++", "python3.11"
"""Debian's, of the release that this runs on."""

CROSS = {"CXX": COMPILER, "H2O_CMAKE_ARGS": "-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64"}
"""What hatch_build.py reads from the environment to compile for such processors."""

TESTED = ("transformers", "pytest", "hypothesis", "sympy", "networkx", "typing-extensions")
ALONE = ("torch==2.9.0", "accelerate", *DATA)
"""What the kernel tests need besides; of torch the last for Arm that asks for no GPU's libraries."""

KERNEL_TESTS = (
    "matrices", "experts", "pack", "packed", "packed_experts", "mixers", "state_spaces", "native_step", "native_batch",
    "native_prefill",
)  # fmt: skip
"""Those that start no other Python: only this one is emulated."""

CAPITAL, NEXT = "What is the capital of France?", "And of Germany?"

WINDOW, SLACK = 128, 8 << 20
"""Of the long stream; memory that the emulator's own tables may take meanwhile."""

PROCESSORS = {"portable": "cortex-a72", "neon": "neoverse-n1", "i8mm": "max"}
"""Instruction sets, each with an emulated processor that has no better one."""


def compile_library() -> None:
    """All instruction sets, by the cross compiler."""
    os.environ |= CROSS
    if failure := compile_to(FOLDER / "native", FOLDER, "all", echo=True):
        sys.exit(failure)


def unpack_system() -> None:
    """Python and the libraries that it and packages need, out of Debian's packages for such processors."""
    if (SYSTEM / "usr/bin" / PYTHON).exists():
        return
    apt = FOLDER / "apt"
    for name in ("state/lists/partial", "cache/archives/partial"):
        (apt / name).mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    settings = {
        "APT::Architecture": "arm64", "APT::Architectures": "arm64", "APT::Sandbox::User": "",
        "Dir::State": apt / "state", "Dir::State::status": apt / "status", "Dir::Cache": apt / "cache",
    }  # fmt: skip
    command = ["apt-get", "-q", *(f"-o{name}={value}" for name, value in settings.items())]
    _run(*command, "update")
    _run(*command, "install", "--yes", "--download-only", "--no-install-recommends", PYTHON, "libstdc++6", "libgomp1")
    for package in sorted((apt / "cache/archives").glob("*.deb")):
        _run("dpkg-deb", "-x", package, SYSTEM)
    shutil.rmtree(apt)


def install_packages() -> None:
    """What chats and the kernel tests need, from the package index."""
    if PACKAGES.exists():
        return
    partial = FOLDER / "partial"
    shutil.rmtree(partial, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--target", partial, "--no-compile"]
    pip += ["--only-binary=:all:", "--python-version", PYTHON.removeprefix("python"), "--implementation", "cp"]
    for name in ("2014", "_2_27", "_2_28", "_2_31"):
        pip += ["--platform", f"manylinux{name}_aarch64"]
    _run(*pip, "-c", ROOT / "constraints.txt", *requirements("chat"), *TESTED)
    _run(*pip, "--no-deps", *ALONE)
    ours = distribution("h2o-stream").locate_file("").glob("h2o_stream-*.dist-info")  # which names policies of lab/
    for folder in ours:
        shutil.copytree(folder, partial / folder.name)
    partial.rename(PACKAGES)


def emulated(*arguments: object, choice: str = "i8mm", home: Path = FOLDER / "home") -> list[str]:
    """A command of the emulated Python."""
    variables = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'lab'}:{PACKAGES}", "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(home),
        "H2O_LIBRARY_FOLDER": str(LIBRARIES), "OMP_NUM_THREADS": str(os.cpu_count()),
    }  # fmt: skip
    settings = [text for name, value in variables.items() for text in ("-E", f"{name}={value}")]
    emulator = ["qemu-aarch64-static", "-cpu", PROCESSORS[choice], "-L", str(SYSTEM), *settings]
    return [*emulator, str(SYSTEM / "usr/bin" / PYTHON), *map(str, arguments)]


def _run(*command: object) -> None:
    subprocess.run([*map(str, command)], check=True)


def chat(home: Path, *options: str, choice: str = "") -> str:
    """What h2o-chat answers, at temperature 0, on this processor or an emulated one."""
    code = "import sys; from h2o_stream.cli.chat import main; sys.exit(main())"
    arguments = ["-c", code, "-q", "--temp", "0", "--max-tokens", "10", "--color", "off", *options]
    command = emulated(*arguments, choice=choice, home=home) if choice else [sys.executable, *arguments]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "H2O_"))}
    variables |= {"HOME": str(home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=variables, text=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done
    return done.stdout.strip()


def replies(tokens: int) -> str:
    """The embedded model answers with each instruction set."""
    found = {choice: chat(FOLDER / "home", CAPITAL, choice=choice) for choice in PROCESSORS}
    assert all("Paris" in reply for reply in found.values()), found
    return found["i8mm"]


def states(tokens: int) -> str:
    """A conversation begun on this machine goes on there as it does here, in float32."""
    with tempfile.TemporaryDirectory() as folder:
        here, there = Path(folder, "here"), Path(folder, "there")
        options = ("--session", "begun", "--dtype", "float32")
        chat(here, *options, CAPITAL)
        shutil.copytree(here, there)
        ours, theirs = chat(here, *options, NEXT), chat(there, *options, NEXT, choice="i8mm")
    assert ours == theirs, (ours, theirs)
    return ours


def stream(tokens: int) -> str:
    """So many tokens in the memory of the first fifth of them; in a process of its own."""
    done = subprocess.run(emulated("-m", "lab.tools.arm", "stream", tokens), text=True, stdout=subprocess.PIPE)
    assert done.returncode == 0
    return done.stdout.strip()


def _stream(tokens: int) -> None:
    import psutil

    from h2o_stream.base.progress import ignore
    from h2o_stream.config import CacheConfig
    from h2o_stream.models.find import find
    from h2o_stream.runtime.sources import ModelFile

    name = find("smollm2-135m", offline=True)
    source = ModelFile(name, Path(name), "float32")
    tokenizer, _ = source.tokenizer()
    ids = [*tokenizer(Path(__file__).read_text(encoding="utf-8"))["input_ids"]] * tokens
    cache = CacheConfig("h2o", window=WINDOW, budgets="equal")
    served = source.model(source.describe(ignore, lambda note: None)).serve(cache)
    sizes = []
    for count, token in enumerate(ids[:tokens], 1):
        served.forward([token])
        if count in (tokens // 5, tokens):
            sizes.append((psutil.Process().memory_info().rss, served.cache.allocated_bytes()))
    (rss, cache), (rss_at_end, cache_at_end) = sizes
    assert cache_at_end == cache, sizes
    assert rss_at_end < rss + SLACK, sizes
    print(f"{tokens} tokens: {rss / 2**20:.0f} MiB, then {rss_at_end / 2**20:.0f}; cache {cache_at_end:,} bytes")


def kernels(tokens: int) -> str:
    """The kernel tests, with the best set, and those of products with each other one."""
    files = [ROOT / f"tests/test_{name}.py" for name in KERNEL_TESTS]
    for choice in PROCESSORS:
        loads = f"from h2o_stream.native import library; assert library.name() == {choice!r}, library.why_not()"
        _run(*emulated("-c", loads, choice=choice))  # without it, tests are skipped
        chosen = files if choice == "i8mm" else files[:1]
        _run(*emulated("-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, choice=choice))
    return f"{len(files)} files"


def main() -> None:
    """Run what is named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1000, help="of the long stream")
    parser.add_argument("only", nargs="*", choices=[[], *PARTS], help="parts to run")
    arguments = parser.parse_args()
    unpack_system()
    install_packages()
    compile_library()
    for name in arguments.only or PARTS:
        started = time.monotonic()
        print(f"{name}: {PARTS[name](arguments.tokens)} ({time.monotonic() - started:.0f} s)", flush=True)


PARTS = {"replies": replies, "states": states, "kernels": kernels, "stream": stream}

if __name__ == "__main__":
    if os.uname().machine == "aarch64":
        _stream(int(sys.argv[-1]))
    else:
        main()
