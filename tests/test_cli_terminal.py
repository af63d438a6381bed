"""The commands in a real terminal."""

import re
from pathlib import Path

import pytest

from h2o_stream.ui.screen import Screen
from h2o_stream.ui.terminal import Terminal
from tests.commands import records
from tests.fixtures import with_exhaustive
from tests.terminal import Pty


class TestTerminal:
    @pytest.mark.parametrize(("columns", "lines"), with_exhaustive([(80, 24)], [(140, 40)]))
    def test_the_live_screen(self, tiny_folder: Path, questions: Path, columns: int, lines: int) -> None:
        base = ["-m", str(tiny_folder), "--questions", str(questions), "--turns", "4", "-n", "60", "--window", "64"]
        base += ["--seed", "3"]  # no reply of these ends by itself
        with Pty("h2o-stream", *base, columns=columns, lines=lines) as terminal:
            terminal.until(lambda t: "turn 4/4" in t.text and "empty" in t.text)
            frame = terminal.screen.display
            assert frame[0].startswith("╭")
            assert frame[0].rstrip().endswith("╮")
            assert "window 64" in frame[0]
            assert frame[-1].startswith("╰"), "it fills the terminal and no more"
            assert re.search(r"│ █+▓*▒+░+·* │", terminal.text)
            assert re.search(r"█ sinks \d+ +▓ pinned \d+ +▒ heavy \d+ +░ recent \d+ +· empty \d+", terminal.text)
            assert re.search(r"seen \d+ +kept 64 of 64 +evicted \d+", terminal.text)
            assert "tok/s │" in terminal.text, "speed over time"
            assert re.search(r"iB │[ ┊]*[▁▂▃▄▅▆▇█]", terminal.text), "memory over time"
            assert "prefill" in terminal.text
            assert "decode" in terminal.text
            assert all(line.rstrip()[-1] in "│╮╯" for line in frame), "nothing is wrapped or cut"
            assert terminal.exit_code() == 0
        assert "4 turns" in terminal.text
        assert terminal.output.index("\x1b[?1049h") < terminal.output.index("\x1b[?1049l"), "it is restored"
        stays = terminal.output.partition("\x1b[?1049l")[2]
        assert stays.count("[length]") == 4, "what was said stays"
        assert stays.index("[length]") < stays.index("prompt tokens"), "and the table follows"

    def test_the_screen_shows_markup_as_text(self, capsys: pytest.CaptureFixture[str]) -> None:
        terminal = Terminal()
        screen = Screen(terminal, "a [bold]title[/]", None)
        screen.start_turn("turn [1/2]", "[red]ask[/red] :smile:\n\x1b[2J")
        width = 60
        with terminal.console.capture() as captured:
            terminal.console.print(screen, width=width, height=12)
        for words in ("a [bold]title[/]", "turn [1/2]", "> [red]ask[/red] :smile:", "│ [2J"):
            assert words in captured.get()
        assert {len(line) for line in captured.get().splitlines()} == {width}

    def test_ctrl_c_ends_a_replay_with_its_table(self, tiny_folder: Path, questions: Path, tmp_path: Path) -> None:
        base = ["-m", str(tiny_folder), "--questions", str(questions), "--loop", "-n", "500", "--window", "64"]
        with Pty("h2o-stream", *base, "--jsonl", str(tmp_path / "run.jsonl")) as terminal:
            terminal.until(lambda t: "evicted" in t.text)
            terminal.send("\x03")
            assert terminal.exit_code() == 130
        assert "1 interrupted" in terminal.text
        assert records((tmp_path / "run.jsonl").read_text())[-1]["finish"]["interrupted"] == 1

    def test_no_color_on_request(self, tiny_folder: Path, questions: Path) -> None:
        base = ["-m", str(tiny_folder), "--questions", str(questions), "--turns", "1", "-n", "20", "--color", "off"]
        with Pty("h2o-stream", *base) as terminal:
            assert terminal.exit_code() == 0
        assert not re.search(r"\x1b\[[0-9;]*m", terminal.output.replace("\x1b[0m", ""))
