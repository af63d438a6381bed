"""Instructions for each byte of weights in a step on processors of Arm, ours and llama.cpp's, counted by the emulator.

    python -m lab.tools.arm_counts LLAMA_CPP

compiles the kernels of a checkout of llama.cpp by the same compiler, and runs both with one instruction a time, with
some weights and with twice as many: the difference is what the inner loops execute. `make test-arm` goes first. Not
collected by pytest.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lab.tools.arm import COMPILER, FOLDER, LIBRARIES, PROCESSORS, ROOT, SYSTEM

COLUMNS, ROWS = 1024, 16

TYPES = {
    "Q4_K": (144 / 256, "kQ4K", "q4_K_q8_K", "q4_K_8x4_q8_K q4_K_8x8_q8_K"),
    "Q4_0": (18 / 32, "kInt4", "q4_0_q8_0", "q4_0_4x4_q8_0 q4_0_4x8_q8_0"),
    "Q8_0": (34 / 32, "kInt8", "q8_0_q8_0", "q8_0_4x4_q8_0 q8_0_4x8_q8_0"),
    "Q6_K": (210 / 256, "kQ6K", "q6_K_q8_K", "q6_K_8x4_q8_K q6_K_8x8_q8_K"),
}
"""Bytes of a weight in a file, our kind, and llama.cpp's kernels: for blocks of files, and for those it repacks."""

FLAGS = {"neon": "-march=armv8.2-a+dotprod", "i8mm": "-march=armv8.2-a+dotprod+i8mm"}

OURS = """
#include <dlfcn.h>
#include <cstdlib>
#include "abi.h"
alignas(64) static unsigned char weights[1 << 20];
static float x[1 << 12], y[1 << 12];
int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW);
  auto multiply = (int64_t (*)(const Matrix*, const float*, float*, int64_t, int64_t, int64_t))
      dlsym(library, "h2o_multiply");
  const Matrix matrix{weights, nullptr, atol(arguments[2]), %d, %s, 0};
  return multiply(&matrix, x, y, 1, 0, 1);
}
"""

THEIRS = """
#include <stdlib.h>
#include "quants.h"
#include "repack.h"
static unsigned char weights[1 << 20], x[1 << 20];
static float y[1 << 12];
int main(int count, char** arguments) { ggml_%s; return 0; }
"""


def counted(program: Path, choice: str, *arguments: object) -> int:
    """Instructions that a program executes."""
    log = program.with_suffix(".log")
    emulator = ["qemu-aarch64-static", "-cpu", PROCESSORS[choice], "-L", SYSTEM, "-singlestep", "-d", "exec,nochain"]
    subprocess.run([*map(str, (*emulator, "-D", log, program, *arguments))], check=True)
    with log.open("rb") as file:
        count = sum(1 for _ in file)
    log.unlink()
    return count


def compiled(name: str, source: str, *options: object) -> Path:
    """A program of the source."""
    program = FOLDER / "counts" / name
    program.parent.mkdir(exist_ok=True)
    program.with_suffix(".cpp").write_text(source)
    subprocess.run([*map(str, (COMPILER, "-O2", program.with_suffix(".cpp"), *options, "-o", program))], check=True)
    return program


def ours(kind: str, choice: str) -> float:
    """For a weight."""
    program = compiled(kind, OURS % (COLUMNS, kind), "-ldl", f"-I{ROOT}/h2o_stream/native/src")
    once, twice = (counted(program, choice, LIBRARIES / f"_h2o_{choice}.so", rows) for rows in (ROWS, 2 * ROWS))
    return (twice - once) / (ROWS * COLUMNS)


def theirs(objects: list[Path], include: list[str], call: str, choice: str, rows: int) -> float:
    """For a weight, with so many rows at a time."""
    link = ["-static", "-Wl,--gc-sections,--unresolved-symbols=ignore-all"]
    program = compiled(call.partition("(")[0], THEIRS % call, *include, *objects, *link)
    once, twice = (counted(program, choice, *range(size)) for size in (1, 2))
    return (twice - once) / (rows * COLUMNS)


def main() -> None:
    """Print a table."""
    source = Path(sys.argv[1]) / "ggml"
    include = [f"-I{source}/{name}" for name in ("include", "src", "src/ggml-cpu")]
    for choice, flags in FLAGS.items():
        objects = [FOLDER / f"{name}-{choice}.o" for name in ("quants", "repack")]
        for file, to in zip(("quants.c", "repack.cpp"), objects, strict=True):
            command = [COMPILER.replace("g++", "gcc") if file.endswith("c") else COMPILER, "-O3", flags, *include]
            command += ["-ffunction-sections", "-D_GNU_SOURCE", "-w", "-c", source / "src/ggml-cpu/arch/arm" / file]
            subprocess.run([*map(str, (*command, "-o", to))], check=True)
        for name, (size, kind, dot, repacked) in TYPES.items():
            columns = f"count * {COLUMNS}"
            calls = [(1, f"vec_dot_{dot}({columns}, y, 0, weights, 0, x, 0, 1)")]
            calls += [(8, f"gemv_{one}({columns}, y, 0, weights, x, 1, 8)") for one in repacked.split()]
            counts = [theirs(objects, include, call, choice, rows) / size for rows, call in calls]
            print(f"{choice} {name}: ours {ours(kind, choice) / size:.2f}, llama.cpp's", *(f"{x:.2f}" for x in counts))


if __name__ == "__main__":
    main()
