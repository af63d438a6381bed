"""The hand-over of jobs to a Ray cluster; by a stand-in for Ray, and by two nodes of its own where it is installed."""

import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from h2o_lab import cluster
from tests.commands import invoke, records

pytestmark = pytest.mark.usefixtures("no_charts")


class PretendedRay(ModuleType):
    """Runs tasks when their results are asked for, the last one first; those in `dies` fail."""

    exceptions = SimpleNamespace(RayError=type("RayError", (Exception,), {}))

    def __init__(self) -> None:
        super().__init__("ray")
        self.__spec__ = ModuleSpec("ray", None)
        self.dies: set[int] = set()
        self.tasks: list[Callable[[], Any]] = []
        self.resources: dict[str, float] = {}
        self.connected = ""

    def init(self, address: str, **settings: Any) -> None:
        if address == "nowhere:6379":
            raise ConnectionError("a traceback's worth of words")
        self.connected = address

    def shutdown(self) -> None:
        self.connected = ""

    def nodes(self) -> list[dict[str, Any]]:
        found = ({"CPU": 8.0}, {"CPU": 4.0}, {"CPU": 0.0}, {})
        alive = found if self.tasks else (*found, {"CPU": 8.0})  # one dies
        return [{"Alive": True, "Resources": one} for one in alive] + [{"Alive": False, "Resources": {"CPU": 1.0}}]

    def put(self, item: Any) -> Any:
        return pickle.loads(pickle.dumps(item))

    def remote(self, function: Callable[..., Any]) -> Any:
        def submit(*arguments: Any) -> int:
            self.tasks.append(lambda: pickle.loads(pickle.dumps(function(*arguments))))
            return len(self.tasks) - 1

        def options(**resources: float) -> Any:
            self.resources = resources
            return SimpleNamespace(remote=submit)

        return SimpleNamespace(options=options)

    def wait(self, references: Sequence[int]) -> tuple[list[int], list[int]]:
        return [references[-1]], [*references[:-1]]

    def get(self, reference: int) -> Any:
        if reference in self.dies:
            raise self.exceptions.RayError("The worker died.\nIts node is gone.")
        return self.tasks[reference]()


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedRay]:
    pretended = PretendedRay()
    monkeypatch.setitem(sys.modules, "ray", pretended)
    yield pretended
    cluster._begun.clear()


@pytest.fixture
def command(tiny_folder: Path, text: Path) -> list[object]:
    options = ["--policies", "full,sink,h2o", "--windows", "16,32", "--tokens", "100", "--dtype", "float32"]
    return ["nll", "-m", tiny_folder, "--text", text, *options, "--jsonl", "-", "--out"]


def results(text: str) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name != "tok_s"} for record in records(text)[1:]]


def parts(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "parts").iterdir())


def test_the_files_are_those_of_one_process(command: list[object], tmp_path: Path, ray: PretendedRay) -> None:
    alone = invoke("h2o-compare", *command, tmp_path / "alone")
    done = invoke("h2o-compare", *command, tmp_path / "ray", "--ray", "auto")
    assert done.exit_code == 0, done.stderr
    assert results(done.stdout) == results(alone.stdout)
    assert len(ray.tasks) == 5
    assert "1 of 5 nodes died" in done.stderr
    assert ray.resources == {"num_cpus": 4.0}, "all of the smallest node that runs tasks"
    assert not ray.connected
    assert parts(tmp_path / "ray") == parts(tmp_path / "alone")
    names = {path.name for path in (tmp_path / "ray").iterdir()}
    assert names == {path.name for path in (tmp_path / "alone").iterdir()}
    pictures = {name for name in names if name.endswith(".png")}
    assert pictures == {"nll-text-by-window.png", "nll-text-window16.png", "nll-text-window32.png"}


def test_what_ray_gives_up_costs_its_task_alone(command: list[object], tmp_path: Path, ray: PretendedRay) -> None:
    ray.dies = {1}
    failed = invoke("h2o-compare", *command, tmp_path / "out", "--ray", "10.0.0.1:6379")
    assert failed.exit_code == 1
    assert "sink 16: Ray gave it up: Its node is gone." in failed.stderr
    assert len(parts(tmp_path / "out")) == 4
    ray.tasks.clear()
    ray.dies.clear()
    done = invoke("h2o-compare", *command, tmp_path / "out", "--ray", "auto")
    assert done.exit_code == 0, done.stderr
    assert len(ray.tasks) == 1


def test_a_node_with_something_else_is_named(
    command: list[object], tmp_path: Path, ray: PretendedRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_comparison", lambda options: SimpleNamespace(jobs=list))
    failed = invoke("h2o-compare", *command, tmp_path / "out", "--ray", "auto")
    assert failed.exit_code == 1
    assert "has another model, text or version" in failed.stderr


def test_no_cluster_and_no_ray(
    command: list[object], tmp_path: Path, ray: PretendedRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = invoke("h2o-compare", *command, tmp_path / "out", "--ray", "nowhere:6379")
    assert failed.exit_code == 1
    assert "--ray nowhere:6379 reaches no cluster; start one by ray start --head" in failed.stderr
    monkeypatch.setitem(sys.modules, "ray", None)
    failed = invoke("h2o-compare", *command, tmp_path / "out", "--ray", "auto")
    assert failed.exit_code == 1
    assert "--ray needs Ray" in failed.stderr
    assert "Loading" not in failed.stderr


@pytest.mark.exhaustive
def test_one_of_two_nodes_dies(command: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes half a minute; needs Ray (extra cluster)."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    alone = invoke("h2o-compare", *command, tmp_path / "alone")
    nodes = Cluster()
    try:
        nodes.add_node(num_cpus=1)
        other = nodes.add_node(num_cpus=1)

        def kill() -> None:
            while not any((tmp_path / "ray" / "parts").glob("*.safetensors")):
                time.sleep(0.05)
            nodes.remove_node(other, allow_graceful=False)

        killer = Thread(target=kill, daemon=True)
        killer.start()
        done = invoke("h2o-compare", *command, tmp_path / "ray", "--ray", nodes.address)
        killer.join()
    finally:
        nodes.shutdown()
    assert done.exit_code == 0, done.stderr
    assert results(done.stdout) == results(alone.stdout)
    assert parts(tmp_path / "ray") == parts(tmp_path / "alone")
