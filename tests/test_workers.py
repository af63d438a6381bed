"""Forked test workers report crashes, failures and warnings; terminals answer what comes in parts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.terminal import Pty

TESTS = """
import os, pathlib, signal, warnings, pytest

@pytest.mark.parametrize("number", range(6))
def test_it(number, tmp_path):
    pathlib.Path(tmp_path, "mine").write_text("")
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 3:
        warnings.warn("a word of warning")
    assert number != 4, "a failure"
"""


@pytest.mark.exhaustive
def test_what_is_reported(tmp_path: Path) -> None:
    for name in ("test_one.py", "test_other.py"):
        (tmp_path / name).write_text(TESTS)
    command = ["-m", "pytest", "-p", "tests.workers", "--workers", "2", "-p", "no:cacheprovider", "-c", os.devnull]
    done = subprocess.run(
        [sys.executable, *command, tmp_path], cwd=Path(__file__).parents[1], capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    assert re.search("4 failed, 8 passed, 2 warnings in", done.stdout), done.stdout
    for words in ("the process of this test ended with -9 (a signal)", "a failure", "a word of warning"):
        assert done.stdout.count(words) >= 2


def test_a_terminal_says_where_the_cursor_is_also_if_it_is_asked_in_parts() -> None:
    """Else a prompt would have no line below it."""
    code = "import os, time, tty; tty.setraw(0); os.write(1, b'\\x1b['); time.sleep(0.3); os.write(1, b'6n')"
    with Pty("-c", f"{code}; print(os.read(0, 9))") as pty:
        pty.until(lambda p: r"b'\x1b[1;1R'" in p.text)
