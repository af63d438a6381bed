"""Hands the jobs of a comparison to a Ray cluster (extra ``cluster``), which runs them where it has room.

Every node needs this version of h2o_stream, and the model and the texts under the same names. A job whose node dies is
run again elsewhere; Ray decides where, and how often.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import TYPE_CHECKING, Any

from h2o_stream.compare.comparison import Comparison, Job, JobProgress, Notify, OnProgress, run_job
from h2o_stream.compare.folder import Folder, JobResult, digest_of_key
from h2o_stream.compare.pause import Pause
from h2o_stream.errors import DataError, H2OStreamError

if TYPE_CHECKING:
    from h2o_stream.compare.options import ComparisonOptions

_begun: dict[str, Comparison[Any]] = {}
"""The comparison that this process of a node has loaded, by its options."""


def run_on_cluster(
    options: ComparisonOptions, jobs: Sequence[Job], folder: Folder, on_progress: OnProgress, notify: Notify
) -> Iterator[JobResult]:
    """Run what the folder does not have yet on the cluster of `options.ray`. Yields the results in order.

    Every result is stored as soon as it is there. Where a job fails, the others are finished first.

    Raises:
        H2OStreamError: there is no cluster, or a job failed.
    """
    import ray

    with redirect_stdout(StringIO()), _connected(ray, str(options.ray)):  # Ray prints a log when a node dies
        nodes = _alive(ray)
        results: dict[str, JobResult | H2OStreamError] = {}
        waiting: dict[Any, Job] = {}
        task, shared = ray.remote(_run).options(**_resources(nodes)), ray.put(options)
        for job in jobs:
            on_progress(job, JobProgress(0))
            if stored := folder.load(job.key):
                results[digest_of_key(job.key)] = stored
                on_progress(job, JobProgress(job.total))
            else:
                waiting[task.remote(shared, digest_of_key(job.key))] = job
        for job in jobs:
            while digest_of_key(job.key) not in results:
                _collect(ray, waiting, results, folder, on_progress)
            result = results[digest_of_key(job.key)]
            if isinstance(result, H2OStreamError):
                while waiting:
                    _collect(ray, waiting, results, folder, on_progress)
                raise H2OStreamError(f"{job.label}: {result}")
            yield result
        if lost := len(nodes) - len(_alive(ray)):
            notify(f"{lost} of {len(nodes)} nodes died; what they had not finished ran elsewhere")


def _alive(ray: Any) -> list[Mapping[str, float]]:
    """What each node has that runs."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


@contextmanager
def _connected(ray: Any, address: str) -> Iterator[None]:
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise H2OStreamError(
            f"--ray {address} reaches no cluster; start one by ray start --head, and with the address that it prints "
            "ray start on further machines"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _resources(nodes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What a job takes: a GPU where there are some, else all processors of the smallest node."""
    if any(resources.get("GPU") for resources in nodes):
        return {"num_gpus": 1}
    return {"num_cpus": min((resources["CPU"] for resources in nodes if resources.get("CPU")), default=1)}


def _collect(
    ray: Any,
    waiting: dict[Any, Job],
    results: dict[str, JobResult | H2OStreamError],
    folder: Folder,
    on_progress: OnProgress,
) -> None:
    """Wait for the next job."""
    (reference,), _ = ray.wait([*waiting])
    job = waiting.pop(reference)
    try:
        result: JobResult | H2OStreamError = ray.get(reference)
    except ray.exceptions.RayError as error:
        result = H2OStreamError(f"Ray gave it up: {str(error).strip().splitlines()[-1]}")
    results[digest_of_key(job.key)] = result
    if isinstance(result, JobResult):
        folder.store(job.key, result)
        on_progress(job, JobProgress(job.total))


def _run(options: ComparisonOptions, digest: str) -> JobResult | H2OStreamError:
    """Run a job on a node, which keeps the model for the next one."""
    try:
        jobs = {digest_of_key(job.key): job for job in _comparison(options).jobs()}
        if digest not in jobs:
            raise DataError(
                f"the node {platform.node()} has another model, text or version of h2o_stream, or computes in another "
                "--dtype"
            )
        return run_job(Folder(None), _ignore, Pause(), jobs[digest])
    except H2OStreamError as error:
        return error


def _comparison(options: ComparisonOptions) -> Comparison[Any]:
    key = repr(options)
    if key not in _begun:
        for other in _begun.values():
            other.close()
        _begun.clear()
        comparison: Comparison[Any] = options.make()
        comparison.begin(_ignore)
        _begun[key] = comparison
    return _begun[key]


def _ignore(*message: object) -> None:
    """Nobody reads what a node says."""
