"""The layers of the package: imports point one way, and no modules import each other in a circle."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import h2o_stream
from tests.fixtures import written
from tests.test_streams import LINES

ROOT = Path(h2o_stream.__file__).parent
LAYERS = (
    "base", "config", "cache", "native", "gpu", "models", "runtime", "attachment", "loading", "engine", "recall",
    "session", "serve", "compare", "ui", "cli",
)  # fmt: skip
"""A layer imports only layers before it."""

MODULES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}


@cache
def imports(module: str) -> list[str]:
    """The modules of the package that a module imports, also inside functions and for type checkers only."""
    return [*_imported(module)]


def _imported(module: str) -> Iterator[str]:
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in MODULES else node.module for name in names)


def circle() -> list[str]:
    """Modules that import each other in a circle, if there are any."""
    graph = {name: set(imports(name)) - {name, "h2o_stream"} for name in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_circle() -> None:
    assert circle() == []


def test_only_entry_points_name_the_laboratory() -> None:
    """It comes in as other packages do."""
    assert [name for name, path in MODULES.items() if "h2o_lab" in path.read_text(encoding="utf-8")] == []


def test_layers() -> None:
    upward = []
    for number, layer in enumerate(LAYERS):
        above = tuple(f"h2o_stream.{name}." for name in LAYERS[number + 1 :])
        for module in (name for name in MODULES if name.startswith(f"h2o_stream.{layer}.")):
            upward += [(module, name) for name in imports(module) if name.startswith(above)]
    assert upward == []


def test_few_rooms_know_each_other() -> None:
    rooms = {name: name.split(".")[1] for name in MODULES if name.count(".") > 1 or name == "h2o_stream.errors"}
    pairs = {(rooms.get(name), rooms.get(other)) for name in MODULES for other in imports(name)}
    assert len({(one, other) for one, other in pairs if one != other}) <= 110


def test_without_torch() -> None:
    """What a chat with a model of the runtime takes."""
    modules = (
        "cache.cache_state", "cache.audit", "cache.holders", "recall.recall", "session.history",
        "ui.chat", "ui.stream", "serve.app",
    )  # fmt: skip
    code = (
        "import sys\nfrom importlib import import_module\nfor name in sys.argv[1:]:\n"
        "    import_module(f'h2o_stream.{name}')\n    print(name, *{'torch', 'transformers'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [*modules]


HELP = ("h2o-chat --help", "h2o-chat --version", "h2o-stream -h", "h2o-compare --help", "h2o-compare nll --help")
QUICK = ("h2o-chat --models", "h2o-chat --sessions", "h2o-chat --window 0", "h2o-stream --replay {} --pace 1000")
COMMANDS = """
import sys
from importlib import import_module
for line in sys.argv[1:]:
    sys.argv = line.split()
    try:
        import_module("h2o_stream.cli." + sys.argv[0].removeprefix("h2o-")).main()
    except SystemExit:
        pass
    print("IMPORTED", *sorted({"torch", "transformers", "numpy", "sqlite3"} & sys.modules.keys()))
"""
"""Commands one after another, and what of some slow packages was imported until then."""


def test_commands_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does help import numpy."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    lines = [*HELP, *QUICK[:-1], QUICK[-1].format(written(tmp_path / "run.cast", LINES))]
    done = subprocess.run([sys.executable, "-c", COMMANDS, *lines], capture_output=True, text=True, check=True)
    imported = [line for line in done.stdout.splitlines() if line.startswith("IMPORTED")]
    assert (len(imported), imported[: len(HELP)]) == (len(lines), ["IMPORTED"] * len(HELP))
    assert not [line for line in imported if "torch" in line or "transformers" in line]
    assert [word for word in ("Usage", "h2o_stream ", "smollm2-135m", "Grüße") if word not in done.stdout] == []


_SLOW = {
    "torch", "transformers", "huggingface_hub", "pydantic", "prompt_toolkit", "asyncio", "gguf", "rich.markdown",
    "h2o_stream.ui.commands", "h2o_stream.ui.tables",
}  # fmt: skip
"""What one reply needs nothing of; each takes a tenth of its time or more, or brings in what does."""


def test_one_reply_imports_little() -> None:
    code = f"""
import atexit, sys
atexit.register(lambda: print(*sorted({_SLOW!r} & sys.modules.keys()), file=sys.stderr))
from h2o_stream.cli.chat import main
main()"""
    arguments = ["-p", "Hi.", "-q", "-n", "1", "--temp", "0", "--seed", "1", "--window", "64"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.strip()
    assert done.stderr.strip() == ""
