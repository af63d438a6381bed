"""Sources of settings."""

import re
from pathlib import Path
from typing import Any

import pytest

from h2o_stream.cli import chat, run, stream
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

    def test_named_prompts(self, tiny_folder: Path) -> None:
        listed = invoke("h2o-chat", "--list-prompts")
        assert listed.exit_code == 0
        assert re.search(r"^storyteller +You are a storyteller", listed.stdout, re.M)
        done = piped(tiny_folder, ["/system"], "--system", "storyteller")
        assert "You are a storyteller. You answer with vivid" in done.stderr

    def test_prompts_of_the_user(self, tiny_folder: Path, file: Path) -> None:
        (folder := file.parent / "prompts").mkdir()
        (folder / "pirate.md").write_text("You are a pirate.")
        (folder / "storyteller.txt").write_text("You are brief.")
        assert re.search(r"^pirate +You are a pirate", invoke("h2o-chat", "--list-prompts").stdout, re.M)
        done = piped(tiny_folder, ["/system", "/system pirate", "/system"], "--system", "storyteller")
        assert "You are brief.\n" in done.stderr
        assert "You are a pirate.\n" in done.stderr
