"""Compiles h2o_stream/native/src for wheels and editable installs.

See CMakeLists.txt. A wheel has the libraries of all instruction sets and is built without leaving files behind. An
editable install has the one for this processor, in the source tree, and keeps build/native; H2O_SETS=all in the
environment compiles all. Without a compiler, or if compilation fails, the package is installed without libraries.

This is also the build backend: hatchling's, but that compiling for a wheel begins with its metadata. pip asks for these
before it downloads what the package needs, and for the wheel after that.

`python hatch_build.py` compiles for an editable install and prints CMake's output (set_up.py does so).
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

os.environ.pop("PIP_BUILD_TRACKER", None)  # with it, hatchling leaves metadata to the wheel
try:
    from hatchling.build import *  # noqa: F403
    from hatchling.build import prepare_metadata_for_build_wheel as _prepare_metadata
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # not a build: this file is run
    BuildHookInterface = object

ROOT = Path(__file__).parent

WHEEL_FOLDER = ROOT / "build" / "wheel"
"""Where libraries for a wheel are compiled."""

LIBRARY_FOLDER = Path("h2o_stream/native")
"""Location of the libraries, in the source tree and in a wheel."""

COMPILED = "H2O_COMPILED"
"""Environment variable: an editable install leaves the libraries as they are."""


class NativeLibraries(BuildHookInterface):
    """The build hook."""

    def dependencies(self) -> list[str]:
        """Require CMake and Ninja from the package index if they are missing and there is a compiler."""
        return missing_tools()

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and add the libraries to the wheel."""
        if version == "editable":
            if not os.environ.get(COMPILED):
                self._warn(compile_here())
            return
        failure = compile_for_wheel()
        self._warn(failure)
        materials = WHEEL_FOLDER / "h2o-stream.cdx.json"
        materials.write_text(json.dumps(bill_of_materials(), indent=1), encoding="utf-8")
        build_data["sbom_files"].append(str(materials))
        if not failure:
            # The libraries do not link against Python, so the wheel depends on the platform only.
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform_tag()}"
            for library in WHEEL_FOLDER.glob(f"{LIBRARY_FOLDER}/*"):
                build_data["force_include"][str(library)] = str(LIBRARY_FOLDER / library.name)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Clean up."""
        if version != "editable":
            shutil.rmtree(WHEEL_FOLDER)
            with suppress(OSError):  # it has more
                WHEEL_FOLDER.parent.rmdir()

    def _warn(self, failure: str) -> None:
        if failure and os.environ.get("H2O_REQUIRE_LIBRARY"):
            raise SystemExit(f"h2o-stream: {failure}")
        if failure:
            self.app.display_warning(
                f"h2o-stream is installed without its compiled library, and will be slower: {failure}"
            )


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    """Begin to compile; the rest is hatchling's."""
    command, silent = [sys.executable, __file__, "wheel"], subprocess.DEVNULL
    subprocess.Popen(command, stdin=silent, stdout=silent, stderr=silent)
    return _prepare_metadata(metadata_directory, config_settings)


def bill_of_materials() -> dict[str, Any]:
    """What is in the wheel, and which versions of other packages it is tested with, in the form of CycloneDX.

    Packages for tests alone have the scope ``excluded``, those of other extras ``optional``; all others are required,
    those in constraints.txt that nothing here names among them, as some of what is named requires them.
    """
    import tomllib  # not in the Pythons that set_up.py refuses

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    scopes = {}
    for extra, texts in sorted(project["optional-dependencies"].items(), key=lambda item: item[0] != "dev"):
        scopes |= dict.fromkeys(map(_package, texts), "excluded" if extra == "dev" else "optional")
    scopes |= dict.fromkeys(map(_package, project["dependencies"]), "required")
    pins = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    packages = [
        {
            "type": "library", "name": name, "version": version, "scope": scopes.get(_package(name), "required"),
            "purl": f"pkg:pypi/{_package(name)}@{version}",
        }
        for name, version in pins
    ]  # fmt: skip
    listed = json.loads((ROOT / "h2o_stream/serve/page/vendor/vendor.json").read_text(encoding="utf-8"))
    contained = [
        {
            "type": "library", "name": file["name"], "version": file["version"], "scope": "required",
            "purl": f"pkg:npm/{file['name'].replace('@', '%40')}@{file['version']}",
            "licenses": [{"license": {"id": file["license"]}}],
            "hashes": [{"alg": "SHA-256", "content": file["sha256"]}],
        }
        for file in listed
    ]  # fmt: skip
    ours = {"type": "application", "name": project["name"], "version": project["version"]}
    purl = f"pkg:pypi/{project['name']}@{project['version']}"
    return {
        "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
        "metadata": {"component": {**ours, "purl": purl, "bom-ref": purl}},
        "components": [{**component, "bom-ref": component["purl"]} for component in (*contained, *packages)],
    }  # fmt: skip


