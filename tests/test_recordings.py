"""Recordings replay without the model, and show two policies side by side."""

import errno
import io
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock, patch

import pyte
import pytest

from h2o_stream.ui.panes import _shortened
from h2o_stream.ui.recording import _read, _Recorder
from h2o_stream.ui.stream import _run
from tests.commands import invoke, piped, records, texts
from tests.fixtures import with_exhaustive, written
from tests.preloaded import run as run_command
from tests.terminal import Pty

pytestmark = pytest.mark.usefixtures("own_home")


class TestRecordings:
    def test_a_run_is_shown_again_without_the_model(self, tiny_folder: Path, tmp_path: Path) -> None:
        file = tmp_path / "run.rec"
        first = piped(tiny_folder, ["one", "two"], "--record", file)
        done = run_command("h2o-stream", "--replay", file, "--pace", "100")
        assert done.returncode == 0, done.stderr
        assert done.stdout.replace("\r", "") == first.output
        header, *events = map(json.loads, file.read_text().splitlines())
        assert header["version"] == 2, "asciinema's format"
        assert all(kind == "o" for _, kind, _ in events)
        assert piped(tiny_folder, ["one"], "--record", file).exit_code == 1

    def test_it_keeps_its_pace(self, tiny_folder: Path, tmp_path: Path) -> None:
        file = tmp_path / "run.rec"
        piped(tiny_folder, ["one"], "--record", file)
        last = _read(file)[-1][0]
        begun = time.monotonic()
        invoke("h2o-stream", "--replay", file, "--pace", last / 0.2 if last else 1)
        assert time.monotonic() - begun >= 0.18

    def test_only_what_changes_is_recorded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = [0.0]
        monkeypatch.setattr("h2o_stream.ui.recording.time.monotonic", lambda: clock[0])
        written = ["\x1b[?1049h\x1b[H", *(f"\x1b[H{'a line ' * 5}\nframe {n}\nthe last" for n in range(9)), "\x1b[?25h"]
        file, screens = io.StringIO(), [pyte.Screen(40, 3), pyte.Screen(40, 3)]
        recorder = _Recorder(file, 3)
        for text in written:
            recorder.add(text)
            clock[0] += 0.2
        recorded = [text for _, _, text in map(json.loads, file.getvalue().splitlines())]
        for screen, texts_shown in zip(screens, (written, recorded), strict=True):
            for text in texts_shown:
                pyte.Stream(screen).feed(text.replace("\r\n", "\n").replace("\n", "\r\n"))
        assert screens[0].display == screens[1].display
        assert screens[0].display[1].startswith("frame 8")
        assert "".join(recorded).count("a line") == 5, "one whole frame"
        assert "".join(recorded).count("frame") == 5 < 9, "and a few times a second"

    def test_a_full_disk_ends_the_recording_only(self, tiny_folder: Path, tmp_path: Path) -> None:
        """Regression: it ended the chat."""

        class Full(io.StringIO):
            def write(self, text: str) -> int:
                if self.tell():
                    raise OSError(errno.ENOSPC, "No space left on device")
                return super().write(text)

        lines, opened, file = ["one", "two", "three"], Path.open, tmp_path / "run.rec"
        with patch.object(
            Path, "open", lambda path, *how, **more: Full() if path == file else opened(path, *how, **more)
        ):
            done = piped(tiny_folder, lines, "--record", file)
        assert done.exit_code == 0
        assert done.stdout == piped(tiny_folder, lines).stdout
        assert done.stderr.count("No space left on device; the recording is not complete") == 1

    def test_strange_times(self, tmp_path: Path) -> None:
        file = tmp_path / "run.rec"
        file.write_text('{"version": 2, "idle_time_limit": 1' + "0" * 400 + '}\n[0, "o", "one"]\n[1e7, "o", "two"]\n')
        assert invoke("h2o-stream", "--replay", file, "--pace", 1e9).stdout == "onetwo"
        with patch("h2o_stream.ui.recording.time.sleep") as slept:
            assert invoke("h2o-stream", "--replay", file, "--pace", 1e-300).stdout == "onetwo"
        assert all(0 <= call.args[0] < 1e9 for call in slept.call_args_list)

    def test_the_recording_of_the_documentation(self) -> None:
        file = Path(__file__).parents[1] / "docs" / "images" / "cliff.cast"
        screen, context_left, beyond = pyte.Screen(100, 30), 0.0, 0.0
        for at_s, text in _read(file):
            pyte.Stream(screen).feed(text)
            shown = "\n".join(screen.display)
            context_left = context_left or at_s * (" left " in shown)
            beyond = beyond or at_s * (" beyond " in shown)
        assert 0 < context_left < 10, "a full cache grows"
        assert context_left < beyond < 60, "and passes its context"
        assert "tokens past its context of 8,192" in " ".join(shown.split())
        assert file.stat().st_size < 300_000

    def test_long_pauses_are_shortened(self, tmp_path: Path) -> None:
        file = tmp_path / "run.cast"
        events = [[at_s, "o", "x"] for at_s in (2, 2.25, 60, 60.25)]
        for limit, times in ((0.5, [0.5, 0.75, 1.25, 1.5]), (None, [2, 2.25, 60, 60.25])):
            lines = [{"version": 2, "width": 80, "height": 24, "idle_time_limit": limit}, *events]
            assert [at_s for at_s, _ in _read(written(file, lines))] == times

    def test_on_the_screen(self, tiny_folder: Path, questions: Path, tmp_path: Path) -> None:
        file = tmp_path / "run.cast"
        base = ("-m", str(tiny_folder), "--questions", str(questions), "--turns", "2", "-n", "20", "--window", "64")
        with Pty("h2o-stream", *base, "--record", str(file)) as pty:
            assert pty.exit_code() == 0
        screen, shown = pyte.Screen(80, 24), list[str]()
        for _, text in _read(file):
            pyte.Stream(screen).feed(text)
            shown.append("\n".join(screen.display))
        assert any("▒ heavy" in text and "tok/s │" in text for text in shown)
        with Pty("h2o-stream", "--replay", str(file), "--pace", "4") as pty:
            assert pty.exit_code() == 0
            assert pty.text == shown[-1]
            assert "2 turns" in pty.text

    def test_a_picture(self, tiny_folder: Path, questions: Path, tmp_path: Path) -> None:
        file = tmp_path / "run.svg"
        base = ("-m", str(tiny_folder), "--questions", str(questions), "--turns", "1", "-n", "20", "--window", "64")
        with Pty("h2o-stream", *base, "--record", str(file)) as pty:
            assert pty.exit_code() == 0
        assert file.read_text().startswith("<svg")
        assert "heavy" in file.read_text()
        piped_run = invoke("h2o-stream", *base, "--record", tmp_path / "other.svg")
        assert piped_run.exit_code == 2
        assert "run it in one" in piped_run.stderr


