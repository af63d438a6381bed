"""Build hook that compiles h2o_stream/native/src for wheels and editable installs.

See CMakeLists.txt. If there is no compiler or compilation fails, the package is installed without the libraries. An
editable install puts them in the source tree and keeps build/native; a wheel build leaves no files behind.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY_FOLDER = Path("h2o_stream/native")
"""Location of the libraries, in the source tree and in a wheel."""


class NativeLibraries(BuildHookInterface):
    """The build hook."""

    def dependencies(self) -> list[str]:
        """Require CMake and Ninja from the package index if they are missing and there is a compiler."""
        return [tool for tool in ("cmake", "ninja") if _has_compiler() and shutil.which(tool) is None]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and add the libraries to the wheel."""
        root = Path(self.root)
        if version == "editable":
            if not self._compile(root / "build" / "native", root):
                for outdated in root.glob(f"{LIBRARY_FOLDER}/_h2o_*"):
                    outdated.unlink()
            return
        self._scratch = tempfile.TemporaryDirectory()
        scratch = Path(self._scratch.name)
        if self._compile(scratch / "build", scratch):
            # The libraries do not link against Python, so the wheel depends on the platform only.
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform_tag()}"
            for library in scratch.glob(f"{LIBRARY_FOLDER}/*"):
                build_data["force_include"][str(library)] = str(LIBRARY_FOLDER / library.name)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Clean up."""
        if version != "editable":
            self._scratch.cleanup()

    def _compile(self, folder: Path, prefix: Path) -> bool:
        """Compile in a folder and install under `prefix`; returns whether it succeeded."""
        if not _has_compiler():
            self._warn("no C++ compiler was found")
            return False
        ninja = shutil.which("ninja")
        generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
        configure = ["cmake", "-S", self.root, "-B", str(folder), f"-DCMAKE_INSTALL_PREFIX={prefix}", *generator]
        build = ["cmake", "--build", str(folder), "--target", "install/strip", "--parallel", str(os.cpu_count() or 1)]
        try:
            if (folder / "CMakeCache.txt").exists() and _run(configure):
                shutil.rmtree(folder)  # made by another compiler, or for a checkout that was moved
            failure = _run(configure) or _run(build)
        except OSError as error:
            failure = str(error)
        if failure:
            self._warn(failure)
        return not failure

    def _warn(self, reason: str) -> None:
        if os.environ.get("H2O_REQUIRE_LIBRARY"):
            raise SystemExit(f"h2o-stream: {reason}")
        self.app.display_warning(f"h2o-stream is installed without its compiled library, and will be slower: {reason}")


def _run(command: list[str]) -> str:
    """Run a command; returns its output if it fails."""
    result = subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return f"{' '.join(command)} failed:\n{result.stdout}" if result.returncode else ""


def _has_compiler() -> bool:
    cxx = os.environ.get("CXX")
    return any(shutil.which(name) for name in ([cxx.split()[0]] if cxx else ["c++", "g++", "clang++"]))


def _platform_tag() -> str:
    # A universal Python on macOS compiles for the running architecture.
    platform_name = sysconfig.get_platform().replace("universal2", platform.machine())
    return platform_name.replace("-", "_").replace(".", "_")
