"""Accuracy on tasks of the lm-evaluation-harness, under each policy. Needs the extra ``eval``."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from h2o_stream.cache.identity import model_digest
from h2o_stream.compare.comparison import Comparison, Job, Notify, told, window_of
from h2o_stream.compare.folder import Part, identity
from h2o_stream.config import CacheConfig, ModelConfig
from h2o_stream.errors import ConfigError, H2OStreamError
from h2o_stream.models.load import LoadedModel, load
from h2o_stream.resources import project_file


class Tasks(Comparison):
    """Every policy on every task.

    Args:
        model: which.
        configs: the policies, ``full`` first; their windows count where there is no ratio.
        tasks: by the harness's names; ours are h2o_facts, h2o_topics and h2o_causes.
        ratio: windows as a part of each context; None for windows in tokens.
        folder: of further tasks, in the harness's form.
        shots: examples before each question; None is what the task says.
        limit: documents of each task; None is all.

    Raises:
        H2OStreamError: the harness is not installed.
    """

    name = "tasks"

    def __init__(
        self,
        model: ModelConfig,
        configs: Sequence[CacheConfig],
        tasks: Sequence[str],
        ratio: float | None,
        folder: Path | None,
        shots: int | None,
        limit: int | None,
    ) -> None:
        require_harness()
        self._model_config, self._configs, self._tasks, self._ratio = model, configs, tasks, ratio
        self._folder, self._shots, self._limit = folder, shots, limit
        self._loaded: LoadedModel
        self._known: Any = None

    def begin(self, notify: Notify) -> dict[str, Any]:
        """Load the model and find the tasks."""
        from lm_eval.tasks import TaskManager

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        self._loaded = load(self._model_config, notify=notify)
        self._known = TaskManager(include_path=[str(folder) for folder in self._folders])
        for task in self._tasks:
            if task not in self._known.all_tasks:
                raise ConfigError(f"task {task!r} is unknown; --tasks takes the harness's, --task-folder brings more")
        return {
            "model": self._loaded.name,
            "identity": model_digest(self._loaded.model),
            "dtype": str(self._loaded.model.dtype).removeprefix("torch."),
            "tasks": list(self._tasks),
            "ratio": self._ratio,
            "shots": self._shots,
            "limit": self._limit,
            "lm_eval": version("lm-eval"),
            **told(self._configs),
        }

    @property
    def _folders(self) -> list[Path]:
        return [folder for folder in (project_file("data/tasks"), self._folder) if folder is not None]

    def jobs(self) -> list[Job]:
        """One for each task and policy."""
        files = hashlib.sha256()
        for path in sorted(path for folder in self._folders for path in folder.rglob("*") if path.is_file()):
            files.update(path.read_bytes())
        return [self._job(task, config, files.hexdigest()) for task in self._tasks for config in self._configs]

    def _job(self, task: str, config: CacheConfig, files: str) -> Job:
        key = {
            "what": self.name,
            "task": task,
            "files": files,
            "ratio": self._ratio,
            "shots": self._shots,
            "limit": self._limit,
            "lm_eval": version("lm-eval"),
            **identity(self._loaded.model, config),
        }
        return Job(f"{task} {config.label}", key, 1, partial(self._answered, task, config))

    def _answered(self, task: str, config: CacheConfig) -> Iterator[Part]:
        from lm_eval import evaluator

        from h2o_stream.compare.harness import H2OLM

        model = H2OLM(self._loaded.model, self._ratio, True, tokenizer=self._loaded.tokenizer, **_given(config))
        evaluator.get_git_commit_hash = lambda: None  # it complains where there is no git repository
        found = evaluator.simple_evaluate(
            model,
            tasks=[task],
            num_fewshot=self._shots,
            limit=self._limit,
            task_manager=self._known,
            bootstrap_iters=0,
        )
        assert found is not None
        measured = {
            name.partition(",")[0]: value
            for name, value in found["results"][task].items()
            if isinstance(value, float) and "stderr" not in name
        }
        yield Part({"metrics": measured, "documents": len(found["samples"][task])})

    def records(self, parts: Iterable[Part]) -> Iterator[dict[str, Any]]:
        """One for each task and policy."""
        of = [(task, config) for task in self._tasks for config in self._configs]
        for (task, config), part in zip(of, parts, strict=True):
            yield {
                "type": self.name,
                "task": task,
                "policy": config.policy,
                "window": None if self._ratio is not None else window_of(config),
                "ratio": None if config.policy == "full" else self._ratio,
                "seed": config.seed,
                "documents": part.figures["documents"],
                **part.figures["metrics"],
            }


def _given(config: CacheConfig) -> dict[str, Any]:
    """What was asked for of a policy, by the names of `H2OLM`."""
    names = {"device": "cache_device"}
    return {names.get(name, name): value for name, value in vars(config).items() if value is not None}


def require_harness() -> None:
    """Find out before the work whether the harness is there.

    Raises:
        H2OStreamError: it is not installed.
    """
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise H2OStreamError("tasks need the lm-evaluation-harness; pip install 'h2o-stream[eval]'") from error