class TestCliff:
    @pytest.mark.exhaustive
    def test_both_policies_read_up_to_the_context(self, tiny_folder: Path, questions: Path) -> None:
        pytest.importorskip("pydoc_data.topics")
        config = tiny_folder / "config.json"
        folder = Path(shutil.copytree(tiny_folder, questions.parent / "long"))
        (folder / config.name).write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 800}))
        base = ("-m", folder, "--questions", questions, "--turns", 2, "-n", 80, "--window", 64, "--cliff")
        both = invoke("h2o-stream", *base, "--compare", "full,h2o")
        assert both.exit_code == 0, both.stderr
        assert "first 672 tokens" in both.stderr
        assert re.search(r"full is [\d,]+ tokens past its context of 800", both.stderr)
        assert "h2o is" not in both.stderr
        assert "context 800┘" in both.stderr, "it is marked on the axis"
        with Pty("h2o-stream", *map(str, base), "--compare", "full,h2o") as pty:
            assert pty.exit_code() == 0
        stays = pty.output.partition("\x1b[?1049l")[2]
        assert 0 < stays.index("first 672 tokens") < stays.index("turn 1/2"), "what was read first stays too"
        alone = invoke("h2o-stream", *base, "--mode", "full", "--jsonl", "-")
        assert " · 2 of 6 turns of " in alone.stderr
        seen = [record["seen_tokens"] for record in records(alone.stdout) if record["type"] == "turn"]
        assert 672 < seen[0] < seen[-1] > 800
        (folder / config.name).write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 256}))
        short = invoke("h2o-stream", "-m", folder, "--window", 64, "--cliff")
        assert short.exit_code == 2
        assert "--cliff needs more" in short.stderr


