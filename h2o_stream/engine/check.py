"""Compares a file that is described without torch with the transformers model that is loaded from it, and remembers.

Where both compute different logits or tokens, a text decides which of them is right (`referee`): the model is served
through transformers from then on only if that predicts it clearly better. Differences in what is known of both that
change no logits are noted and have no effect.

A process runs `main` beside a chat (`runtime.checking`), which has the processor first.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from h2o_stream.config import CacheConfig, ModelConfig
from h2o_stream.engine.referee import Reading, clearly_better, step_losses
from h2o_stream.errors import H2OStreamError
from h2o_stream.memory import limit_kernel_caches
from h2o_stream.models.gguf import GgufFile
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.models.packed_folder import COMPARED_FILE, WEIGHTS_FILE
from h2o_stream.models.user_cache import folder_lock
from h2o_stream.native.description import Description, DescriptionError
from h2o_stream.progress import ignore
from h2o_stream.resources import cache_folder
from h2o_stream.runtime.checking import DAMAGED
from h2o_stream.runtime.comparison import difference
from h2o_stream.runtime.known import Known, read_known, save_known
from h2o_stream.runtime.model import RuntimeModel
from h2o_stream.runtime.sources import Checkpoint, ModelFile, Source
from h2o_stream.startup import importing, let_idle_threads_sleep, quieten_libraries

_LOWEST = 19
"""Priority of a process that leaves the processor to others."""

_TEXT = 1024
"""Tokens of the text that is read with both, at most."""

_FIRST_TO_GO = "1000"
"""What tells Linux to end a process before others when memory runs out."""


class DamagedWeightsError(H2OStreamError):
    """Packed weights on disk were not those of the file; they are removed."""


def check(name: str, path: Path, variant: str) -> Known:
    """Compare a file with the transformers model, and remember the result.

    Args:
        name: what the user typed.
        path: of the file or folder.
        variant: see `Source`.

    Raises:
        DamagedWeightsError: its packed weights were damaged; nothing is remembered.
        H2OStreamError: transformers cannot load the file, or cannot serve it with a cache; or memory is short.
    """
    from h2o_stream.cache.identity import model_digest
    from h2o_stream.models.load import load

    dtype, _, quantize = variant.partition(" ")
    as_it_is = "auto" if path.is_file() and GgufFile(path).quantized else "none"
    config = ModelConfig(name, dtype=dtype, device="cpu", offline=True, quantize=quantize or as_it_is)
    try:
        source: Source = Checkpoint(name, path, dtype, quantize) if quantize else ModelFile(name, path, dtype)
        _say("reading it through transformers")
        kept_apart = isinstance(source, ModelFile) and source.kept_apart
        loaded = load(config, source=str(path), from_packed=not (quantize or kept_apart))
        _say("comparing weights")
        if name := _weights_difference(source, loaded.model):
            raise DamagedWeightsError(f"{name} has other weights than the file")
        known = _compared(source, loaded, model_digest(loaded.model))
    except DescriptionError as error:  # it is not served without torch
        raise H2OStreamError(str(error)) from error
    save_known(path, variant, known)
    return known


def _weights_difference(source: Source, model: Any) -> str:
    """The packed weight that is kept and differs from the numbers in the file; or nothing.

    All are removed if one does, and on disk if none does.
    """
    from h2o_stream.models.gguf_model import weights_difference

    folder = source.folder
    if folder is None or not folder.exists() or (folder / COMPARED_FILE).exists():
        return ""
    if isinstance(source, ModelFile) and not source.kept_apart:
        name = weights_difference(source.file, model, model.dtype)
    else:
        name = source.kept_difference()
    if name:
        with folder_lock(folder):
            shutil.rmtree(folder, ignore_errors=True)
        return name
    with (folder / WEIGHTS_FILE).open("rb") as file, suppress(OSError):
        os.fsync(file.fileno())
    (folder / COMPARED_FILE).touch()
    return ""


def _compared(source: Source, loaded: LoadedModel, digest: str) -> Known:
    """What is known of a file after its comparison with a transformers model: tokens, logits and their descriptions.

    Raises:
        DescriptionError: the file cannot be described.
    """
    from h2o_stream.attachment.verification import Verification

    description, tokenizer = source.describe(ignore), source.tokenizer()[0]
    model = source.model(description, (), "", str)
    _say("comparing what both compute")
    described = _description_difference(description, loaded.model)
    found = _tokenizer_difference(tokenizer, loaded.tokenizer)
    if not found:
        verification = Verification(loaded.model, "gap", "auto", ())
        precise = replace(model, description=replace(description, dtype="float32"))
        found = verification.why_not_served(*(lambda config, x=x: x.serve(config).forward for x in (model, precise)))
    if not found:
        return Known(digest, doubt=described)
    reason = f"{described}; {found}" if described else found
    _say("reading a text with both")
    ours = _file_reading(model, tokenizer)
    better = clearly_better(ours, _transformers_reading(loaded, ours))
    if better == "transformers":
        return Known(digest, reason)
    wrong = "transformers reads it wrongly" if better else "a text does not tell which of both is right"
    return Known(digest, doubt=f"{reason}; {wrong}")


def _description_difference(description: Description, model: Any) -> str:
    """Where a description differs from that of a transformers model, or why that has none; or nothing."""
    from h2o_stream.native.describe import describe

    try:
        return difference(description, describe(model))
    except DescriptionError as error:
        return f"transformers' model: {error}"


def _tokenizer_difference(ours: Any, theirs: Any) -> str:
    """Whether two tokenizers may give different tokens, or nothing. Which are called special changes none."""
    rules = []
    for tokenizer in (ours, theirs):
        rule = json.loads(tokenizer.backend_tokenizer.to_str())
        for token in rule["added_tokens"]:
            token.pop("special")
        rules.append(rule)
    names = [name for name in rules[0].keys() | rules[1].keys() if rules[0].get(name) != rules[1].get(name)]
    return f"its tokenizer is another: {', '.join(sorted(names))}" if names else ""


def _file_reading(model: RuntimeModel, tokenizer: Any) -> Reading:
    context = min(_TEXT, model.max_distance - 1)
    served = model.serve(CacheConfig("recent", context, sinks=0, span=0, chunk=1))
    rows = model.description.output.rows
    return Reading(_tokenize(tokenizer), lambda ids: step_losses(served.forward, ids), context, rows)


def _transformers_reading(loaded: LoadedModel, ours: Reading) -> Reading:
    import torch

    @torch.no_grad()
    def losses(ids: list[int]) -> Any:
        logits = loaded.model(torch.tensor([ids[:-1]]), use_cache=False).logits[0]
        return torch.nn.functional.cross_entropy(logits.float(), torch.tensor(ids[1:]), reduction="none").numpy()

    return Reading(_tokenize(loaded.tokenizer), losses, ours.context, ours.vocabulary)


def _tokenize(tokenizer: Any) -> Callable[[str, bool], list[int]]:
    return lambda text, begins: list(tokenizer(text, add_special_tokens=begins)["input_ids"])


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
    lock = cache_folder() / "compared" / "checking.lock"
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
        sys.exit(DAMAGED if isinstance(error, DamagedWeightsError) else 1)
