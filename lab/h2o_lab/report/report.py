"""Reports of finished comparisons: one self-contained HTML page, Markdown, or their tables as CSV or LaTeX."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from os.path import relpath
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from h2o_lab.report.everything import LeftOut, lines_of, read_left_out
from h2o_lab.report.tables import CSV_BEGINS, csv_tables, format_of, latex_page
from h2o_stream.base.memory import format_bytes
from h2o_stream.base.resources import require_matplotlib, version_of, write_text
from h2o_stream.compare.catalog import COMPARISONS
from h2o_stream.errors import DataError, file_errors
from h2o_stream.session.jsonl import read_objects
from h2o_stream.session.run_record import RECORDS, RUN, read_run_record
from h2o_stream.ui.pages import Chart, Drawing, Page, page_of
from h2o_stream.ui.plots import ChartStyle, figure_of
from h2o_stream.ui.tables import markdown_page

_MADE_BY = "h2o_stream report"
"""Marks a file that a later report may overwrite."""

_VERSION = version_of("h2o-stream")

_DARK = ("#f0f0f0", "#ff7b89", "#3fc5d8", "#f2b84b", "#a797ff", "#7bd36a", "#a0a0a0", "#f49ac8")

WIDE = ChartStyle(title=False, background="none")
WIDE_DARK = ChartStyle(foreground="#e8e8e8", background="none", colors=_DARK, title=False)
NARROW = ChartStyle((4.1, 4.1), title=False, background="none")
NARROW_DARK = ChartStyle((4.1, 4.1), "#e8e8e8", "none", _DARK, title=False)


@dataclass(frozen=True)
class FinishedComparison:
    """A finished comparison."""

    folder: Path
    kind: str
    run: dict[str, Any]
    page: Page

    @property
    def command(self) -> str:
        """The command line that runs it again."""
        return shlex.join(self.run.get("command_line", [self.run["command"]]))

    @property
    def machine(self) -> str:
        """The machine and the versions it ran on."""
        hardware, versions = self.run["hardware"], self.run["versions"]
        memory = format_bytes(hardware["memory_bytes"])
        tools = ", ".join(f"{name} {number}" for name, number in versions.items())
        return f"{hardware['processor'] or hardware['machine']}, {hardware['cores']} cores, {memory}; {tools}"


def read_comparisons(folders: Sequence[Path]) -> list[FinishedComparison]:
    """The comparisons in folders and their direct subfolders, in the order of `COMPARISONS`.

    Raises:
        DataError: a folder has none, or one that is unfinished or damaged.
    """
    comparisons = []
    for folder in folders:
        missing = {item.comparison for item in read_left_out(folder) if item.job is None}
        inside = [folder] if (folder / RUN).exists() else sorted(path.parent for path in folder.glob(f"*/{RUN}"))
        inside = [path for path in inside if path.name not in missing]
        if not inside:
            raise DataError(f"{folder}: there is no comparison in it; report takes folders of --out")
        comparisons += [_read(path) for path in inside]
    order = list(COMPARISONS)
    return sorted(comparisons, key=lambda item: order.index(item.kind))


def _read(folder: Path) -> FinishedComparison:
    run = read_run_record(folder)
    kind = str(run["command"]).rpartition(" ")[2]
    if kind not in COMPARISONS:
        raise DataError(f"{folder}: a run of {run['command']!r}, which has no report")
    if not (folder / RECORDS).exists():
        raise DataError(f"{folder}: {kind} is not finished there; run its command again to resume it")
    read = read_objects(folder / RECORDS, "report")
    try:
        run, *records = (record for _, record in read)
        return FinishedComparison(folder, kind, run, page_of(kind, run, records))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DataError(f"{folder / RECORDS}: not what {kind} writes ({type(error).__name__}: {error})") from error


def write_report(finished: Sequence[FinishedComparison], path: Path, left_out: Sequence[LeftOut] = ()) -> None:
    """Write a report in the format of its file's name: .html, .md, or .csv and .tex for the tables alone.

    Raises:
        ConfigError: the name has another format.
        DataError: the file exists and is not a report, or cannot be written.
        H2OStreamError: matplotlib is missing, which HTML needs.
    """
    suffix = format_of(path, ".html", ".md", ".csv", ".tex")
    if suffix == ".html":
        require_matplotlib()
    with file_errors(f"--to {path}"):
        if path.exists() and not _is_report(path.read_text(encoding="utf-8", errors="replace")):
            raise DataError(f"--to {path} exists and is not a report; choose another name")
    if suffix in (".html", ".md"):
        text = _html(finished, left_out) if suffix == ".html" else _markdown(finished, left_out, path.parent)
    elif suffix == ".csv":
        text = csv_tables({item.folder.name: item.page for item in finished})
    else:
        text = "\n".join([f"% made by {_MADE_BY} {_VERSION}\n", *(latex_page(item.page) for item in finished)])
    write_text(path, text, "--to")


def _is_report(text: str) -> bool:
    return _MADE_BY in text or text.startswith(",".join(CSV_BEGINS))


def _html(finished: Sequence[FinishedComparison], left_out: Sequence[LeftOut]) -> str:
    environment = Environment(loader=PackageLoader("h2o_lab.report"), autoescape=True, undefined=StrictUndefined)
    environment.filters["images"] = _images
    environment.filters["settings"] = _settings
    template = environment.get_template("report.html")
    return template.render(finished=finished, left_out=lines_of(left_out), made_by=_MADE_BY, version=_VERSION)


def _images(chart: Chart | Drawing) -> dict[str, str]:
    """A chart in every style, as data URIs."""
    styles = {"wide": WIDE, "wide_dark": WIDE_DARK, "narrow": NARROW, "narrow_dark": NARROW_DARK}
    pictures = {name: base64.b64encode(svg(chart, style).encode()).decode() for name, style in styles.items()}
    return {name: f"data:image/svg+xml;base64,{picture}" for name, picture in pictures.items()}


def svg(chart: Chart | Drawing, style: ChartStyle) -> str:
    """A chart as a self-contained SVG picture."""
    text = StringIO()
    figure_of(chart, style).savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def _settings(run: dict[str, Any]) -> str:
    """The settings of a run as JSON, without those that the page shows elsewhere."""
    shown = {name: value for name, value in run.items() if name not in ("hardware", "versions", "command_line", "type")}
    return json.dumps(shown, indent=1, ensure_ascii=False)


def _markdown(finished: Sequence[FinishedComparison], left_out: Sequence[LeftOut], folder: Path) -> str:
    verdicts = [f"- {item.kind}: {item.page.verdict}\n" for item in finished if item.page.verdict]
    parts = [f"<!-- made by {_MADE_BY} {_VERSION} -->\n", "".join(verdicts)]
    for item in finished:
        parts.append(f"## {item.kind}\n\n{markdown_page(item.page)}")
        for chart in item.page.charts:
            picture = item.folder / f"{chart.name}.png"
            if picture.exists():
                parts.append(f"![{' '.join(chart.title.split())}]({Path(relpath(picture, folder)).as_posix()})\n")
        parts.append(f"`{item.command}` on {item.machine}.\n")
    if left_out:
        parts.append("\n".join(["## Not measured\n", *(f"- {line}" for line in lines_of(left_out))]) + "\n")
    return "\n".join(parts)