class TestSideBySide:
    def test_each_gets_the_same_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Regression: with a token each in turn, the faster one looked as slow as the other."""
        clock, said = [0.0], list[str]()
        monkeypatch.setattr("h2o_stream.ui.stream.time.perf_counter", lambda: clock[0])

        def reply(name: str, seconds: float, count: int) -> Iterator[str]:
            for _ in range(count):
                clock[0] += seconds
                said.append(name)
                yield name

        _run([reply("s", 4, 4), reply("f", 1, 12)], Mock())
        assert "".join(said) == "s" + "ffff" + "sffff" + "sffff" + "s"

    @pytest.fixture
    def questions(self, tmp_path: Path) -> Path:
        question = {"question_id": 1, "category": "test", "turns": ["first " * 60, "then"]}
        return written(tmp_path / "questions.jsonl", [question])

    def test_where_they_diverge(self, tiny_folder: Path, questions: Path, tmp_path: Path) -> None:
        out = tmp_path / "run.jsonl"
        options = ("-m", tiny_folder, "--questions", questions, "-n", 12, "--seed", 3, "--window", 64)
        done = invoke("h2o-stream", *options, "--compare", "full,h2o", "--jsonl", out)
        assert done.exit_code == 0
        assert re.search(r"the replies differ after \d+ characters|the replies are identical", done.stderr)
        assert re.search(r"full: \d+ tokens seen", done.stderr)
        turns = [record for record in records(out.read_text()) if record["type"] == "turn"]
        assert [turn["policy"] for turn in turns] == ["full", "h2o"] * 2
        for policy in ("full", "h2o"):
            alone = invoke("h2o-stream", *options, "--policy", policy, "--jsonl", "-")
            assert alone.exit_code == 0, alone.stderr
            assert texts(alone.stdout) == [turn["text"] for turn in turns if turn["policy"] == policy]
        same = invoke("h2o-stream", *options, "--compare", "h2o,h2o")
        assert same.stderr.count("the replies are identical") == 2

    @pytest.mark.parametrize(("columns", "lines"), with_exhaustive([(80, 24)], [(160, 45)]))
    def test_in_two_panes(self, tiny_folder: Path, questions: Path, columns: int, lines: int) -> None:
        with Pty(
            "h2o-stream", "-m", str(tiny_folder), "--questions", str(questions), "-n", "40", "--seed", "3",
            "--window", "64", "--compare", "full,h2o", "--loop", columns=columns, lines=lines,
        ) as pty:  # fmt: skip
            pty.until(lambda p: "≠" in p.text and p.text.count("tok/s │") == 2)
            assert next(line for line in pty.screen.display if "╭" in line).count("╭") == 2
            assert all(len(line.rstrip()) <= columns for line in pty.screen.display)
            assert re.search(r"│ █ sinks \d+ ▓ pinned .* │$", pty.text, re.M)
            assert re.search(r"· empty \d+ +│$", pty.text, re.M), "an entry of the legend is not broken"
            assert re.search(r"^\[turn \d/∞ · category test, question 1\] ", pty.text), "nor is the title of a turn"
            pty.send("\x03")
            assert pty.exit_code() == 130
        stays = pty.output.partition("\x1b[?1049l")[2]
        assert "[]" not in pty.output, "no empty title before the first turn"
        assert "the replies differ after" in stays, "what was said stays"
        assert "the texts part in turn 1 after" in stays, "and the verdict says where"

    def test_titles_are_not_cut_within_words(self) -> None:
        """Regression: 80 columns showed "window 256 · g" for gap."""
        side = Mock(policy="h2o")
        side.loaded.title = "a-model · h2o · window 256 · gap"
        fit = {40: side.loaded.title, 31: "a-model · h2o · window 256", 13: "a-model · h2o", 9: "h2o"}
        for width, shown in fit.items():
            assert _shortened(side, width) == shown

    @pytest.mark.exhaustive
    def test_three(self, tiny_folder: Path, questions: Path) -> None:
        base = ("-m", str(tiny_folder), "--questions", str(questions), "-n", "4", "--window", "64")
        with Pty("h2o-stream", *base, "--compare", "full,h2o,sink", columns=120) as pty:
            pty.until(lambda p: any(line.count("╭") == 3 for line in p.screen.display))
            assert pty.exit_code() == 0
        narrow = invoke("h2o-stream", *base, "--compare", "full,h2o,sink")
        assert narrow.exit_code == 0
        assert "full - tok/s" not in narrow.stderr
        assert re.search(
            r"full \(eager\) [\d.,]+ tok/s and .+, h2o [\d.,]+ .+, sink .+ \(in turn on the same cores\); ",
            narrow.stderr,
        )
