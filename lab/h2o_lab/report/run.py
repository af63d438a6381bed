"""Runs all comparisons, and collects what of them could not be measured."""

from __future__ import annotations

import gc
import sys
from functools import partial

from h2o_lab.report.everything import AllOptions, LeftOut, lines_of, write_left_out
from h2o_lab.report.report import read_comparisons, write_report
from h2o_stream.base.memory import trim_heap
from h2o_stream.base.processes import Processes
from h2o_stream.compare.comparison import reason_of
from h2o_stream.errors import H2OStreamError
from h2o_stream.session.jsonl import JsonlWriter
from h2o_stream.ui.comparison import run_comparison
from h2o_stream.ui.terminal import Terminal

_REPORTS = ("report.html", "report.md")


def run_everything(options: AllOptions, terminal: Terminal, jsonl: JsonlWriter, processes: Processes) -> None:
    """Run all comparisons and write their reports.

    What a model, its tokenizer, the memory or the installation does not allow is left out, with the reason on the
    terminal, in `jsonl` and in the reports. A model that cannot be loaded ends it all.

    Raises:
        H2OStreamError: the first comparison could not begin, or nothing could be measured.
    """
    comparisons, left_out = options.comparisons(), _Collector(options, terminal, jsonl, processes)
    measured = 0
    for number, (name, chosen) in enumerate(comparisons.items(), 1):
        terminal.note(f"{number} of {len(comparisons)}: {name}", style="bold")
        known = len(left_out.items)
        try:
            chosen.check()
            run_comparison(chosen.make(), chosen.out, terminal, jsonl, processes, partial(left_out.add, name))
            measured += 1
        except Exception as error:  # the others are measured all the same
            if number == 1 and len(left_out.items) == known:
                raise
            left_out.add(name, None, reason_of(error))
        _release_memory()
    if not measured:
        raise H2OStreamError(f"nothing could be measured; {lines_of(left_out.items)[0]}")
    if processes.main:
        finished = read_comparisons([options.out])
        for report in _REPORTS:
            write_report(finished, options.out / report, left_out.items)
            terminal.note(f"the report is {options.out / report}")


def _release_memory() -> None:
    """Return memory of objects that nobody holds any more, also that of an accelerator."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    trim_heap()


class _Collector:
    """Collects what is left out, and says and stores it at once."""

    def __init__(self, options: AllOptions, terminal: Terminal, jsonl: JsonlWriter, processes: Processes) -> None:
        self.items: list[LeftOut] = []
        self._folder, self._terminal, self._jsonl, self._main = options.out, terminal, jsonl, processes.main
        self._store()

    def add(self, comparison: str, job: str | None, reason: str) -> None:
        """Add a job, or a whole comparison."""
        item = LeftOut(comparison, job, reason)
        self.items.append(item)
        self._terminal.note(f"left out: {lines_of([item])[0]}", style="yellow")
        self._jsonl.write(item.record)
        self._store()

    def _store(self) -> None:
        if self._main:
            write_left_out(self._folder, self.items)