def _package(requirement: str) -> str:
    """The name of a required package, as indexes spell it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()


def compiler() -> str:
    """The path of the C++ compiler, or ""."""
    cxx = os.environ.get("CXX")
    found = map(shutil.which, [cxx.split()[0]] if cxx else ["c++", "g++", "clang++"])
    return next(filter(None, found), "")


def missing_tools() -> list[str]:
    """What compiling needs besides the compiler, if there is one, and the package index has."""
    return [tool for tool in ("cmake", "ninja") if compiler() and shutil.which(tool) is None]


def compile_here(echo: bool = False) -> str:
    """Compile into the source tree, and remove libraries that were not compiled now. Returns why it failed, or ""."""
    folder = ROOT / "build" / "native"
    failure = compile_to(folder, ROOT, os.environ.get("H2O_SETS", "native"), echo)
    manifest = folder / "install_manifest.txt"
    installed = "" if failure or not manifest.exists() else manifest.read_text()
    for library in ROOT.glob(f"{LIBRARY_FOLDER}/_h2o_*"):
        if f"{library.stem}.so" not in installed:
            library.unlink()
    return failure


def compile_for_wheel() -> str:
    """Compile all sets, or wait for the process that does. Returns why it failed, or ""."""
    with _alone(WHEEL_FOLDER):
        return compile_to(WHEEL_FOLDER / "build", WHEEL_FOLDER, "all")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Inside, no other process uses the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        if os.name == "posix":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_to(folder: Path, prefix: Path, sets: str, echo: bool = False) -> str:
    """Compile in a folder and install under `prefix`. Returns why it failed, or ""."""
    if not compiler():
        return "no C++ compiler was found"
    ninja = shutil.which("ninja")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    options = [f"-DCMAKE_INSTALL_PREFIX={prefix}", f"-DH2O_SETS={sets}", *generator]
    options += os.environ.get("H2O_CMAKE_ARGS", "").split()  # such as to compile for another processor
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), *options]
    build = ["cmake", "--build", str(folder), "--target", "install/strip", "--parallel", str(os.cpu_count() or 1)]
    try:
        if (folder / "CMakeCache.txt").exists() and _run(configure, echo):
            shutil.rmtree(folder)  # made by another compiler, or for a checkout that was moved
        return _run(configure, echo) or _run(build, echo)
    except OSError as error:
        return str(error)


def _run(command: list[str], echo: bool) -> str:
    """Run a command; returns its output if it fails."""
    output = []
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as running:
        for line in running.stdout or ():
            output.append(line)
            if echo:
                print(line, end="", flush=True)
    return f"{' '.join(command)} failed:\n{''.join(output)}" if running.returncode else ""


def _platform_tag() -> str:
    # A universal Python on macOS compiles for the running architecture.
    platform_name = sysconfig.get_platform().replace("universal2", platform.machine())
    return platform_name.replace("-", "_").replace(".", "_")


if __name__ == "__main__":
    sys.exit((compile_for_wheel() if sys.argv[1:] == ["wheel"] else compile_here(echo=True)) or 0)
