"""Policies and comparisons of other packages, found by entry point and imported on first use."""

import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_stream import CacheConfig, ConfigError, H2OStreamError, attach
from h2o_stream.cache.source import policy_source
from h2o_stream.compare.catalog import COMPARISONS
from h2o_stream.config import POLICIES
from tests.commands import invoke, records

POLICY = '''
import torch

from h2o_stream.cache.policies import Policy
from h2o_stream.config import PolicyDefaults


class Oldest(Policy):
    """Keep the oldest tokens."""

    defaults = PolicyDefaults(heavy_share=0.5, sinks=0, decay=1.0, positions="rolling")

    def priority(self, held):
        return -held.index.float()


TABLE = PolicyDefaults(heavy_share=0.25, sinks=2, decay=1.0, positions="gap", rule="oldest:Oldest")
'''

OPTIONS = '''
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from h2o_stream.compare.options import ComparisonOptions, Policies
from h2o_stream.base.options import Option


@dataclass(frozen=True, kw_only=True)
class CountOptions(ComparisonOptions):
    """Count the letters of a text."""

    comparison = "count_letters:Count"

    text: Annotated[Path, Option("A text file.")]
    times: Annotated[int, Option("How often.", min=1)] = 2
    policies: Policies = ("h2o",)
'''

COMPARISON = """
from functools import partial

from h2o_stream.compare.comparison import Comparison, Job
from h2o_stream.compare.folder import JobResult


class Count(Comparison):
    name = "count"

    def begin(self, notify):
        return {"model": self.options.model.model, "text": str(self.options.text)}

    def jobs(self):
        return [Job(f"count {n}", {"n": n}, 1, partial(self.count, n)) for n in range(self.options.times)]

    def count(self, n):
        yield JobResult({"letters": n + len(self.options.text.read_text())})

    def records(self, parts):
        for config, part in zip(self.configs * self.options.times, parts):
            yield {"type": self.name, "policy": config.policy, "letters": part.figures["letters"]}
"""


