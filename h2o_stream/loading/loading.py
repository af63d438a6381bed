"""Loads models: without torch what the table of architectures describes, through transformers the rest."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from h2o_stream.base.progress import ProgressCallback
from h2o_stream.base.startup import gc_paused
from h2o_stream.config import CacheConfig, EngineChoice, ModelConfig
from h2o_stream.errors import H2OStreamError, OutOfMemoryError
from h2o_stream.models.file_identity import file_digest
from h2o_stream.models.find import find, local_path
from h2o_stream.models.gguf_pretokenizer import missing_name
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.models.modelfile import with_modelfile
from h2o_stream.native import library
from h2o_stream.native.description import DescriptionError
from h2o_stream.runtime.model import RuntimeModel, measures_heads, why_not_served
from h2o_stream.runtime.sources import Checkpoint, ModelFile, Source

_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dri/renderD128")
"""Devices for which torch may compute elsewhere than on the CPU."""


def load_model(
    config: ModelConfig,
    cache: CacheConfig,
    engine: EngineChoice,
    notify: Callable[[str], None],
    progress: ProgressCallback,
) -> LoadedModel:
    """Load the model that `config` names, for this cache and engine: without torch if that is possible.

    Other arguments and errors as for `loading.transformers_model.load`, which does it otherwise.
    """
    source = find(config.model, config.offline, progress)
    try:
        loaded = load_without_torch(config, cache, engine, notify, progress, source)
    except (DescriptionError, OutOfMemoryError) as reason:
        from h2o_stream.loading.transformers_model import load

        loaded = replace(load(config, cache, notify, progress, source), why_transformers=str(reason))
    return with_modelfile(loaded, notify)


def load_without_torch(
    config: ModelConfig,
    cache: CacheConfig,
    engine: EngineChoice,
    notify: Callable[[str], None],
    progress: ProgressCallback,
    source: str | None = None,
) -> LoadedModel:
    """Load a model without torch. Arguments as for `loading.transformers_model.load`.

    Raises:
        DescriptionError: that is not possible; the message says why.
        OutOfMemoryError: its weights do not fit as they are read here.
    """
    if reason := _why_not(config, engine):
        raise DescriptionError(reason)
    path = local_path(source or find(config.model, config.offline, progress), config.offline)
    opened = open_source(config, path, notify)
    parameters = opened.parameters
    if reason := why_not_served(cache, parameters.max_distance, parameters.refused_positions):
        raise DescriptionError(reason)
    with gc_paused(), ThreadPoolExecutor(1) as executor:
        tokenizer = executor.submit(opened.tokenizer)
        description = opened.describe(progress, notify)
        windows = opened.windows(description, progress) if measures_heads(cache, parameters.max_distance) else ()
        ready = tokenizer.result()
    if isinstance(opened, ModelFile) and (note := missing_name(opened.file)):
        notify(note)
    model = opened.model(description, windows, partial(_is_called, opened))
    return LoadedModel(config.model, model, *ready, path)


def serves(loaded: LoadedModel, cache: CacheConfig) -> bool:
    """Whether a loaded model can be served with another cache, too; one without torch may not."""
    model = loaded.model
    if not isinstance(model, RuntimeModel):
        return True
    unmeasured = not model.windows and measures_heads(cache, model.max_distance)
    return not unmeasured and not why_not_served(cache, model.max_distance, model.refused_positions)


def open_source(config: ModelConfig, path: Path, notify: Callable[[str], None]) -> Source:
    """What a model in a file or folder is described from. `notify` and errors: see `ModelFile` and `Checkpoint`."""
    dtype = _dtype(config.dtype)
    if path.is_file():
        source = ModelFile(config.model, path, dtype)
        if config.quantize not in (("auto",) if source.file.quantized else ("auto", "none")):
            raise DescriptionError("its file is packed in another way, or not at all")
        return source
    return Checkpoint(config.model, path, dtype, config.quantize, notify)


def _is_called(source: Source, digest: str) -> bool:
    """Whether states of a model may have another digest; that of transformers' model takes long."""
    if digest.startswith("file "):
        return digest == file_digest(source.path, source.variant)
    config = ModelConfig(source.name, dtype=source.dtype, device="cpu", offline=True, quantize=source.quantize)
    with suppress(H2OStreamError, ImportError):  # without torch, or memory for it
        from h2o_stream.cache.identity import model_digest
        from h2o_stream.loading.transformers_model import load

        return digest == model_digest(load(config, source=str(source.path)).model)
    return False


def _why_not(config: ModelConfig, engine: EngineChoice) -> str:
    """Why a model needs torch, as far as settings and machine say, or nothing."""
    if engine == "eager" or os.environ.get(library.CHECK_VARIABLE):
        return "steps are computed in torch, too"
    if config.device_map or config.tensor_parallel:
        return "it is spread over devices or processes"
    if config.device not in ("auto", "cpu") or (config.device == "auto" and any(map(os.path.exists, _GPUS))):
        return "it computes on another device than the CPU"
    return library.why_not()


def _dtype(name: str) -> str:
    """The dtype of vectors, keys and values for a name, as `models.precision.allowed_dtypes` chooses it."""
    if name == "auto":
        return "bfloat16" if library.multiplies_bfloat16() else "float32"
    if name not in ("float32", "bfloat16"):
        raise DescriptionError(f"{name} is computed in torch")
    return name
