"""The lm-evaluation-harness with our model."""

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from h2o_lab.harness import command as lm_eval_command
from h2o_stream.attachment.attach import attach
from h2o_stream.config import CacheConfig
from tests.commands import invoke, records
from tests.fixtures import written
from tests.preloaded import run
from tests.tolerance import LIKELIHOOD

pytest.importorskip("lm_eval", reason="the harness is not installed: make setup-all")

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from h2o_lab.harness.model import H2OLM

logging.getLogger("lm_eval").setLevel(logging.ERROR)

FEW_TASKS = """
import sys
from functools import partial
from lm_eval import tasks
from torch.utils import collect_env
tasks.TaskManager = partial(tasks.TaskManager, include_defaults=False)
collect_env.get_pip_packages = lambda *_: ("pip", "")
sys.argv = sys.argv[1:]
from h2o_lab.harness.command import main
main()
"""

DOCUMENTS = [
    {
        "question": f"The {color} house stands beside the {place}, and nobody knows who lives there. It is near the",
        "choices": [place, "airport, far from everything", "moon"],
        "answer": 0,
    }
    for color, place in (("red", "river"), ("blue", "old mill"), ("green", "church"), ("white", "station"))
]


@pytest.fixture(autouse=True)
def _few_tasks(request: pytest.FixtureRequest) -> None:
    if "every" not in request.fixturenames or not request.getfixturevalue("every"):
        request.getfixturevalue("few_tasks")


EVERY = pytest.mark.parametrize(
    "every",
    [pytest.param(False, id="ours alone"), pytest.param(True, marks=pytest.mark.exhaustive, id="those of the harness")],
)
"""Whether the harness reads its own tasks too."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A task in the harness's own format, with local data."""
    (tmp_path / "tasks").mkdir()
    data = written(tmp_path / "tasks" / "houses.jsonl", DOCUMENTS)
    (data.parent / "houses.yaml").write_text(
        "task: houses\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: question\ndoc_to_choice: choices\n"
        "doc_to_target: answer\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n"
    )
    return data.parent


def evaluated(model: Any, folder: Path) -> tuple[dict[str, Any], list[Any]]:
    found = simple_evaluate(
        model, tasks=["houses"], task_manager=TaskManager(include_path=str(folder), include_defaults=False)
    )
    samples = sorted(found["samples"]["houses"], key=lambda sample: sample["doc_id"])
    return found["results"]["houses"], [sample["filtered_resps"] for sample in samples]


def ours(folder: Path, **more: Any) -> H2OLM:
    return H2OLM(str(folder), dtype="float32", device="cpu", quiet=True, **more)


def test_full_is_the_harness_own_model_exactly(tiny_folder: Path, folder: Path) -> None:
    theirs = HFLM(str(tiny_folder), dtype="float32", device="cpu", batch_size=3)
    assert evaluated(ours(tiny_folder, policy="full", batch_size=3), folder) == evaluated(theirs, folder)


@pytest.mark.exhaustive
def test_a_window_that_holds_everything_matches_full_and_a_small_one_does_not(tiny_folder: Path, folder: Path) -> None:
    full, large, small = (
        [likelihood for answers in evaluated(ours(tiny_folder, **options), folder)[1] for likelihood, _ in answers]
        for options in ({"policy": "full"}, {"policy": "h2o", "window": 200}, {"policy": "recent", "ratio": 0.2})
    )
    assert large == pytest.approx(full, rel=LIKELIHOOD)
    assert max(abs(a - b) for a, b in zip(small, full, strict=True)) > 0.01


def test_an_answer_is_scored_token_by_token_under_eviction(tiny_folder: Path, tokenizer: Any) -> None:
    """The same as prefilling the context and then decoding the answer."""
    model = ours(tiny_folder, policy="recent", window=8)
    context, answers = tokenizer(DOCUMENTS[0]["question"])["input_ids"], ([17, 300, 4], [9], [17, 2, 2, 5])
    scored = list(model.score_continuations(context, answers))
    for answer, (likelihood, greedy) in zip(answers, scored, strict=True):
        with attach(model.model, CacheConfig("recent", 8, chunk=0)) as cache:
            model.model(torch.tensor([context[:-1]]), past_key_values=cache)
            assert cache.kept(0).shape[-1] <= 8
            expected, likeliest = 0.0, []
            for fed, wanted in zip([context[-1], *answer], answer, strict=False):
                logits = model.model(torch.tensor([[fed]]), past_key_values=cache).logits[0, -1]
                expected += float(logits.float().log_softmax(-1)[wanted])
                likeliest.append(int(logits.argmax()))
        assert likelihood == pytest.approx(expected, rel=LIKELIHOOD)
        assert greedy == (likeliest == list(answer))