def install(folder: Path, package: str, group: str, entry: str, **modules: str) -> None:
    """Create an installed package with one entry point, as pip would."""
    info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nSummary: Made for tests\n")
    (info / "entry_points.txt").write_text(f"[h2o_stream.{group}]\n{entry}\n")
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A folder of installed packages, whose modules are unloaded afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    for registry in (POLICIES, COMPARISONS):
        monkeypatch.setattr(registry, "_items", dict(registry._items))
    yield folder
    for name in ("oldest", "count_options", "count_letters"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def shell(site: Path, command: str, *arguments: str) -> Any:
    """Run a command in a new process; the last line of standard error says whether torch was imported."""
    code = (
        f"import sys\nsys.argv[0] = {command!r}\n"
        f"from h2o_stream.cli.{command.removeprefix('h2o-')} import main\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules, file=sys.stderr)\n"
    )
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.every(2)
@pytest.mark.parametrize(("target", "sinks", "positions"), [("Oldest", 0, "rolling"), ("TABLE", 2, "gap")])
def test_a_policy(
    site: Path, text: Path, tiny: Any, tiny_folder: Path, target: str, sinks: int, positions: str
) -> None:
    install(site, "oldest-policy", "policies", f"oldest = oldest:{target}", oldest=POLICY)
    plan = CacheConfig("oldest", 24).plan()
    assert (plan.sinks, plan.positions) == (sinks, positions)
    with attach(tiny, CacheConfig("oldest", 24, heavy=20, sinks=0)) as cache:
        tiny(torch.randint(3, 60, (1, 90)), past_key_values=cache)
        assert cache.kept(0)[0, 0, :20].tolist() == list(range(20))
    base = ["nll", "-m", tiny_folder, "--text", text, "--tokens", "60", "--windows", "16", "--jsonl", "-", "-q"]
    done = invoke("h2o-compare", *base, "--policies", "full,oldest")
    assert done.exit_code == 0, done.stderr
    run, full, oldest = records(done.stdout)
    assert (full["policy"], oldest["policy"]) == ("full", "oldest")
    assert run["cache"][1]["source"] == policy_source(plan)
    assert len(policy_source(plan)) == 16


def test_a_policy_of_ours_stays_ours(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the other package is found last."""
    monkeypatch.setattr(sys, "path", [*(path for path in sys.path if path != str(site)), str(site)])
    names = {"keydiff", "h2o"}
    install(site, "other-policies", "policies", "\n".join(f"{name} = oldest:Oldest" for name in names), oldest=POLICY)
    assert all(POLICIES[name].rule.startswith(("h2o_stream.", "h2o_lab.")) for name in names)


def test_a_policy_is_listed_without_an_import(site: Path) -> None:
    install(site, "oldest-policy", "policies", "oldest = oldest:Oldest", oldest=POLICY)
    listed = shell(site, "h2o-chat", "--help")
    assert re.search(r"\boldest\b", listed.stdout)
    assert listed.stderr.endswith("False\n")
    with pytest.raises(ConfigError, match=r"takes one of h2o, .*full, .*\boldest\b"):
        CacheConfig("newest")
    assert "oldest" not in sys.modules


def test_a_comparison(site: Path, text: Path, tmp_path: Path) -> None:
    modules = {"count_options": OPTIONS, "count_letters": COMPARISON}
    install(site, "letter-count", "comparisons", "count = count_options:CountOptions", **modules)
    done = invoke("h2o-compare", "count", "--text", text, "--times", "3", "--jsonl", "-", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    run, *found = records(done.stdout)
    assert run["command"] == "h2o-compare count"
    letters = len(text.read_text())
    assert [record["letters"] for record in found] == [letters, letters + 1, letters + 2]
    assert "| h2o | " in (tmp_path / "out" / "count.md").read_text()
    assert invoke("h2o-compare", "report", tmp_path / "out", "--to", tmp_path / "report.html").exit_code == 0
    assert invoke("h2o-compare", "count", "--text", text, "--times", "0").exit_code == 2
    wrong = invoke("h2o-compare", "count", "--text", text, "--policies", "best")
    assert wrong.exit_code == 2
    assert "--policies takes some of" in wrong.stderr


def test_a_comparison_is_listed_without_an_import(site: Path) -> None:
    install(site, "letter-count", "comparisons", "count = count_options:CountOptions", count_options=OPTIONS)
    listed = invoke("h2o-compare", "--help").stdout
    assert " count " in listed
    assert "Made for tests" in listed
    assert "count_options" not in sys.modules
    page = invoke("h2o-compare", "count", "--help").stdout
    assert "Count the letters of a text." in page
    assert {"--text", "--times", "--policies", "--model", "--kv-bits", "--out"} <= {*page.replace(",", " ").split()}


@pytest.mark.parametrize(("entry", "reason"), [
    ("oldest:Missing", "AttributeError"),
    ("oldest:torch", "AttributeError"),
    ("nowhere:Oldest", "ModuleNotFoundError"),
])  # fmt: skip
def test_a_policy_that_cannot_be_used(site: Path, entry: str, reason: str) -> None:
    install(site, "oldest-policy", "policies", f"oldest = {entry}", oldest=POLICY)
    with pytest.raises(H2OStreamError, match=f"^oldest of oldest-policy .* cannot be used: {reason}: [^\n]*$"):
        CacheConfig("oldest")
    CacheConfig("h2o")


@pytest.mark.parametrize("source", ["raise RuntimeError('worn out')", "CountOptions = 3"])
def test_a_comparison_that_cannot_be_used(site: Path, text: Path, tiny_folder: Path, source: str) -> None:
    install(site, "letter-count", "comparisons", "count = count_options:CountOptions", count_options=source)
    done = invoke("h2o-compare", "count", "--text", text)
    assert done.exit_code == 1
    assert done.stderr.startswith("h2o-compare: count of letter-count ")
    assert done.stderr.count("\n") == 1
    assert invoke("h2o-compare", "--help").exit_code == 0
    base = ["-m", tiny_folder, "--text", text, "--tokens", "20", "--policies", "recent", "--windows", "16", "-q"]
    assert invoke("h2o-compare", "nll", *base).exit_code == 0


llm = pytest.importorskip("llm")


@pytest.fixture
def model() -> Any:
    doors = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["entry-points"]["llm"]
    found: list[Any] = []
    importlib.import_module(doors["h2o"]).register_models(found.append)
    assert [made.model_id for made in found] == ["h2o"]
    return found[0]


def test_a_chat_keeps_its_cache_and_another_process_reads_it_again(model: Any, tiny_folder: Path) -> None:
    options = {"model": str(tiny_folder), "temperature": 0, "max_tokens": 6}
    talk = model.conversation()
    first = talk.prompt("hello", system="Be short.", **options)
    assert len(list(first)) > 3
    engine = model._open.ours.engine
    second = talk.prompt("and now?", **options)
    assert second.text()
    assert model._open.ours.engine is engine
    assert second.usage().output == 6
    assert second.usage().input < first.usage().input
    other = type(model)()
    again = other.conversation()
    again.responses = talk.responses[:1]
    assert again.prompt("and now?", **options).text() == second.text()


def test_another_conversation_is_not_continued(model: Any, tiny_folder: Path) -> None:
    """Nor is one with other settings; one with a schema is."""
    options = {"model": str(tiny_folder), "temperature": 0, "max_tokens": 6}
    engines = []
    for word in ("hello", "goodbye"):
        talk = model.conversation()
        assert talk.prompt(word, **options).text()
        assert model._open.theirs is talk
        assert talk.prompt("and now?", **options).text()
        engines.append(model._open.ours.engine)
    assert engines[0] is not engines[1]
    assert talk.prompt("and now?", schema={"enum": [1, 2]}, **options).text() in ("1", "2")
    assert model._open.ours.engine is engines[1]
    assert talk.prompt("and now?", **options, window=64).text()
    assert model._open.ours.engine is not engines[1]


def test_schemas_and_errors(model: Any, tiny_folder: Path) -> None:
    options = {"model": str(tiny_folder), "temperature": 2, "seed": 3, "max_tokens": 60}
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
    assert '"x"' in model.prompt("hello", schema=schema, **options).text()
    with pytest.raises(llm.ModelError, match="temp must be"):
        model.prompt("hello", **options | {"temperature": -1}).text()
    with pytest.raises(llm.ModelError, match="nowhere does not exist"):
        model.prompt("hello", **options | {"model": "./nowhere"}).text()
