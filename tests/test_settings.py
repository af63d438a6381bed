"""Sources of settings, values of options that are converted without typer, and the engine that is chosen."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pytest
import typer
import typer.testing
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, TokenType
from transformers import PreTrainedModel
from typer.core import TyperCommand
from typer.main import get_command

from h2o_stream import CacheConfig, ConfigError, attach
from h2o_stream.cli import chat, run, stream
from h2o_stream.cli.conversion import convert_plainly
from h2o_stream.config import Settings
from h2o_stream.engine.engine import Engine
from h2o_stream.native import gguf_types
from tests.commands import invoke, piped
from tests.preloaded import run as run_command

pytestmark = pytest.mark.usefixtures("own_home")


class TestSettings:
    """Precedence: flag, environment, file, default."""

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "config" / "h2o-stream" / "config.toml"
        path.parent.mkdir(parents=True)
        return path

    def shown(self, monkeypatch: pytest.MonkeyPatch, model: Path, *options: str) -> dict[str, tuple[str, str]]:
        done = run_command("h2o-chat", "-m", model, *options, input="/show config\n")
        assert done.returncode == 0, done.stderr
        rows = re.findall(r"^(\w+) +(\S+) +(flag|environment|file|default) *$", done.stderr, re.M)
        return {name: (value, source) for name, value, source in rows}

    def test_the_order(self, monkeypatch: pytest.MonkeyPatch, tiny_folder: Path, file: Path) -> None:
        file.write_text(
            'window = 64\ntop-k = 5\nsinks = 2\nmode = "h2o"\nrecall = "off"\n'
            "[h2o-chat]\nplain = true\n[h2o-stream]\nturns = 3\n"
        )
        monkeypatch.setenv("H2O_TOP_K", "6")
        monkeypatch.setenv("H2O_SINKS", "3")
        shown = self.shown(monkeypatch, tiny_folder, "--sinks", "1")
        assert shown["window"] == ("64", "file")
        assert shown["policy"] == ("h2o", "file")
        assert shown["plain"] == ("True", "file")
        assert shown["top_k"] == ("6", "environment")
        assert shown["sinks"] == ("1", "flag")
        assert shown["recall"] == ("off", "file")
        assert shown["max_tokens"] == ("512", "default")

    @pytest.mark.parametrize(("text", "words"), [
        ("windou = 3", "windou is no option of h2o-chat"),
        ("turns = 3", "turns is no option of h2o-chat"),
        ("window = ", "config.toml: "),
        ("[h2o-chat]\nturns = 3", "turns is no option"),
        ("window = " + "9" * 5000, "config.toml: "), ("window = " + "[" * 50_000, "config.toml: "),
    ])  # fmt: skip
    def test_a_wrong_file_is_named(self, file: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
        file.write_text(text)
        with pytest.raises(SystemExit) as left:
            run.main("h2o-chat", chat.app)
        assert left.value.code == 2
        assert words in capsys.readouterr().err

    def test_a_wrong_value_is_one_of_the_option(self, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        file.write_text('window = "many"')
        monkeypatch.setattr("sys.argv", ["h2o-stream"])
        with pytest.raises(SystemExit) as left:
            run.main("h2o-stream", stream.app)
        assert left.value.code == 2
        assert "--window" in capsys.readouterr().err

    def test_other_entries_beside_prompts(self, file: Path) -> None:
        """Regression: an empty one ended --list-prompts, one that cannot be read every --system, a pipe never."""
        prompts = file.parent / "prompts"
        prompts.mkdir()
        (prompts / "empty.md").touch()
        (prompts / "folder.md").mkdir()
        (prompts / "gone.md").symlink_to("nowhere")
        (prompts / "red.md").write_text("\x1b[31mred")
        os.mkfifo(prompts / "pipe.md")
        listed = invoke("h2o-chat", "--list-prompts").stdout
        assert re.search(r"^red +\[31mred$", listed, re.MULTILINE)
        assert not re.search("^(empty|folder|gone|pipe)", listed, re.MULTILINE)

    def test_an_endless_file_and_foreign_variables(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("H2O_CONFIG", "/dev/zero")
        with pytest.raises(ConfigError, match="/dev/zero: "):
            run.file_options("h2o-chat", get_command(chat.app))
        monkeypatch.setenv("WORLD_SIZE", "many")
        assert "WORLD_SIZE is 'many'" in invoke("h2o-chat", "-p", "x").stderr

    def test_prompts_of_the_user(self, tiny_folder: Path, file: Path) -> None:
        (folder := file.parent / "prompts").mkdir()
        (folder / "pirate.md").write_text("You are a pirate.")
        (folder / "storyteller.txt").write_text("You are brief.")
        assert re.search(r"^pirate +You are a pirate", invoke("h2o-chat", "--list-prompts").stdout, re.M)
        done = piped(tiny_folder, ["/system", "/system pirate", "/system"], "--system", "storyteller")
        assert "You are brief.\n" in done.stderr
        assert "You are a pirate.\n" in done.stderr


def command(kind: Any, default: Any, plainly: bool, **settings: Any) -> tuple[typer.Typer, list[Any]]:
    """A command with one option, and what it was called with."""
    app, seen = typer.Typer(), list[Any]()
    annotated = Annotated[kind, typer.Option("--value", **settings)]

    class Command(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            for parameter in self.get_params(ctx) if plainly else ():
                convert_plainly(parameter, annotated if parameter.name == "value" else None)
            return super().parse_args(ctx, args)

    def run(value: Any = default) -> None:
        seen.append(value)

    run.__annotations__["value"] = annotated
    app.command(cls=Command)(run)
    return app, seen


@pytest.mark.parametrize(
    ("kind", "default", "settings"),
    [
        (int, 256, {}),
        (int | None, None, {}),
        (Optional[int], None, {}),  # noqa: UP045
        (int | None, None, {"min": 1}),
        (float | None, None, {}),
        (str | None, None, {}),
        (str, "auto", {}),
        (Literal["auto", "off"], "auto", {"case_sensitive": False}),
        (Literal["a", "b"] | None, None, {}),
        (list[str] | None, None, {}),
    ],
)
def test_as_typer_converts(kind: Any, default: Any, settings: dict[str, Any]) -> None:
    texts = ["2", "-2", "0", "+3", "007", "2.0", ".5", "1e3", "nan", "2_0", "²", "auto", "AUTO", "", " 2", "a\nb"]
    for arguments in ([], *(["--value", text] for text in texts)):
        outcomes = []
        for plainly in (False, True):
            app, seen = command(kind, default, plainly, **settings)
            outcomes.append((typer.testing.CliRunner().invoke(app, arguments).exit_code, seen or None))
        by_typer, converted = outcomes
        assert converted[0] == by_typer[0], arguments
        assert repr(converted[1]) == repr(by_typer[1]), arguments


def test_files_are_named_and_not_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Typer draws a box about a file that may not be read; whoever reads it says so in a line, with its option."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for plainly in (False, True):
        app, seen = command(Path | None, None, plainly)
        done = [typer.testing.CliRunner().invoke(app, [f"--value={name}"]) for name in (tmp_path, "~/x", "", "~0/x")]
        assert [result.exit_code for result in done[:1]] == [0 if plainly else 2]
    assert seen == [tmp_path, tmp_path / "x"]
    assert [str(result.exception)[:20] for result in done[2:]] == ["--value is empty; na", "--value: there is no"]


def test_types_of_gguf_files() -> None:
    assert {(kind.name, kind.value): size for kind, size in gguf_types.BLOCKS.items()} == {
        (kind.name, kind.value): size for kind, size in GGML_QUANT_SIZES.items()
    }
    assert {*gguf_types.TensorType.__members__} == {*GGMLQuantizationType.__members__}
    assert {kind.name: kind.value for kind in gguf_types.ValueType} == {kind.name: kind.value for kind in GGUFValueType}
    assert (gguf_types.CONTROL, gguf_types.USER_DEFINED) == (TokenType.CONTROL, TokenType.USER_DEFINED)


def test_others_are_refused(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="--engine takes auto, eager"):
        Settings(engine="compiled")  # type: ignore[arg-type]
    assert invoke("h2o-chat", "-m", tiny_folder, "-p", "Hello.", "--engine", "fast").exit_code == 2


@pytest.mark.parametrize(("option", "steps"), [("eager", "steps: eager"), ("auto", "steps: ")])
def test_verbose_shows_the_engine(tiny_folder: Path, option: str, steps: str) -> None:
    base = ["-m", tiny_folder, "-p", "Hello.", "-n", 4, "--device", "cpu", "--engine", option]
    done = invoke("h2o-chat", *base, "-v")
    assert done.exit_code == 0, done.stderr
    assert done.stderr.count(steps) == 1
    assert "steps:" not in invoke("h2o-chat", *base).stderr


def test_the_cache_reports_the_engine(tiny: PreTrainedModel) -> None:
    with attach(tiny, CacheConfig(window=16), engine="eager") as cache:
        assert cache.engine_note == "eager: --engine eager"


def test_counts_are_made_when_somebody_looks(talker: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have a cost, so they are not computed for every token."""
    from h2o_stream.config import SamplingConfig
    from h2o_stream.engine.events import Token

    with Engine(talker(), tokenizer, CacheConfig(window=16), SamplingConfig(max_tokens=12, seed=0)) as engine:
        list(engine.prefill([5, 6, 7]))
        looked: list[int] = []
        counts = engine.cache.counts
        monkeypatch.setattr(engine.cache, "counts", lambda: looked.append(0) or counts())
        for event in engine.decode():
            if isinstance(event, Token):
                assert not looked
                assert event.seen == len(engine.tokens)
        assert not looked