def test_rolling_likelihoods_and_generation_go_through_the_cache(tiny_folder: Path) -> None:
    from lm_eval.api.instance import Instance

    text = "The quick brown fox jumps over the lazy dog, again and again. " * 12
    rolling = [Instance("loglikelihood_rolling", {}, (text,), 0)]
    full, small = (
        ours(tiny_folder, **options).loglikelihood_rolling(rolling, disable_tqdm=True)[0]
        for options in ({"policy": "full"}, {"policy": "h2o", "window": 16})
    )
    assert full < 0
    assert small < 0
    assert full != pytest.approx(small, rel=3 * LIKELIHOOD)
    asked = [Instance("generate_until", {}, (text, {"until": ["\n\n"], "max_gen_toks": 8}), 0)]
    assert ours(tiny_folder, policy="h2o", window=16).generate_until(asked, disable_tqdm=True)


@EVERY
def test_the_command_of_the_harness_knows_the_model(
    tiny_folder: Path, folder: Path, tmp_path: Path, every: bool
) -> None:
    """As from the command line."""
    arguments = f"pretrained={tiny_folder},policy=h2o,heavy_ratio=0.1,recent_ratio=0.1,dtype=float32"
    command = ["h2o-lm-eval", "--model", "h2o", "--model_args", arguments, "--tasks", "houses"]
    command += ["--device", "cpu", "--include_path", str(folder), "--output_path", str(tmp_path / "out")]
    done = run(*(command if every else ["-c", FEW_TASKS, *command]), timeout=300)
    assert done.returncode == 0, done.stderr
    assert "|houses|" in done.stdout.replace(" ", "")


class TestCommand:
    def test_policies_on_tasks(self, tiny_folder: Path, folder: Path, tmp_path: Path) -> None:
        base = ["tasks", "-m", tiny_folder, "--task-folder", folder, "--tasks", "houses,h2o_facts", "--limit", "3"]
        base += ["--policies", "full,recent", "--out", tmp_path / "out"]
        done = invoke("h2o-compare", *base, "--jsonl", "-")
        assert done.exit_code == 0, done.stderr
        run, *found = records(done.stdout)
        assert run["ratio"] == 0.2
        assert [(record["task"], record["policy"]) for record in found] == [
            ("houses", "full"), ("houses", "recent"), ("h2o_facts", "full"), ("h2o_facts", "recent"),
        ]  # fmt: skip
        assert all(record["documents"] == 3 and 0 <= record["acc"] <= 1 for record in found)
        assert "| full | all |" in (tmp_path / "out" / "tasks.md").read_text()
        compiled = folder / "__pycache__" / "functions.pyc"
        compiled.parent.mkdir()
        compiled.write_bytes(b"written by the first run")
        again = invoke("h2o-compare", *base, "--jsonl", "-", "-q")
        assert records(again.stdout)[1:] == found
        assert len(list((tmp_path / "out" / "parts").iterdir())) == 4, "answers are reused"

    @EVERY
    def test_unknown_tasks(self, tiny_folder: Path, every: bool) -> None:
        done = invoke("h2o-compare", "tasks", "-m", tiny_folder, "--tasks", "no_such_task", "-q")
        assert done.exit_code == 2
        assert "--task-folder brings more" in done.stderr


def test_the_command_without_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it ended in a traceback. Python prints the reason as a line, and exits with 1."""
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit) as left:
        lm_eval_command.main()
    assert "-m pip install -c " in left.value.code
    assert "\n" not in left.value.code


@pytest.mark.parametrize(("arguments", "advice"), [
    ("--tasks houses", "add --model h2o"),
    ("run --tasks houses --model_args pretrained=x", "add --model h2o"),
    ("--model h2o --tasks houses", "add pretrained=NAME to --model_args"),
    ("--model h2o --tasks houses --model_args pretrained=x,window=0", "--window"),
    ("--model=h2o --tasks houses --model_args pretrained=./nothing", "./nothing does not exist"),
])  # fmt: skip
def test_the_command_without_a_model(arguments: str, advice: str, folder: Path, monkeypatch: Any) -> None:
    """Regression: it ended in the harness's traceback."""
    command = ["h2o-lm-eval", *arguments.split(), "--include_path", str(folder)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as left:
        lm_eval_command.main()
    assert isinstance(left.value.code, str)
    assert advice in left.value.code
    assert "\n" not in left.value.code


@pytest.mark.parametrize("arguments", ["ls --help", "--help", "run --help", "-h --tasks houses"])
def test_help_needs_no_model(arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["h2o-lm-eval", *arguments.split()])
    with pytest.raises(SystemExit) as left:
        lm_eval_command.main()
    assert left.value.code == 0


def test_tasks_are_validated_without_a_model(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    command = ["h2o-lm-eval", "validate", "--tasks", "houses", "--include_path", str(folder)]
    monkeypatch.setattr(sys, "argv", command)
    lm_eval_command.main()
    assert "valid" in capsys.readouterr().out
