"""Every command and Python example of the documentation runs; every link has a target."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from h2o_stream.config import POLICIES
from tests.commands import invoke
from tests.fixtures import make_llama, written
from tests.in_turn import in_turn

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "lab" / "docs" / "comparisons.md",
]  # fmt: skip
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
SEEDS = re.compile(r"^\| `(?:python|helm).*$", re.M)
INLINE = re.compile(r"`(h2o-(?:chat|stream|compare)\s[^`]+)`")

PROSE = [*PAGES, *sorted((ROOT / "lab" / "docs").glob("*.md"))]
FOLDERS = (ROOT, ROOT / "h2o_stream", ROOT / "lab")
"""What paths in the text are relative to."""

PATH = re.compile(r"(?<![\w./~-])[\w*][\w*./-]*\.(?:py|cpp|h)\b(?!\()|(?<=`)[\w*][\w*.-]*/[\w*./-]*(?=`)")
PAIR = re.compile(r"`([A-Za-z_][\w.]*)`\s+(?:\(|in\s+)`([\w./]+\.(?:py|cpp|h))`")
MODULES = re.compile(r"^\| modules? of `([\w/]+)/`.*\n\| ---.*\n((?:\|.*\n)+)", re.M)

ELSEWHERE = (
    "torchrun", "accelerate", "h2o-lm-eval", "h2o-serve", "--server", "--ray", "cuda", "0=10GiB",
    "--install-completion", "..",
)  # fmt: skip
"""Commands that other tests run (several processes or machines, the harness, the server), that need a GPU, or that are
not literal."""

SMALL: dict[str, str] = {
    "h2o-chat": "-n 2", "h2o-stream": "-n 2 --turns 1", "nll": "--tokens 60 --policies full,h2o --windows 24",
    "--masked": "--tokens 60 --policies full,h2o-paper --windows 24",
    "recall": "--facts 1 --distances 8 --policies sink --windows 64 --chat 100",
    "summarize": "--limit 2 --policies full,h2o --windows 24",
    "tasks": "--limit 2 --policies full,h2o --tasks h2o_causes",
    "--suite ruler": "--tasks niah_single --lengths 150 --items 2 --windows 64 --form one-turn",
    "--suite book": "--lengths 64 --policies sink --windows 64 --recall off",
    "speed": "--histories 64 --policies h2o --windows 24 --quantizations none --peers=",
    "divergence": "--tokens 8 --peers=",
    "throughput": "--shapes 20+5 --cache-budget 160KiB --policies h2o --ratio 0.4 --rounds 1",
    "heavy-hitters": "--tokens 100 --window 24 --chunk 8 --policies h2o",
    "soak": "--tokens 20000 --passes 4 --window 64", "report": "", "all": "",
}  # fmt: skip
"""Options that make each command quick."""

NEEDED = {
    "--requests": ["summarize"],
    "--text": ["nll", "recall", "speed", "divergence", "throughput", "heavy-hitters"],
}
"""Options to add where the text only mentions a command."""

SLOW = ("speed", "soak", "tasks", "--suite book")
"""Only one command of each of these is run; of the others just the options are checked, with a missing model."""

COMPARISONS = (
    "nll", "--masked", "recall", "summarize", "--suite ruler", "--suite book", "throughput", "divergence",
    "heavy-hitters",
)  # fmt: skip
"""The same in `make test`; `make test-all` runs them all."""

RUN_ELSEWHERE = (
    "speed", "soak", "tasks", "--suite ruler", "--suite book", "recall", "summarize", "divergence", "heavy-hitters"
)  # fmt: skip
"""Those of which `make test` runs no command of the documentation, as other modules run the same comparison."""


WITHOUT_MODEL = ("--replay", "--sessions", "--search", "--export", "--help", "--version", "report", "all")
"""Those that end well without a model."""


def commands() -> list[tuple[str, str]]:
    found: dict[str, str] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = [line for kind, block in FENCED.findall(text) if kind in ("", "sh") for line in block.splitlines()]
        text = SEEDS.sub("", text)  # test_seeds.py runs these
        lines += [" ".join(line.split()) for line in INLINE.findall(FENCED.sub("", text))]
        for line in lines:
            command = line.partition("  #")[0].split(" | ")[-1].strip()
            if command.startswith("h2o-") and not any(word in line for word in ELSEWHERE):
                found.setdefault(command, page.name)
    return [(page, command) for command, page in found.items()]


COMMANDS = commands()


def kind_of(line: str) -> str:
    command, *arguments = shlex.split(line)
    for option in ("--suite ruler", "--suite book", "--masked"):
        if option in line:
            return option
    return arguments[0] if command == "h2o-compare" and arguments else command


def of_documentation() -> list[Any]:
    """The commands as parameters, and whether to run them. What others run, with the same options, is exhaustive."""
    exhaustive, known, parameters, run = pytest.mark.exhaustive, set[str](), list[Any](), set[tuple[str, str]]()
    for page, line in COMMANDS:
        kind, name = kind_of(line), f"{page} {line}"[:70]
        first = kind not in known
        known.add(kind)
        options = {(kind, word) for word in shlex.split(line) if word.startswith("-")}
        new = not options <= run or not options or any(word in line for word in WITHOUT_MODEL)
        run |= options
        if (kind not in SLOW + COMPARISONS and new) or (first and kind not in RUN_ELSEWHERE):
            parameters.append(pytest.param(page, line, True, id=name))
            continue
        parameters.append(pytest.param(page, line, False, id=f"{name} options"))
        if first or kind in COMPARISONS or not new:
            parameters.append(pytest.param(page, line, True, id=name, marks=exhaustive))
    return parameters


def test_there_are_commands_of_every_kind() -> None:
    prefixes = {" ".join(command.split()[:2]) for _, command in COMMANDS}
    for name in SMALL:
        assert any(name in words for words in (*prefixes, *(command for _, command in COMMANDS))), name
    assert len(COMMANDS) > 40


@pytest.fixture
def place(own_home: Path, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with every file that the documentation names."""
    monkeypatch.chdir(tmp_path)
    words = "The quick brown fox jumps over the lazy dog, again and again. "
    for name in (
        "a.txt",
        "b.txt",
        "news.txt",
        "news_dev.txt",
        "chat.txt",
        "manual.txt",
        "long.txt",
        "essay.txt",
        "FILE",
    ):
        (tmp_path / name).write_text(words * (40 if name == "essay.txt" else 120))
    question = {"question_id": 1, "category": "any", "turns": ["Say something.", "And more."]}
    written(tmp_path / "my.jsonl", [question])
    request = {"article": "word " * 30, "summary_gt": "words", "max_tokens": 4}
    written(tmp_path / "xsum.jsonl", [request])
    return tmp_path


