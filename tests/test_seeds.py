"""Every command of other projects in the table of lab/docs/commands.md: ours runs, theirs runs or gets one line."""

import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerBase

from h2o_stream.cli.seeds import _HINTS
from h2o_stream.config import CacheConfig
from tests.commands import invoke
from tests.fixtures import saved, with_exhaustive, written
from tests.in_turn import in_turn

pytestmark = pytest.mark.usefixtures("no_charts")

PAGE = Path(__file__).parents[1] / "lab" / "docs" / "commands.md"
ROW = re.compile(r"^\| `((?:python|helm)[^`]+)` \| `(h2o-[^`]+)` \|", re.M)
ROWS = ROW.findall(PAGE.read_text(encoding="utf-8"))

OURS = {
    "run_streaming.py": ["h2o-stream", "--turns", "1", "-n", "2"],
    "run_summarization.py": ["h2o-compare", "summarize"],
    "run_helm.py": ["h2o-compare", "summarize"],
    "run_text_generation.py": ["h2o-chat", "-n", "2", "--prompt-file", "essay.txt"],
    "run_streaming_llama.py": ["h2o-stream", "--turns", "1", "-n", "2"],
    "eval_long_ppl.py": ["h2o-compare", "nll", "--text", "a.txt"],
    "flex_opt.py": ["h2o-compare", "throughput", "--text", "a.txt"],
}
"""Our command that takes the options of a script."""

QUICK = {
    "h2o-stream": ["--turns", "1", "-n", "2"],
    "h2o-chat": ["-n", "2"],
    "throughput": ["--shapes", "20+5", "--cache-budget", "160KiB", "--rounds", "1"],
}


def test_the_table_has_them_all() -> None:
    assert len(ROWS) >= 25
    assert {shlex.split(theirs)[1] for theirs, _ in ROWS} >= set(OURS)


@pytest.fixture
def place(own_home: Path, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the commands name."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "essay.txt"):
        Path(name).write_text("The quick brown fox jumps over the lazy dog, again and again. " * 40)
    request = {"article": "word " * 60, "summary_gt": "words", "max_tokens": 3}
    article = {"document": "A text.", "summary": "Words."}
    answer = {"request": request, "result": {"choices": [{"text": "words"}]}}
    files = ["xsum.jsonl", "data/xsum.jsonl", "data/xsum_opt.jsonl"]
    files += ["data/summarization/xsum.jsonl", "data/summarization_data/xsum_0shot.jsonl"]
    for name, lines in {**dict.fromkeys(files, [request] * 2), "articles.jsonl": [article] * 5}.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        written(Path(name), lines)
    written(Path("answers.jsonl"), [answer])
    return tmp_path


def with_model(command: str, arguments: list[str], model: Path) -> list[str]:
    """The arguments with another model, also where the embedded one would be taken."""
    names = ("-m", "--model", "--model-name", "--model_name", "--model_name_or_path")
    if command != "h2o-compare" and not set(names) & set(arguments):
        arguments = [*arguments, "-m", str(model)]
    return [str(model) if before in names else word for before, word in zip(["", *arguments], arguments, strict=False)]


def by_options() -> list[Any]:
    """Our commands; those that have no option that others before them do not have are exhaustive."""
    some, rest, known = list[str](), list[str](), set[str]()
    for line in dict.fromkeys(ours for _, ours in ROWS):
        command, *arguments = shlex.split(line)
        options = {f"{command} {word.replace('_', '-')}" for word in arguments if word.startswith("-")}
        (rest if options and options <= known else some).append(line)
        known |= options
    return with_exhaustive(some, rest)


@pytest.mark.every(6)
@pytest.mark.parametrize("line", by_options())
def test_ours_runs(line: str, place: Path, long_folder: Path) -> None:
    command, *arguments = shlex.split(line)
    if command == "h2o-lm-eval":  # test_tasks.py runs it
        given: dict[str, Any] = dict(part.split("=") for part in arguments[-1].split(","))
        assert given.pop("pretrained")
        kinds = {field.name for field in fields(CacheConfig)}
        assert set(given) <= kinds
        CacheConfig(**{name: float(value) if "ratio" in name else value for name, value in given.items()})
        return
    quick = QUICK.get(command, QUICK.get(arguments[0], []))
    done = invoke(command, *with_model(command, arguments, long_folder), *quick)
    assert done.exit_code == 0, done.stderr
    if "--output_path" in arguments:
        assert Path(arguments[arguments.index("--output_path") + 1]).exists()


@in_turn("line", [theirs for theirs, _ in ROWS if shlex.split(theirs)[1] in OURS])
def test_theirs_runs_or_gets_one_line(line: str, place: Path, long_folder: Path) -> None:
    _, script, *arguments = shlex.split(line)
    done = invoke(*OURS[script], *with_model(OURS[script][0], arguments, long_folder))
    if done.exit_code == 0:
        return
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1, done.stderr
    hinted = [word for word in arguments if word.replace("_", "-").lower() in _HINTS and f"{word}: " in done.stderr]
    hinted += [word for word in arguments if f"{word}, " in done.stderr]
    assert hinted or "--policies" in done.stderr, done.stderr


@in_turn(
    "option",
    [
        "--enable_h2o_generation", "--enable_h2o_cache", "--enable_small_cache", "--enable_position_rolling",
        "--hh_size", "--sample_num", "--model_arch", "--start_size",
    ],
)  # fmt: skip
@in_turn("command", [["h2o-chat"], ["h2o-stream"], ["h2o-compare", "summarize"]])
def test_hints(command: list[str], option: str) -> None:
    done = invoke(*command, option, "1")
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert f"{option}: " in done.stderr


@in_turn(
    "option", ["num_heavy_hitter_tokens", "num_window_length", "heavy_ratio", "recent_ratio", "model_name_or_path"]
)
@in_turn("command", [["h2o-chat"], ["h2o-stream"], ["h2o-compare", "summarize"]])
def test_underscores(command: list[str], option: str) -> None:
    done = invoke(*command, f"--{option}")
    assert "requires an argument" in done.stderr


def test_ratios_of_a_short_prompt(long_folder: Path) -> None:
    """Regression: the header said the window of another prompt. The window grows for the system prompt."""
    ratios = ["--heavy-ratio", "0.1", "--recent-ratio", "0.1"]
    done = invoke("h2o-stream", "-m", long_folder, "--turns", "1", "-n", "2", "-s", "You are short. " * 9, *ratios)
    assert done.exit_code == 0
    assert "window 10% heavy + 10% recent of the first prompt" in done.stderr
    assert re.search(r"of \d+ \+ \d+, evicted", done.stderr), done.stderr


def test_a_model_with_learned_positions(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 32, "num_attention_heads": 4}
    config = OPTConfig(vocab_size=len(tokenizer), num_hidden_layers=1, max_position_embeddings=512, **sizes)
    saved(OPTForCausalLM(config), tokenizer, tmp_path)
    done = invoke("h2o-stream", "-m", tmp_path, "--turns", "1", "-n", "2")
    assert done.exit_code == 0, done.stderr
    assert "--positions absolute is taken" in done.stderr
    asked = invoke("h2o-stream", "-m", tmp_path, "--turns", "1", "-n", "2", "--rolling")
    assert asked.exit_code == 1
    assert "use --positions absolute" in asked.stderr
