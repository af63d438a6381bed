"""Reports of comparisons."""

import html
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from h2o_lab.report.report import NARROW, WIDE, svg
from h2o_lab.ruler.heatmap import Heatmap
from h2o_stream.ui.pages import Chart, Curve
from h2o_stream.ui.plots import ChartStyle
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


def test_all_of_a_run_is_in_it(comparisons: Path) -> None:
    folder = comparisons / "loss"
    run, *measured = records((folder / "records.jsonl").read_text())
    assert run == {**json.loads((folder / "run.json").read_text())}
    assert run["command_line"][:2] == ["h2o-compare", *run["command_line"][1:2]]
    assert {"versions", "hardware", "begun", "texts", "tokens", "cache"} <= set(run)
    assert [record["policy"] for record in measured] == ["full", "sink", "h2o"]
    assert {path.name for path in folder.iterdir()} == {
        "run.json", "records.jsonl", "nll.md", "nll-text.png", "parts",
    }  # fmt: skip


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


@pytest.mark.exhaustive
def test_a_report_opens_with_what_was_found(comparisons: Path, tmp_path: Path) -> None:
    for name in ("report.html", "report.md"):
        done = invoke("h2o-compare", "report", comparisons, "--to", tmp_path / name, "-q")
        assert done.exit_code == 0, done.stderr
        text = html.unescape((tmp_path / name).read_text())
        amount = r"\w+ (loses|gains) [\d.e-]+"
        sentence = re.search(rf"At window 64, {amount} nats per token against the full cache and {amount}\.", text)
        assert sentence, name
        assert sentence.start() < text.index("nats per token, lower is better"), "before the tables"


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
