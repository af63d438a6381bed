"""Folders of comparisons, and the reports made of them."""

import html
import json
import re
import shutil
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from h2o_lab.report.report import NARROW, WIDE, svg
from h2o_lab.ruler.heatmap import Heatmap
from h2o_stream.compare.catalog import COMPARISONS
from h2o_stream.compare.comparison import Job, JobProgress
from h2o_stream.compare.folder import Folder
from h2o_stream.errors import DataError
from h2o_stream.ui.comparison import _Bars
from h2o_stream.ui.format import shade
from h2o_stream.ui.pages import Chart, Curve, TableData, page_of, readable
from h2o_stream.ui.pages.nll import loss
from h2o_stream.ui.pages.speed import decoding
from h2o_stream.ui.plots import ChartStyle
from h2o_stream.ui.tables import data_table
from tests.commands import invoke, records


@pytest.fixture(scope="module")
def compared(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two finished comparisons, not to be changed."""
    folder = tmp_path_factory.mktemp("compared")
    text = folder / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, again and again. " * 60)
    base = ["-m", tiny_folder, "--text", text, "--windows", "64", "-q", "--out"]
    commands = {
        "loss": ["nll", "--tokens", "200", "--policies", "full,sink,h2o"],
        "facts": ["recall", "--facts", "1", "--distances", "8,30", "--policies", "sink"],
    }
    for name, command in commands.items():
        done = invoke("h2o-compare", *command, *base, folder / "all" / name)
        assert done.exit_code == 0, done.stderr
    return folder / "all"


@pytest.fixture
def comparisons(compared: Path, tmp_path: Path) -> Path:
    """A copy of the folder."""
    return Path(shutil.copytree(compared, tmp_path / "all"))


class TestFolder:
    run: dict[str, Any] = {"command": "h2o-compare nll", "model": "m", "cache": [{"policy": "full"}], "versions": "1"}

    def test_the_same_comparison_may_run_again_with_more_policies(self, tmp_path: Path) -> None:
        folder = Folder(tmp_path)
        folder.claim(self.run)
        folder.claim({**self.run, "versions": "2", "policy": ["full"]})
        assert json.loads((tmp_path / "run.json").read_text())["versions"] == "1", "the first run's versions stay"
        folder.claim({**self.run, "cache": [{"policy": "h2o"}, {"policy": "full"}]})
        assert len(json.loads((tmp_path / "run.json").read_text())["cache"]) == 2

    @pytest.mark.parametrize(("other", "words"), [
        ({"model": "n"}, "its model is m, here it is n"),
        ({"tokens": 5}, "its tokens is None"),
        ({"command": "h2o-compare speed"}, "choose another folder"),
        ({"cache": [{"policy": "h2o"}]}, "policies that this run leaves out"),
    ])  # fmt: skip
    def test_another_run_is_refused(self, tmp_path: Path, other: dict[str, Any], words: str) -> None:
        Folder(tmp_path).claim(self.run)
        with pytest.raises(DataError, match=words):
            Folder(tmp_path).claim({**self.run, **other})

    def test_a_damaged_folder_is_not_mistaken_for_ours(self, tmp_path: Path) -> None:
        (tmp_path / "run.json").write_text("[]")
        with pytest.raises(DataError, match="is this the --out folder"):
            Folder(tmp_path).claim(self.run)

    def test_all_of_a_run_is_in_it(self, comparisons: Path) -> None:
        folder = comparisons / "loss"
        run, *found = records((folder / "records.jsonl").read_text())
        assert run == {**json.loads((folder / "run.json").read_text())}
        assert run["command_line"][:2] == ["h2o-compare", *run["command_line"][1:2]]
        assert {"versions", "hardware", "begun", "texts", "tokens", "cache"} <= set(run)
        assert [record["policy"] for record in found] == ["full", "sink", "h2o"]
        assert {path.name for path in folder.iterdir()} == {
            "run.json", "records.jsonl", "nll.md", "nll-text.png", "parts",
        }  # fmt: skip


def test_a_bar_is_full_only_when_its_jobs_are_done() -> None:
    """Jobs report their own completion, which is then reported once more."""
    jobs = [Job("same", {}, 4, list), Job("same", {}, 6, list), Job("other", {}, 1, list)]
    with Progress(disable=True) as progress:
        bars = _Bars(jobs, progress)
        for job in jobs[:2]:
            for done in (0, 2, job.total, job.total):
                bars(job, JobProgress(done))
            assert progress.tasks[0].completed == (4 if job is jobs[0] else 10)
        assert [task.total for task in progress.tasks] == [10]


class _Reader(HTMLParser):
    """Collects the addresses in a page, and checks that its elements are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.addresses += [str(attributes[name]) for name in ("src", "srcset", "href") if name in attributes]
        assert tag != "img" or attributes["alt"]
        assert tag != "script"
        if tag not in ("meta", "link", "source", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


class TestReport:
    def test_html_needs_nothing_from_outside(self, comparisons: Path, tmp_path: Path) -> None:
        done = invoke("h2o-compare", "report", comparisons, "--to", tmp_path / "new" / "report.html")
        assert done.exit_code == 0, done.stderr
        page = _Reader()
        page.feed((tmp_path / "new" / "report.html").read_text())
        assert not page.open
        assert all(address.startswith(("data:", "#")) for address in page.addresses)
        pictures = [address for address in page.addresses if address.startswith("data:image/svg+xml;base64,")]
        assert len(set(pictures)) == 2 * 4, "two charts, each for wide and narrow, light and dark"
        words = "".join(page.text)
        for figure in records((comparisons / "loss" / "records.jsonl").read_text())[1:]:
            assert f"{figure['nll']:.4f}" in words
        assert words.index("fact planted") > words.index("nats per token"), "in a fixed order"

    def test_markdown_for_a_readme(self, comparisons: Path, tmp_path: Path) -> None:
        done = invoke("h2o-compare", "report", comparisons / "loss", "--to", tmp_path / "report.md", "-q")
        assert done.exit_code == 0, done.stderr
        page = (tmp_path / "report.md").read_text()
        assert "| policy | window | MiB | nll |" in page
        assert "](all/loss/nll-text.png)" in page
        assert (tmp_path / "all" / "loss" / "nll-text.png").exists()
        again = invoke("h2o-compare", "report", comparisons / "loss", "--to", tmp_path / "report.md", "-q")
        assert again.exit_code == 0, "a report may take the place of an older one"

    @pytest.mark.parametrize(("name", "words"), [
        ("report.csv", "comparison,table,policy,window"), ("report.tex", r"policy & window & MiB & nll"),
    ])  # fmt: skip
    def test_tables_alone(self, comparisons: Path, tmp_path: Path, name: str, words: str) -> None:
        for _ in range(2):
            done = invoke("h2o-compare", "report", comparisons, "--to", tmp_path / name, "-q")
            assert done.exit_code == 0, done.stderr
        text = (tmp_path / name).read_text()
        assert words in text
        for figure in records((comparisons / "loss" / "records.jsonl").read_text())[1:]:
            assert f"{figure['nll']:.4f}" in text

    def test_a_format_that_there_is_not(self, comparisons: Path, tmp_path: Path) -> None:
        done = invoke("h2o-compare", "report", comparisons, "--to", tmp_path / "share.pdf")
        assert done.exit_code == 2
        assert ".html, .md, .csv, .tex" in done.stderr
        assert not (tmp_path / "share.pdf").exists()

    def test_names_are_text_and_no_markup(self, comparisons: Path, tmp_path: Path) -> None:
        path = comparisons / "loss" / "records.jsonl"
        path.write_text(path.read_text().replace(str(tmp_path / "text.txt"), "<script>alert(1)</script>"))
        done = invoke("h2o-compare", "report", comparisons / "loss", "--to", tmp_path / "report.html", "-q")
        assert done.exit_code == 0, done.stderr
        _Reader().feed((tmp_path / "report.html").read_text())

    def test_other_files_are_not_overwritten_by_a_report(self, comparisons: Path, tmp_path: Path) -> None:
        mine = tmp_path / "mine.html"
        mine.write_text("my own page")
        done = invoke("h2o-compare", "report", comparisons, "--to", mine)
        assert done.exit_code == 1
        assert "choose another name" in done.stderr
        assert mine.read_text() == "my own page"

    @pytest.mark.parametrize(("harm", "words"), [
        (lambda folder: (folder / "records.jsonl").unlink(), "nll is not finished there"),
        (lambda folder: (folder / "records.jsonl").write_text("{"), "records.jsonl:1: not JSON"),
        (lambda folder: (folder / "records.jsonl").write_text('{"type": "run"}\n{}'), "not what nll writes"),
        (lambda folder: (folder / "records.jsonl").write_text(""), "not what nll writes"),
        (lambda folder: (folder / "run.json").write_text("{}"), "is this the --out folder of a comparison?"),
        (lambda folder: (folder / "run.json").write_text('{"command": "h2o-chat"}'), "which has no report"),
        (lambda folder: (folder / "run.json").unlink(), "no comparison in it"),
    ])  # fmt: skip
    def test_damaged_folders(self, comparisons: Path, tmp_path: Path, harm: Any, words: str) -> None:
        harm(comparisons / "loss")
        done = invoke("h2o-compare", "report", comparisons / "loss", "--to", tmp_path / "report.html")
        assert done.exit_code == 1
        assert words in done.stderr
        assert done.stderr.count("\n") == 1


def test_every_kind_has_a_page_or_needs_none() -> None:
    for kind in COMPARISONS:
        with pytest.raises((KeyError, IndexError)):
            page_of(kind, {}, [])


def test_no_chart_has_more_curves_than_colours() -> None:
    curves = [Curve(f"p{number}", [1], [1]) for number in range(20)]
    parts = readable(Chart("nll", "", ("x", "y"), curves))
    assert [part.name for part in parts] == ["nll", "nll-part2", "nll-part3"]
    assert all(part.curves[0].name == "p0" and len(part.curves) <= len(ChartStyle().colors) for part in parts)
    assert {curve.name for part in parts for curve in part.curves} == {curve.name for curve in curves}


class TestVerdicts:
    @pytest.mark.exhaustive
    def test_a_report_opens_with_what_was_found(self, comparisons: Path, tmp_path: Path) -> None:
        for name in ("report.html", "report.md"):
            done = invoke("h2o-compare", "report", comparisons, "--to", tmp_path / name, "-q")
            assert done.exit_code == 0, done.stderr
            text = html.unescape((tmp_path / name).read_text())
            amount = r"\w+ (loses|gains) [\d.e-]+"
            sentence = re.search(rf"At window 64, {amount} nats per token against the full cache and {amount}\.", text)
            assert sentence, name
            assert sentence.start() < text.index("nats per token, lower is better"), "before the tables"

    def test_loss_at_equal_bytes(self) -> None:
        added = {"full": None, "h2o": 0.01234, "sink": 0.0611, "random": 0.09, "recent": 0.5, "tova": 0.04}
        found = [
            {"policy": policy, "window": 500, "cache_size": 6 << 20, "to_full": mean and {"mean": mean}}
            for policy, mean in added.items()
        ]
        assert loss(found) == (
            "At 6 MiB, h2o loses 0.012 nats per token against the full cache, sink loses 0.061 and recent loses 0.5."
        )
        assert loss(found[:1]) == "", "nothing was compared"

    def test_decoding_is_compared_at_a_history_that_all_reached(self) -> None:
        def at(engine: str, policy: str, history: int, speed: float) -> dict[str, Any]:
            name = f"{engine} {policy}".strip()
            held = {"dtype": "bfloat16", "quantize": "auto" if policy else "none"}
            return {"engine": engine, "name": name, "policy": policy, "history": history, "decode_tok_s": speed, **held}

        found = [at("h2o-stream", "h2o", 256, 90), at("h2o-stream", "h2o", 2048, 84), at("h2o-stream", "h2o", 8192, 80)]
        found += [at("llama.cpp", "", 256, 70), at("llama.cpp", "", 2048, 35)]
        assert decoding(found) == (
            "After 2,048 tokens, h2o-stream h2o decodes 84 tokens/s, 2.4 times llama.cpp's (bfloat16)."
        )
        assert decoding(found[:1] + found[4:]) == "", "no history in common"


def test_cells_are_colored_and_still_say_their_value() -> None:
    data = TableData("", ["depth", "100 tokens"], [["0%", "25%"], ["50%", "100%"]], [[None, 0.25], [None, 1.0]])
    console = Console(file=StringIO(), force_terminal=True, color_system="truecolor", width=40)
    console.print(data_table(data, 60))
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"\x1b\[30;48;2;(\d+);(\d+);\d+m +100%", drawn)
    assert shade(1.0)[1] > shade(1.0)[0]
    assert shade(0.0)[0] > shade(0.0)[1]
    plain = Console(file=StringIO(), width=40)
    plain.print(data_table(data, 60))
    assert "100%" in plain.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.every(2)
@pytest.mark.parametrize("style", [WIDE, NARROW])
def test_a_heatmap_has_a_panel_for_each_policy(style: ChartStyle) -> None:
    cells = [[0.5, 1.0], [0.0, 0.25]]
    names = ["full", "sink 256", "h2o 256", "recent 256"]
    picture = svg(Heatmap("n", "", ("tokens", "depth"), ["1", "2"], ["0%", "50%"], dict.fromkeys(names, cells)), style)
    assert picture.count("<image") == len(names)


def test_curves_can_be_told_apart_without_color() -> None:
    curves = [Curve(str(number), range(40), [number] * 40) for number in range(8)]
    picture = svg(Chart("many", "", ("x", "y"), curves), WIDE)
    shapes = re.findall(r'<defs>\s*<path id="\w+" d="([^"]+)" style', picture)
    assert len(set(shapes)) == 8 + 2, "a marker of its own for each, and the two ticks"


@pytest.mark.parametrize("width", [100, 80])
def test_numbers_of_a_table_are_never_cut(width: int) -> None:
    """Regression: at 80 columns the intervals of nll ended in an ellipsis."""
    header = ("policy", "window", "MiB", "nll", "last half", "to full", "95%", "gap", "tok/s")
    figures = ["256", "6.00", "12.0622", "12.3043", "+0.0868", "-0.037 to +0.226", "-0.48", "1945"]
    data = TableData("a text", header, [["h2o-paper", *figures], ["expected-attention", *figures]])
    drawn = StringIO()
    Console(width=width, file=drawn, highlight=False).print(data_table(data, width))
    lines = drawn.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    whole = [line for line in lines if " ".join(line.split()).endswith(" ".join(figures))]
    assert len(whole) == 2
    assert whole[0].startswith("h2o-paper ")
    assert all(word in drawn.getvalue() for name in header for word in name.split())
    assert ("last half" in drawn.getvalue()) == (width == 100), "columns are apart where there is room"
