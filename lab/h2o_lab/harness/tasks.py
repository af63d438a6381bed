"""Accuracy on tasks of the lm-evaluation-harness, under each policy. Needs the extra ``eval``."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from h2o_lab.harness.options import TasksOptions
from h2o_stream.base.resources import version_of
from h2o_stream.compare.comparison import Comparison, Job, Notify, window_of
from h2o_stream.compare.folder import JobResult
from h2o_stream.compare.models import dtype_of
from h2o_stream.config import CacheConfig
from h2o_stream.errors import ConfigError
from h2o_stream.runtime.model import RuntimeModel


class Tasks(Comparison[TasksOptions]):
    """Every policy on every task."""

    name = "tasks"
    native = True

    def __init__(self, options: TasksOptions) -> None:
        super().__init__(options)
        self._ratio = None if options.windows else options.ratio
        self._settings: dict[str, Any] = {"ratio": self._ratio, "shots": options.shots, "limit": options.limit}
        self._settings["lm_eval"] = version_of("lm-eval")
        self._task_manager: Any = None

    def begin(self, notify: Notify) -> dict[str, Any]:
        """Load the model and find the tasks."""
        from lm_eval.tasks import TaskManager

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        settings = self.load_model(notify)
        self._task_manager = TaskManager(include_path=[str(folder) for folder in self._folders])
        for task in self.options.chosen_tasks:
            if task not in self._task_manager.all_tasks:
                raise ConfigError(f"task {task!r} is unknown; --tasks takes the harness's, --task-folder brings more")
        return {
            **settings,
            "dtype": dtype_of(self.model),
            "tasks": list(self.options.chosen_tasks),
            **self._settings,
        }

    @property
    def _folders(self) -> list[Path]:
        more = self.options.task_folder
        return [Path(__file__).with_name("small_tasks"), *([more] if more is not None else [])]

    def jobs(self) -> list[Job]:
        """One for each task and policy."""
        files = hashlib.sha256()
        for path in sorted(path for folder in self._folders for path in folder.rglob("*") if path.is_file()):
            if path.parent.name != "__pycache__":  # which the harness writes
                files.update(path.read_bytes())
        settings = {"files": files.hexdigest(), **self._settings}
        return [
            Job(
                f"{task} {config.label}",
                self.key(config, task=task, **settings),
                1,
                partial(self._evaluate, task, config),
                config,
            )
            for task in self.options.chosen_tasks
            for config in self.configs
        ]

    def _evaluate(self, task: str, config: CacheConfig) -> Iterator[JobResult]:
        from lm_eval import evaluator

        model = self._model_under(config)
        evaluator.get_git_commit_hash = lambda: None  # it logs an error outside a git repository
        results = evaluator.simple_evaluate(
            model,
            tasks=[task],
            num_fewshot=self.options.shots,
            limit=self.options.limit,
            task_manager=self._task_manager,
            bootstrap_iters=0,
        )
        assert results is not None
        metrics = {
            name.partition(",")[0]: value
            for name, value in results["results"][task].items()
            if isinstance(value, float) and "stderr" not in name
        }
        yield JobResult({"metrics": metrics, "documents": len(results["samples"][task])})

    def _model_under(self, config: CacheConfig) -> Any:
        """The harness's model under a policy; a context is one chunk."""
        model, served = self.model_for(config)
        if isinstance(model, RuntimeModel):
            from h2o_lab.harness.served import ServedLM

            return ServedLM(model, self.tokenizer, served, None if config.policy == "full" else self._ratio)
        from h2o_lab.harness.model import H2OLM

        steps = self.options.engine
        return H2OLM(model, self._ratio, True, steps=steps, tokenizer=self.tokenizer, **_harness_arguments(config))

    def records(self, results: Iterable[JobResult]) -> Iterator[dict[str, Any]]:
        """One for each task and policy."""
        pairs = [(task, config) for task in self.options.chosen_tasks for config in self.configs]
        for (task, config), result in zip(pairs, results, strict=True):
            yield {
                "type": self.name,
                "task": task,
                "policy": config.policy,
                "window": None if self._ratio is not None else window_of(config),
                "ratio": None if config.policy == "full" else self._ratio,
                "seed": config.seed,
                "documents": result.figures["documents"],
                **result.figures["metrics"],
            }


def _harness_arguments(config: CacheConfig) -> dict[str, Any]:
    names = {"device": "cache_device"}
    return {names.get(name, name): value for name, value in vars(config).items() if value is not None}
