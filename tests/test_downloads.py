"""Downloads from a local Hub, and their progress messages."""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session

from h2o_stream.base.progress import Progress
from h2o_stream.base.startup import LOG, importing, quieten_libraries
from h2o_stream.errors import ModelNotFoundError
from h2o_stream.models.find import find_before_imports
from h2o_stream.models.hub import download_bars, fetch, reachable
from tests.hub import BODY, Hub, serving_hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    close_session()  # the next one reads the variables again
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with serving_hub() as address:
        template = address + "/{repo_id}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield


def test_a_download_tells_its_bytes_and_draws_nothing(hub: None, capfd: pytest.CaptureFixture[str]) -> None:
    heard: list[Progress] = []
    assert fetch("org/name", "m.gguf", False, heard.append).read_bytes() == BODY
    assert heard[-1] == Progress("downloading", len(BODY), len(BODY))
    assert capfd.readouterr().err == ""


def test_bars_are_summed_and_others_ignored() -> None:
    heard: list[Progress] = []
    bar = download_bars(heard.append)
    with bar(total=100, unit="B") as one, bar(total=50, unit="B") as two, bar(total=7) as files:
        one.update(30)
        two.update(50)
        files.update(7)
    assert heard[-1] == Progress("downloading", 80, 150)


def test_a_listener_can_stop_it(hub: None) -> None:
    def leave(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("org/name", "m.gguf", False, leave)


CLOSED_PORT = 1
"""Of a service that no machine has any more."""


def _point_hub_at(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    template = f"http://127.0.0.1:{port}/{{repo_id}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)


def test_an_unreachable_hub_is_one_quick_error(hub: None, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    _point_hub_at(CLOSED_PORT, monkeypatch)
    started = time.monotonic()
    with pytest.raises(ModelNotFoundError, match="cannot be reached; check the network .HF_HUB_ETAG_TIMEOUT"):
        fetch("org/name", "m.gguf", False)
    assert time.monotonic() - started < 10
    assert capfd.readouterr().err == ""


def test_a_hub_that_says_nothing_is_asked_once(hub: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch is imported. Regression: huggingface_hub asked it again for its statistics, which took another three
    seconds.
    """
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    code = (
        "import sys; sys.argv = ['h2o-chat', '-p', 'hi', '-m', 'org/name']\n"
        "from h2o_stream.cli.chat import main\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert done.stderr.splitlines()[1:] == [done.stderr.splitlines()[-1]], "one line after that of loading"
        assert "cannot be reached" in done.stderr
        silent.setblocking(False)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()


def test_an_unreachable_hub_is_noticed_before_imports(hub: None, tmp_path: Path, monkeypatch: Any) -> None:
    _point_hub_at(CLOSED_PORT, monkeypatch)
    for name in ("smollm2-135m", str(tmp_path), "./nothing", "org/name:file.gguf", "a/b/c"):
        find_before_imports(name, False)
    with pytest.raises(ModelNotFoundError, match="neither a file, nor a folder, nor a Hub id"):
        find_before_imports("or g/na me", False)


def test_an_unreachable_hub_leaves_the_files_on_this_machine(hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch("org/name", "m.gguf", False)
    _point_hub_at(CLOSED_PORT, monkeypatch)
    assert fetch("org/name", "m.gguf", False) == path


def test_a_name_server_that_does_not_answer_is_not_waited_for(hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: [answer.wait(30)][1:])
    monkeypatch.setattr("h2o_stream.models.hub.HUB_ANSWER_S", 0.2)
    started = time.monotonic()
    assert not reachable("org/name")
    assert time.monotonic() - started < 10
    answer.set()


def test_a_hub_that_says_nothing_is_one_quick_error(hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a connection was enough, and huggingface_hub then waited for minutes."""
    monkeypatch.setattr("h2o_stream.models.hub.HUB_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        _point_hub_at(silent.getsockname()[1], monkeypatch)
        started = time.monotonic()
        with pytest.raises(ModelNotFoundError, match="cannot be reached; check the network"):
            fetch("org/name", "m.gguf", False)
    assert time.monotonic() - started < 10


def test_a_slow_hub_is_given_the_time_the_user_allows(hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Hub.do_HEAD

    def slow(self: Hub) -> None:
        time.sleep(0.5)
        answer(self)

    monkeypatch.setattr(Hub, "do_HEAD", slow)
    monkeypatch.setattr("h2o_stream.models.hub.HUB_ANSWER_S", 0.1)
    assert not reachable("org/name")
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "10")
    assert reachable("org/name")


def test_a_proxy_is_what_must_be_reached(hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{CLOSED_PORT}")
    close_session()  # it has read the variables
    assert not reachable("org/name")
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=proxy.serve_forever, args=(0.01,), daemon=True).start()
    _point_hub_at(CLOSED_PORT, monkeypatch)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.server_port}")
    close_session()
    assert reachable("org/name")
    proxy.shutdown()
    proxy.server_close()
    close_session()


@pytest.fixture
def logging_restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(logging, "raiseExceptions", True)
    monkeypatch.setattr(logging.root, "handlers", [x for x in logging.root.handlers if x.name != LOG])
    yield
    logging.captureWarnings(False)
    for handler in [handler for handler in logging.root.handlers if handler.name == LOG]:
        logging.root.removeHandler(handler)
        handler.close()


def test_libraries_log_to_a_file_and_not_to_the_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], logging_restored: None
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    quieten_libraries(progress=False)
    with importing():
        library = logging.getLogger("a_library_of_this_test")
        library.addHandler(logging.StreamHandler(sys.stderr))
        library.propagate = False
        library.setLevel(logging.ERROR)
    library.warning("Retrying in 8s")
    assert capsys.readouterr().err == ""
    (log,) = tmp_path.rglob("*.log")
    assert "WARNING a_library_of_this_test: Retrying in 8s" in log.read_text()


def test_a_log_that_cannot_be_written_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], logging_restored: None
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    quieten_libraries(progress=False)
    logging.getLogger("a_library_of_this_test").warning("unseen")
    assert capsys.readouterr().err == ""
