"""Reports of finished comparisons: one HTML page that needs nothing from outside, or Markdown."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os.path import relpath
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from h2o_stream import __version__
from h2o_stream.compare.comparisons import COMPARISONS
from h2o_stream.errors import DataError
from h2o_stream.resources import write_text
from h2o_stream.session.lines import read_objects
from h2o_stream.session.records import RECORDS, RUN, name_of, read_run
from h2o_stream.ui.figures import size
from h2o_stream.ui.pages import KINDS, Chart, Page, page_of
from h2o_stream.ui.plots import NARROW, NARROW_DARK, WIDE, WIDE_DARK, Look, svg
from h2o_stream.ui.tables import markdown_page

_MADE_BY = "h2o_stream report"
"""Marks a file that a later report may take the place of."""


@dataclass(frozen=True)
class Finished:
    """A comparison that a folder holds.

    Attributes:
        folder: where.
        kind: its name.
        run: its run record.
        page: what it shows.
    """

    folder: Path
    kind: str
    run: dict[str, Any]
    page: Page

    @property
    def command(self) -> str:
        """What to type to run it again."""
        return shlex.join(self.run.get("command_line", [self.run["command"]]))

    @property
    def machine(self) -> str:
        """What it ran on."""
        hardware, versions = self.run["hardware"], self.run["versions"]
        memory = size(hardware["memory_bytes"])
        tools = ", ".join(f"{name} {number}" for name, number in versions.items())
        return f"{hardware['processor'] or hardware['machine']}, {hardware['cores']} cores, {memory}; {tools}"


def finished_in(folders: Sequence[Path]) -> list[Finished]:
    """The comparisons in folders and the folders right below them, in the order of `KINDS`.

    Raises:
        DataError: there is none in a folder, or one that is not finished or damaged.
    """
    found = []
    for folder in folders:
        inside = [folder] if (folder / RUN).exists() else sorted(path.parent for path in folder.glob(f"*/{RUN}"))
        if not inside:
            raise DataError(f"{folder}: no comparison in it; report takes folders of --out")
        found += [_read(path) for path in inside]
    return sorted(found, key=lambda item: KINDS.index(item.kind) if item.kind in KINDS else len(KINDS))


def _read(folder: Path) -> Finished:
    run = read_run(folder)
    kind = name_of(run)
    if kind not in COMPARISONS:
        raise DataError(f"{folder}: a run of {run['command']!r}, which has no report")
    if not (folder / RECORDS).exists():
        raise DataError(f"{folder}: {kind} is not finished there; run its command again, it goes on where it was")
    run, *records = (record for _, record in read_objects(folder / RECORDS, "report"))
    try:
        return Finished(folder, kind, run, page_of(kind, run, records))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DataError(f"{folder / RECORDS}: not what {kind} writes ({type(error).__name__}: {error})") from error


def write_report(finished: Sequence[Finished], path: Path) -> None:
    """Write a report, as Markdown if the file's name ends so, otherwise as HTML.

    Raises:
        DataError: the file is there and no report, or cannot be written.
    """
    markdown = path.suffix.lower() in (".md", ".markdown")
    try:
        if path.exists() and _MADE_BY not in path.read_text(encoding="utf-8", errors="replace"):
            raise DataError(f"--to {path} is there and no report of ours; choose another name")
    except OSError as error:
        raise DataError(f"--to {path}: {error.strerror or error}") from error
    write_text(path, _markdown(finished, path.parent) if markdown else _html(finished), "--to")


def _html(finished: Sequence[Finished]) -> str:
    environment = Environment(loader=PackageLoader("h2o_stream.ui"), autoescape=True, undefined=StrictUndefined)
    environment.filters["pictured"] = _pictured
    environment.filters["settings"] = _settings
    template = environment.get_template("report.html")
    return template.render(finished=finished, made_by=_MADE_BY, version=__version__)


def _pictured(chart: Chart) -> dict[str, str]:
    """A chart in every look, as addresses that hold the picture themselves."""
    looks = {"wide": WIDE, "wide_dark": WIDE_DARK, "narrow": NARROW, "narrow_dark": NARROW_DARK}
    return {name: _address(chart, look) for name, look in looks.items()}


def _address(chart: Chart, look: Look) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg(chart, look).encode()).decode()}"


def _settings(run: dict[str, Any]) -> str:
    """The settings of a run as JSON, without what stands elsewhere on the page."""
    shown = {name: value for name, value in run.items() if name not in ("hardware", "versions", "command_line", "type")}
    return json.dumps(shown, indent=1, ensure_ascii=False)


def _markdown(finished: Iterable[Finished], folder: Path) -> str:
    parts = [f"<!-- made by {_MADE_BY} {__version__} -->\n"]
    for item in finished:
        parts.append(f"## {item.kind}\n\n{markdown_page(item.page)}")
        for chart in item.page.charts:
            picture = item.folder / f"{chart.name}.png"
            if picture.exists():
                parts.append(f"![{' '.join(chart.title.split())}]({Path(relpath(picture, folder)).as_posix()})\n")
        parts.append(f"`{item.command}` on {item.machine}.\n")
    return "\n".join(parts)
