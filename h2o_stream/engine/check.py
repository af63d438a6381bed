"""Compares a file that is described without torch with the transformers model that is loaded from it, and remembers.

A process runs `main` beside a chat (`runtime.checking`), which has the processor first.
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from h2o_stream.config import ModelConfig
from h2o_stream.memory import limit_kernel_caches
from h2o_stream.models.gguf import GgufFile
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.models.packed_folder import COMPARED_FILE, WEIGHTS_FILE
from h2o_stream.models.user_cache import folder_lock
from h2o_stream.native.description import DescriptionError
from h2o_stream.progress import ignore
from h2o_stream.resources import cache_folder
from h2o_stream.runtime.comparison import difference, same_weights
from h2o_stream.runtime.known import Known, read_known, save_known
from h2o_stream.runtime.sources import Checkpoint, ModelFile, Source
from h2o_stream.startup import importing, let_idle_threads_sleep, quieten_libraries

_LOWEST = 19
"""Priority of a process that leaves the processor to others."""

_FIRST_TO_GO = "1000"
"""What tells Linux to end a process before others when memory runs out."""


def check(name: str, path: Path, variant: str) -> Known:
    """Compare a file with the transformers model, and remember the result.

    Args:
        name: what the user typed.
        path: of the file or folder.
        variant: see `Source`.

    Raises:
        H2OStreamError: transformers cannot load the file, or cannot serve it with a cache; or memory is short.
    """
    from h2o_stream.cache.identity import model_digest
    from h2o_stream.models.load import load

    dtype, _, quantize = variant.partition(" ")
    as_it_is = "auto" if path.is_file() and GgufFile(path).quantized else "none"
    config = ModelConfig(name, dtype=dtype, device="cpu", offline=True, quantize=quantize or as_it_is)
    source: Checkpoint | ModelFile | None = None
    try:
        source = Checkpoint(name, path, dtype, quantize) if quantize else ModelFile(name, path, dtype)
    except DescriptionError as error:
        reason = str(error)
    _say("reading it through transformers")
    kept_apart = isinstance(source, ModelFile) and source.kept_apart
    loaded = load(config, source=str(path), from_packed=not (quantize or kept_apart))
    if source is not None:
        try:
            _say("comparing weights")
            reason = _weights_difference(source, loaded.model) or _difference(source, loaded)
        except DescriptionError as error:
            reason = str(error)
    known = Known(model_digest(loaded.model), reason)
    save_known(path, variant, known)
    return known


def _weights_difference(source: Source, model: Any) -> str:
    """Where packed weights that were kept without torch differ from those that transformers reads, or nothing.

    They are removed if they do, and on disk if they do not.
    """
    from h2o_stream.models.gguf_model import weights_difference
    from h2o_stream.native.describe import describe

    folder = source.folder
    if folder is None or not folder.exists() or (folder / COMPARED_FILE).exists():
        return ""
    if isinstance(source, ModelFile) and source.kept_apart:
        name = source.kept_difference()
    elif isinstance(source, ModelFile):
        name = weights_difference(source.file, model, model.dtype)
    else:
        ours, theirs = source.describe(ignore), describe(model)
        name = "" if not difference(ours, theirs) and same_weights(ours, theirs) else "the packed folder"
    if name:
        with folder_lock(folder):
            shutil.rmtree(folder, ignore_errors=True)
        return f"{name} has other weights"
    with (folder / WEIGHTS_FILE).open("rb") as file, suppress(OSError):
        os.fsync(file.fileno())
    (folder / COMPARED_FILE).touch()
    return ""


def _difference(source: Source, loaded: LoadedModel) -> str:
    """Where a file differs from the transformers model: its description, its tokenizer, its logits; or nothing.

    Raises:
        DescriptionError: one of both cannot be described.
    """
    from h2o_stream.attachment.verification import Verification
    from h2o_stream.native.describe import describe

    description = source.describe(ignore)
    if reason := difference(description, describe(loaded.model)):
        return reason
    if source.tokenizer()[0].backend_tokenizer.to_str() != loaded.tokenizer.backend_tokenizer.to_str():
        return "its tokenizer is another"
    _say("comparing what both compute")
    model = source.model(description, (), "", str)
    verification = Verification(loaded.model, "gap", "auto", ())
    return verification.why_not_served(lambda config: model.serve(config).forward)


def _say(stage: str) -> None:
    """Tell `BackgroundCheck` what is done now."""
    sys.stdout.write(f"{stage}\n")
    sys.stdout.flush()


def main() -> None:
    """Entry point: NAME PATH VARIANT. Each stage is written as a line, as is why nothing could be compared."""
    name, path, variant = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    elif hasattr(os, "nice"):
        os.nice(_LOWEST)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO)
    limit_kernel_caches()
    let_idle_threads_sleep()
    quieten_libraries(progress=False)
    lock = cache_folder() / "described" / "checking.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            if read_known(path, variant) is None:
                _say("importing transformers")
                with importing():
                    import h2o_stream.attachment.verification
                    import h2o_stream.models.load  # noqa: F401
                check(name, path, variant)
    except Exception as error:  # noqa: BLE001
        _say(" ".join(str(error).split()) or type(error).__name__)
        sys.exit(1)
