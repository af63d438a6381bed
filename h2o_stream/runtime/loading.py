"""Loads models: without torch where that is known to be right, through transformers otherwise."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from h2o_stream.config import CacheConfig, EngineChoice, ModelConfig
from h2o_stream.errors import H2OStreamError
from h2o_stream.models.file_tokenizers import file_tokenizer
from h2o_stream.models.find import find
from h2o_stream.models.generation_config import read_generation_config
from h2o_stream.models.gguf import GgufFile
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.models.packed_folder import MIN_GGUF_BYTES, packed_folder
from h2o_stream.models.templates import with_template
from h2o_stream.models.tokenizer import FileTokenizer
from h2o_stream.native import library
from h2o_stream.native.description import Description, DescriptionError
from h2o_stream.processes import Processes
from h2o_stream.progress import ProgressCallback, ignore
from h2o_stream.runtime.architectures import ARCHITECTURES
from h2o_stream.runtime.comparison import difference
from h2o_stream.runtime.describe import describe_file
from h2o_stream.runtime.known import Known, read_known, save_known
from h2o_stream.runtime.model import RuntimeModel, why_not_served
from h2o_stream.runtime.parameters import parameters_of_gguf
from h2o_stream.runtime.slots import NUMBERS
from h2o_stream.runtime.weights import FolderWeights, GgufWeights, Weights
from h2o_stream.startup import gc_paused

_log = logging.getLogger(__name__)

_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dri/renderD128")
"""Devices for which torch may compute elsewhere than on the CPU."""


def load_model(
    config: ModelConfig,
    cache: CacheConfig,
    engine: EngineChoice,
    notify: Callable[[str], None],
    progress: ProgressCallback,
) -> LoadedModel:
    """Load the model that `config` names, for this cache and engine: without torch if that is known to be right.

    Other arguments and errors as for `models.load.load`, which does it otherwise.
    """
    source = find(config.model, config.offline, progress)
    try:
        return _load_without_torch(config, cache, engine, Path(source), progress)
    except DescriptionError as reason:
        from h2o_stream.models.load import load

        return replace(load(config, cache, notify, progress, source), why_transformers=str(reason))


def _load_without_torch(
    config: ModelConfig, cache: CacheConfig, engine: EngineChoice, path: Path, progress: ProgressCallback
) -> LoadedModel:
    """Load a model without torch.

    Raises:
        DescriptionError: that is not possible; the message says why.
    """
    if reason := _why_not(config, engine, path):
        raise DescriptionError(reason)
    source = ModelFile(config.model, path, _dtype(config.dtype))
    known = read_known(path, source.dtype)
    if known is None:
        raise DescriptionError("its file was not compared with them before")
    parameters = source.parameters
    if reason := why_not_served(cache, parameters.max_distance, known.windows, parameters.refused_positions):
        raise DescriptionError(reason)
    with gc_paused(), ThreadPoolExecutor(1) as executor:
        tokenizer = executor.submit(source.tokenizer)
        description = source.describe(progress)
        model = RuntimeModel(
            description,
            known.windows,
            known.digest,
            parameters.context,
            parameters.max_distance,
            parameters.windows,
            source.generation,
            parameters.refused_positions,
        )
        return LoadedModel(config.model, model, *tokenizer.result(), path)


def serves(loaded: LoadedModel, cache: CacheConfig) -> bool:
    """Whether a loaded model can be served with another cache, too; one without torch may not."""
    model = loaded.model
    return not (
        isinstance(model, RuntimeModel)
        and why_not_served(cache, model.max_distance, model.windows, model.refused_positions)
    )


class ModelFile:
    """A GGUF file that may be described without torch.

    Args:
        name: what the user typed.
        path: of the file.
        dtype: of vectors, keys and values.

    Raises:
        DescriptionError: its architecture or a parameter is not known here.
        ModelNotFoundError, UnsupportedModelError: see `GgufFile`.
    """

    def __init__(self, name: str, path: Path, dtype: str) -> None:
        self.dtype, self._file = dtype, GgufFile(path)
        self.parameters = parameters_of_gguf(self._file)
        self._architecture = ARCHITECTURES[self._file.architecture]
        self.generation = read_generation_config(self._file)
        self._folder = packed_folder(name, path, "gguf") if self._file.nbytes >= MIN_GGUF_BYTES else None

    def describe(self, progress: ProgressCallback) -> Description:
        """Describe the model; its weights come from the file or, if they were packed before, from there.

        Raises:
            DescriptionError: weights are missing or cannot be packed; or there is no memory for them.
        """
        return describe_file(self._architecture, self.parameters, self._weights(progress), self.dtype)

    def _weights(self, progress: ProgressCallback) -> Weights:
        if self._folder is None:
            return GgufWeights(self._file, self._architecture, self.parameters, self.dtype, progress)
        try:
            config = json.loads((self._folder / "config.json").read_text(encoding="utf-8"))
            kinds = config["quantization_config"]["modules"]
            return FolderWeights(self._folder, kinds, self._architecture)
        except (OSError, ValueError, KeyError) as error:
            raise DescriptionError(f"its packed weights are not in {self._folder}") from error

    def tokenizer(self) -> tuple[FileTokenizer, tuple[str, ...]]:
        """The tokenizer, with a chat template, and strings that end a reply."""
        return with_template(file_tokenizer(self._file, ignore))


def remember(loaded: LoadedModel, served: Any) -> None:
    """Compare a model that transformers has loaded with its file, so that later starts need no torch.

    Nothing happens where that is not possible, or where native steps do not run.

    Args:
        loaded: the model.
        served: the same with a cache, see `engine.served.Served`.
    """
    native = getattr(served, "native_model", None)
    if loaded.file is None or native is None or read_known(loaded.file, served.dtype):
        return
    try:
        source = ModelFile(loaded.name, loaded.file, served.dtype)
        reason = difference(source.describe(ignore), native.description)
        tokens = source.tokenizer()[0].backend_tokenizer.to_str()
    except (H2OStreamError, DescriptionError) as error:
        reason = str(error)
    if reason or tokens != loaded.tokenizer.backend_tokenizer.to_str():
        _log.info("%s needs torch: %s", loaded.file, reason or "its tokenizer differs")
        return
    cache = served.cache
    windows = tuple(spec.windows for spec in cache.specs) if cache.plan.budgets == "measured" else ()
    save_known(loaded.file, served.dtype, Known(cache.model_digest(), windows))


def _why_not(config: ModelConfig, engine: EngineChoice, path: Path) -> str:
    """Why a model needs torch, as far as settings and machine say, or nothing."""
    if engine == "eager" or os.environ.get(library.CHECK_VARIABLE):
        return "steps are computed in torch, too"
    if config.device_map or config.tensor_parallel or Processes().count > 1:
        return "it is spread over devices or processes"
    if config.device not in ("auto", "cpu") or (config.device == "auto" and _has_gpu()):
        return "it computes on another device than the CPU"
    if config.quantize != "auto" or not path.is_file():
        return "its weights are packed from a checkpoint, or not at all"
    return library.why_not()


def _has_gpu() -> bool:
    return any(map(os.path.exists, _GPUS)) or sys.platform == "darwin"


def _dtype(name: str) -> str:
    """The dtype of vectors, keys and values for a name, as `models.precision.allowed_dtypes` chooses it."""
    if name == "auto":
        return "bfloat16" if library.multiplies_bfloat16() else "float32"
    if name not in NUMBERS:
        raise DescriptionError(f"{name} is computed in torch")
    return name
