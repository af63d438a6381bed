"""Wheels: with compiled libraries if there is a compiler, without them otherwise."""

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from h2o_stream.native import library

pytest.importorskip("hatchling", reason="the build backend: pip install -e .[dev]")

ROOT = Path(__file__).parent.parent


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the minimum that compiles."""
    copy = tmp_path / "checkout"
    ignored = shutil.ignore_patterns("__pycache__", "_h2o_*", "src")
    shutil.copytree(ROOT / "h2o_stream", copy / "h2o_stream", ignore=ignored)
    for folder in ("data", "prompts", "lab"):
        shutil.copytree(ROOT / folder, copy / folder)
    needed = "pyproject.toml hatch_build.py CMakeLists.txt README.md LICENSE .gitignore constraints.txt"
    for name in needed.split():
        shutil.copy(ROOT / name, copy)
    sources = copy / "h2o_stream" / "native" / "src"
    sources.mkdir()
    (sources / "simd.h").touch()  # compiled once for all sources, which takes seconds
    (sources / "other.cpp").touch()
    for name in ("abi.cpp", "abi.h", "cpu.cpp", "compat.h"):
        shutil.copy(ROOT / "h2o_stream" / "native" / "src" / name, sources)
    return copy


def _wheel(checkout: Path, **environment: str) -> tuple[str, set[str], str]:
    """The wheel's name, its files, and the build output."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "wheels"]
    done = subprocess.run(command, cwd=checkout, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (checkout / "wheels").iterdir()
    with zipfile.ZipFile(wheel) as opened:
        return wheel.name, set(opened.namelist()), done.stdout + done.stderr


def test_without_a_compiler(checkout):
    name, files, said = _wheel(checkout, CXX="/nowhere/c++")
    assert name.endswith("-py3-none-any.whl")
    assert not [file for file in files if file.endswith(".so")]
    assert {"h2o_stream/native/library.py", "h2o_stream/prompts/assistant.txt"} <= files
    assert {"h2o_lab/harness/small_tasks/facts.yaml", "h2o_lab/book/questions.jsonl"} <= files
    assert "without its compiled library" in said
    assert {"h2o_stream/py.typed", "h2o_stream/serve/page/vendor/purify.min.js"} <= files
    (metadata,) = {file.partition("/")[0] for file in files if ".dist-info/" in file}
    assert f"{metadata}/licenses/h2o_stream/serve/page/vendor/purify.LICENSE.txt" in files
    with zipfile.ZipFile(checkout / "wheels" / name) as opened:
        listed = json.loads(opened.read(f"{metadata}/sboms/h2o-stream.cdx.json"))["components"]
    scopes = {component["name"]: component["scope"] for component in listed}
    assert scopes["torch"] == scopes["dompurify"] == "required"
    assert (scopes["pytest"], scopes["rouge_score"]) == ("excluded", "optional")
    vendored, torch = (next(each for each in listed if each["name"] == name) for name in ("dompurify", "torch"))
    assert vendored["purl"] == f"pkg:npm/dompurify@{vendored['version']}"
    assert f"torch=={torch['version']}\n" in (ROOT / "constraints.txt").read_text()


@pytest.mark.skipif(not all(map(shutil.which, ("c++", "cmake"))), reason="nothing to compile with")
class TestCompiled:
    @pytest.mark.exhaustive
    def test_the_wheel_is_for_this_kind_of_machine(self, checkout):
        """Compiling begins with its metadata, which pip asks for before it downloads what the package needs."""
        code = "import hatch_build; hatch_build.prepare_metadata_for_build_wheel('.')"
        environment = os.environ | {"PIP_BUILD_TRACKER": "pip's"}
        subprocess.run([sys.executable, "-c", code], cwd=checkout, check=True, env=environment)
        last, deadline = checkout / "build/wheel/h2o_stream/native/_h2o_cpu.sum", time.monotonic() + 60
        while not last.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        (broken := checkout / "h2o_stream/native/src/other.cpp").write_text("no C++")
        os.utime(broken, (0, 0))  # older than what was compiled
        name, files, _ = _wheel(checkout, H2O_REQUIRE_LIBRARY="1")
        assert "-py3-none-" in name
        assert not name.endswith("-any.whl")
        assert {f"h2o_stream/native/_h2o_{name}.so" for name in ("cpu", "portable")} <= files
        assert not (checkout / "build").exists()

    def test_an_editable_install_is_for_this_processor(self, checkout, monkeypatch):
        monkeypatch.delenv("H2O_SETS", raising=False)
        code = "from hatchling.build import build_editable; build_editable('wheels')"
        subprocess.run([sys.executable, "-c", code], cwd=checkout, check=True, capture_output=True)
        compiled = {path.name for path in (checkout / "h2o_stream" / "native").glob("_h2o_*.so")}
        assert len(compiled) == 2
        assert compiled == {"_h2o_cpu.so", f"_h2o_{library.name()}.so"}

    def test_sources_that_do_not_compile(self, checkout):
        (checkout / "source.cpp").write_text("no C++")
        (checkout / "CMakeLists.txt").write_text("project(x LANGUAGES CXX)\nadd_library(x MODULE source.cpp)")
        name, files, said = _wheel(checkout)
        assert name.endswith("-py3-none-any.whl")
        assert not [file for file in files if file.endswith(".so")]
        assert "error" in said