@pytest.mark.every(2)
@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize(("page", "line", "runs"), of_documentation())
def test_commands(page: str, line: str, runs: bool, place: Path, long_folder: Path, request: Any) -> None:
    command, *arguments = shlex.split(line)
    kind = kind_of(line)
    if kind == "tasks":
        request.getfixturevalue("few_tasks")
    if kind not in SMALL or kind == "all" or "--help" in arguments:
        assert invoke(command, *arguments, "--help").exit_code == 0
        return
    if kind == "summarize":
        arguments = ["xsum.jsonl" if word == "FILE" else word for word in arguments]
    if any(word.startswith("docs/") for word in arguments):
        arguments = [str(ROOT / word) if word.startswith("docs/") else word for word in arguments] + ["--pace", "1000"]
    if "FILE" in arguments and ("--record" in arguments or "--replay" in arguments):
        Path("FILE").unlink()
    if "FILE" in arguments and "--replay" in arguments:
        assert invoke("h2o-stream", "-m", long_folder, "--turns", "1", "-n", "2", "--record", "FILE").exit_code == 0
    if "--export" in arguments:
        talk = ["--session", arguments[arguments.index("--session") + 1]]
        assert invoke("h2o-chat", "-m", long_folder, "-n", "2", *talk, typed="hello\n").exit_code == 0
    if {"-c", "--search"} & set(arguments):
        talk = ["--session", "talk", "-p", arguments[-1]]
        assert invoke("h2o-chat", "-m", long_folder, "-n", "2", *talk, typed="").exit_code == 0
    if kind == "report":
        base = ["-m", long_folder, "--text", "a.txt", "--out", "FOLDER", *SMALL["nll"].split()]
        assert invoke("h2o-compare", "nll", *base).exit_code == 0
    for option, kinds in NEEDED.items():
        if kind in kinds and option not in arguments and "--input-path" not in arguments:
            arguments += [option, "xsum.jsonl" if option == "--requests" else "a.txt"]
    if not runs:
        done = invoke(command, *arguments, *SMALL[kind].split(), "-m", "./nowhere", typed="hello\n")
        assert done.exit_code == 1, done.stderr
        assert "./nowhere does not exist" in done.stderr
        return
    small = SMALL[kind].split() if "--replay" not in arguments and "--sessions" not in arguments else []
    named = [] if kind == "report" or "tiny" in arguments else ["-m", str(long_folder)]
    done = invoke(command, *arguments, *small, *named, typed="hello\n")
    assert done.exit_code == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python(page: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples of a page, run in order as one program."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: None)  # no compiler, so that nothing is compiled in the background
    monkeypatch.setattr(POLICIES, "_items", dict(POLICIES._items))  # what a page registers is undone after it
    inputs = dict(tokenizer("The quick brown fox jumps over the lazy dog. " * 30, return_tensors="pt"))
    model = make_llama(vocab=len(tokenizer), context=4096)
    names: dict[str, Any] = {"model": model, "inputs": inputs, "tokenizer": tokenizer}
    for kind, block in FENCED.findall(page.read_text(encoding="utf-8")):
        if kind == "python" and "..." not in block:
            if named := re.match(r"# (\w+\.py)\n", block):
                (tmp_path / named[1]).write_text(block)
            exec(compile(block, page.name, "exec"), names)


def prose_of(page: Path) -> str:
    """The text without fenced blocks, targets of links, and inline commands, which other tests run."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    text = re.sub(r"`[^`]+`", lambda code: "" if re.search(r"\s-|^`python|^`helm", code[0]) else code[0], text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def files_of(path: str) -> list[Path]:
    """The files that a path in the text names: relative to `FOLDERS`, or anywhere if it is a bare name."""
    found = [file for folder in FOLDERS for file in folder.glob(path)]
    if "/" not in path:
        found += [file for folder in ("h2o_stream", "tests", "lab") for file in (ROOT / folder).rglob(path)]
    return found


def is_path(word: str) -> bool:
    """Whether a word is a source file, or in a folder of the repository; `parts/` of an output folder is not."""
    if word in ("llama.cpp", "ik_llama.cpp") or word.startswith("build/"):  # which is made
        return False
    return word.endswith((".py", ".cpp", ".h")) or any((folder / word.split("/")[0]).is_dir() for folder in FOLDERS)


def defines(file: Path, name: str) -> bool:
    """Whether a file of Python or C++ defines a function, a class, a constant or an attribute of this name."""
    word, text = re.escape(name.rpartition(".")[2]), file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        return bool(re.search(rf"^\s*(?:(?:async )?def|class) {word}\b|^\s*(?:self\.)?{word}\s*[:=]", text, re.M))
    function = rf"^\s*(?!return\b)[\w:<>,&*]+[\s&*][\w:<>,&*\s]*\b{word}\s*\("
    return bool(re.search(rf"{function}|\b(?:struct|class|enum|using|#define)\s+{word}\b|\b{word}\s*=", text, re.M))


def wrong_names(text: str) -> list[str]:
    """Paths that do not exist, and names that the file beside them does not define."""
    wrong = [path for path in PATH.findall(text) if is_path(path) and not files_of(path)]
    wrong += [
        f"{name} in {path}"
        for name, path in PAIR.findall(text)
        if not any(defines(file, name) for file in files_of(path))
    ]
    for folder, rows in MODULES.findall(text):
        names = [name for row in rows.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]
        wrong += [f"{folder}/{name}" for name in names if not files_of(f"{folder}/{name}.py")]
    return wrong


@in_turn("page", PROSE)
def test_paths_and_names(page: Path) -> None:
    """Every path in the text exists, and where a name stands beside a file, the file defines it."""
    assert wrong_names(prose_of(page)) == []


@in_turn("text, wrong", [
    ("`attach` (`cli/chat.py`)", ["attach in cli/chat.py"]),
    ("`Conversation.sing` in\n`session/conversation.py`", ["Conversation.sing in session/conversation.py"]),
    ("`compute_nothing` in `native/src/abi.h`", ["compute_nothing in native/src/abi.h"]),
    ("(tests/test_nothing.py)", ["tests/test_nothing.py"]),
    ("`cli/nothing/` and `nothing.cpp`", ["cli/nothing/", "nothing.cpp"]),
    ("| module of `session/` | owns |\n| --- | --- |\n| `reply`, `nothing` | `x` |\n", ["session/nothing"]),
    ("`Conversation.say` (`session/conversation.py`), `parts/`, `org/model` and `cli/`", []),
])  # fmt: skip
def test_wrong_paths_and_names_are_found(text: str, wrong: list[str]) -> None:
    assert wrong_names(text) == wrong


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@in_turn("page", [*PROSE, ROOT / "CHANGELOG.md"])
def test_links(page: Path) -> None:
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    for target, anchor in re.findall(r"\]\(([^)#]*)(#[^)]*)?\)", text):
        if target.startswith("http"):
            continue
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or anchor[1:] in anchors(file), target + anchor
