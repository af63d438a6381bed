"""Runs tests in forks of the process that has collected them: `python -m pytest -p tests.workers --workers 3`.

To import torch and transformers and to collect takes longer than many files of tests do, and pytest-xdist does both in
each of its workers. A fork begins at once. If one crashes, its test fails and another goes on with the rest.
"""

import os
import signal
import traceback
import warnings
from collections.abc import Iterator, Sequence
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=os.cpu_count(), help="how many processes run tests")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if not config.option.collectonly:
        from tests import preloaded

        preloaded.server()  # imports what commands need while this process collects
        config.pluginmanager.register(Workers(config))


class Workers:
    """Distributes the tests and passes on what workers report; in a worker, reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._pids: dict[Any, int] = {}  # of the workers, by the connection over which they report
        self._running: dict[Any, int] = {}  # the number of the test that each of them runs
        self._parent: Connection | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed:
            return None  # pytest says what could not be collected
        self._config.pluginmanager.getplugin("terminalreporter").showfspath = False  # lines would begin with every test
        left = dict(enumerate(session.items))
        try:
            while left:
                before = len(left)
                self._run(session, left)
                if len(left) == before:
                    raise session.Interrupted("workers end before their first test")
        finally:
            for pid in self._pids.values():
                os.kill(pid, signal.SIGINT)
                os.waitpid(pid, 0)
        return True

    def _run(self, session: pytest.Session, left: dict[int, pytest.Item]) -> None:
        """Run what is left, but for what a worker that crashed had taken."""
        groups = [list(numbers) for _, numbers in groupby(left, lambda number: _group(left[number]))]
        queue, filled = os.pipe()  # of the groups; each worker takes one after another
        os.write(filled, b"".join(number.to_bytes(2) for number in range(len(groups))))
        os.close(filled)
        for number in range(min(self._config.option.workers, len(groups))):
            self._start_worker(number, session.items, groups, queue)
        os.close(queue)
        while self._pids:
            for connection in wait([*self._pids]):
                self._receive(connection, left)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)

    def _start_worker(self, number: int, items: Sequence[pytest.Item], groups: list[list[int]], queue: int) -> None:
        factory: Any = self._config._tmp_path_factory  # type: ignore[attr-defined]
        folder = factory.getbasetemp() / f"worker{number}"
        folder.mkdir(exist_ok=True)
        here, there = Pipe(duplex=False)
        if pid := os.fork():
            there.close()
            self._pids[here] = pid
            return
        factory._basetemp, self._parent = folder, there
        try:
            self._work(items, (index for group in _taken(queue) for index in groups[group]))
        except KeyboardInterrupt:
            os._exit(1)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(1)
        from tests.preloaded import leave

        leave(0)

    def _work(self, items: Sequence[pytest.Item], numbers: Iterator[int]) -> None:
        self._config.pluginmanager.unregister(name="terminalreporter")
        number = next(numbers, None)
        while number is not None:
            following, item = next(numbers, None), items[number]
            self._send("started", number)
            nextitem = None if following is None else items[following]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
            self._send("finished", number)
            number = following

    def _send(self, name: str, value: Any) -> None:
        if self._parent is not None:
            self._parent.send((name, value))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._parent is not None:
            hook = self._config.hook.pytest_report_to_serializable
            self._send("report", hook(config=self._config, report=report))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str) -> None:
        warned = warning_message
        message = warnings.WarningMessage(str(warned.message), warned.category, warned.filename, warned.lineno)
        self._send("warning", {"warning_message": message, "when": when, "nodeid": nodeid, "location": None})

    def _receive(self, connection: Any, left: dict[int, pytest.Item]) -> None:
        hook = self._config.hook
        try:
            name, value = connection.recv()
        except EOFError:
            _, status = os.waitpid(self._pids.pop(connection), 0)
            if connection in self._running:
                self._crashed(left.pop(self._running.pop(connection)), os.waitstatus_to_exitcode(status))
            return
        if name == "report":
            report = hook.pytest_report_from_serializable(config=self._config, data=value)
            hook.pytest_runtest_logreport(report=report)
        elif name == "warning":
            hook.pytest_warning_recorded.call_historic(kwargs=value)
        elif name == "started":
            self._running[connection] = value
            hook.pytest_runtest_logstart(nodeid=left[value].nodeid, location=left[value].location)
        else:
            item = left.pop(self._running.pop(connection))
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _crashed(self, item: pytest.Item, code: int) -> None:
        words = f"the process of this test ended with {code}" + (" (a signal)" if code < 0 else "")
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", words, "call")
        self._config.hook.pytest_runtest_logreport(report=report)
        self._config.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _group(item: pytest.Item) -> object:
    """What tests are run by the same worker for: a file of tests, or a model that takes long to load."""
    return "embedded" in getattr(item, "fixturenames", ()) or item.path


def _taken(queue: int) -> Iterator[int]:
    """Numbers of groups that no other worker has taken."""
    while number := os.read(queue, 2):
        yield int.from_bytes(number)
