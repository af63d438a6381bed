"""Which compiled library is loaded, and the message if there is none."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from h2o_stream.errors import ConfigError
from h2o_stream.native import abi, library
from h2o_stream.native.library import FOLDER_VARIABLE, INSTRUCTIONS, INSTRUCTIONS_VARIABLE
from h2o_stream.native.threads import MAX_PER_PROCESSOR, num_threads
from tests.native_builds import needs_library
from tests.preloaded import run

INSTALLED = library.name()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch):
    """Load the library again before and after each test."""
    monkeypatch.delenv(INSTRUCTIONS_VARIABLE, raising=False)
    for kept in (library._load, library._interface):
        kept.cache_clear()
    yield
    monkeypatch.undo()
    for kept in (library._load, library._interface):
        kept.cache_clear()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder in which libraries are searched for."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


def test_instructions_of_vectors_come_in_by_one_door():
    """And by those of hardware that only some x86 processors have."""
    doors = {"simd.h", "simd_bytes.h", "bfloat16_units.h", "bfloat16_units.cpp", "denormals.h", "event_counter.h"}
    sources = (Path(abi.__file__).parent / "src").iterdir()
    used = re.compile(r"\b_mm\d*_|\b__m\d+|\bv[a-z0-9]+_[a-z_]*[suf](?:8|16|32|64)\(|\basm\(")
    assert {path.name for path in sources if used.search(path.read_text(encoding="utf-8"))} - doors == set()


def test_compiled_where_there_is_a_compiler():
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no compiler")
    assert library.why_not() == ""
    assert library.available()


@needs_library
class TestChoice:
    def test_the_best_of_this_processor(self):
        assert library.name() == library.available()[-1]
        assert library.loaded().h2o_library_instructions() == INSTRUCTIONS.index(library.name())

    @pytest.mark.parametrize("choice", library.available())
    def test_a_named_one(self, monkeypatch, choice):
        monkeypatch.setenv(INSTRUCTIONS_VARIABLE, choice)
        assert library.name() == choice
        assert library.loaded().h2o_library_instructions() == INSTRUCTIONS.index(choice)
        assert library.why_not() == ""

    def test_a_name_that_there_is_not(self, monkeypatch):
        monkeypatch.setenv(INSTRUCTIONS_VARIABLE, "sse9")
        with pytest.raises(ConfigError, match=r"H2O_INSTRUCTIONS=sse9: choose one of portable, avx2, avxvnni, avx512"):
            library.loaded()

    def test_one_that_is_not_installed(self, monkeypatch, folder):
        for file in Path(library.__file__).parent.glob(f"_h2o_{INSTALLED}.*"):
            shutil.copy(file, folder)
        assert library.available() == []  # nothing says what the processor supports
        for file in Path(library.__file__).parent.glob("_h2o_cpu.*"):
            shutil.copy(file, folder)
        assert library.available() == [INSTALLED]
        assert library.name() == INSTALLED
        library._load.cache_clear()
        other = next(name for name in INSTRUCTIONS if name != INSTALLED)
        monkeypatch.setenv(INSTRUCTIONS_VARIABLE, other)
        with pytest.raises(ConfigError, match=f"have {INSTALLED}$"):
            library.loaded()


class TestNone:
    def test_says_what_to_do(self, folder):
        assert library.loaded() is None
        assert library.name() == "none"
        assert library.available() == []
        assert "install GCC or Clang" in library.why_not()
        assert "\n" not in library.why_not()

    def test_a_name_that_there_is_not(self, monkeypatch, folder):
        monkeypatch.setenv(INSTRUCTIONS_VARIABLE, "sse9")
        with pytest.raises(ConfigError, match="sse9"):
            library.loaded()

    def test_a_file_that_is_not_a_library(self, folder):
        (folder / "_h2o_cpu.so").write_bytes(b"of another machine")
        assert library.loaded() is None
        assert "_h2o_cpu.so" in library.why_not()

    @needs_library
    def test_damaged_ones_are_refused(self, folder):
        """In a separate process, since loading a damaged library can crash it."""
        whole = Path(library.__file__).with_name(f"_h2o_{INSTALLED}.so")
        for file in (whole.with_suffix(".sum"), *whole.parent.glob("_h2o_cpu.*")):
            shutil.copy(file, folder)
        code = f"""
from pathlib import Path
from random import Random
from h2o_stream.native import library
whole, path, drawn = Path({str(whole)!r}).read_bytes(), Path({str(folder)!r}) / {whole.name!r}, Random(0)
lengths = [0, 1, 64, 4096, *(drawn.randrange(len(whole)) for _ in range(20)), len(whole) - 1]
flips = [(place, 1 << drawn.randrange(8)) for place in (drawn.randrange(len(whole)) for _ in range(30))]
damaged = [whole[:length] for length in lengths]
damaged += [whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1:] for place, bit in flips]
for number, harmed in enumerate([*damaged, whole]):
    path.write_bytes(harmed)
    library._load.cache_clear()
    assert (library.loaded() is None) == (number < len(damaged)), number
    assert library.loaded() or "checksum differs" in library.why_not()
path.with_suffix(".sum").unlink()
library._load.cache_clear()
assert library.loaded() is None
"""
        done = run("-c", code)
        assert done.returncode == 0, done.stderr


@needs_library
class TestOtherVersions:
    def test_one_for_another_interface_is_not_used(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As after a pull that changes a structure, before `make setup`."""
        for file in Path(library.__file__).parent.glob("_h2o_*"):
            shutil.copy(file, folder)
        assert library.why_not() == ""
        changed = folder / "abi.py"
        changed.write_text(Path(abi.__file__).read_text().replace("rows columns kind", "rows columns stride kind"))
        monkeypatch.setattr(abi, "__file__", str(changed))
        library._interface.cache_clear()
        assert_another_version()

    @pytest.mark.skipif(not shutil.which("g++"), reason="no compiler")
    def test_one_that_does_not_say_its_interface_is_not_used(self, folder: Path) -> None:
        path, source = folder / "_h2o_cpu.so", folder / "old.cpp"
        source.write_text('extern "C" long h2o_cpu_supports(long number) { return number == 0; }')
        subprocess.run(["g++", "-shared", "-fPIC", source, "-o", path], check=True)
        path.with_suffix(".sum").write_text(hashlib.sha256(path.read_bytes()).hexdigest())
        assert_another_version()


def assert_another_version() -> None:
    library._load.cache_clear()
    assert library.loaded() is None
    assert library.name() == "none"
    reason = library.why_not()
    assert "run make setup" in reason
    assert "_h2o_cpu.so was compiled for another version" in reason
    assert "\n" not in reason


@pytest.mark.exhaustive
def test_the_interface_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys\n"
        "from h2o_stream.native import abi, description, library, packing, slots\n"
        "from h2o_stream.native.threads import num_threads\n"
        "threads = num_threads()\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "print(threads, num_threads())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    ours, as_torch_has = done.stdout.split()
    assert ours == as_torch_has
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert num_threads() == 7
    for many in ("100000", "9" * 5000):
        monkeypatch.setenv("OMP_NUM_THREADS", many)
        assert num_threads() <= MAX_PER_PROCESSOR * (os.cpu_count() or 1)
