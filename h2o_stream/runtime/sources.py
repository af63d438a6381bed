"""What a model is described from without torch: a GGUF file, or the folder of a checkpoint."""

from __future__ import annotations

import math
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from h2o_stream.base.measurements import LONG_S
from h2o_stream.base.memory import format_bytes, free_bytes
from h2o_stream.base.progress import ProgressCallback, ignore
from h2o_stream.errors import OutOfMemoryError
from h2o_stream.models.file_identity import file_digest
from h2o_stream.models.file_tokenizers import file_tokenizer
from h2o_stream.models.fitting import DEFAULT_SHARE, Precision, WeightSizes, choose_precision, item_size
from h2o_stream.models.folder_sizes import check_folder
from h2o_stream.models.generation_config import read_generation_config
from h2o_stream.models.gguf import GgufFile
from h2o_stream.models.packed_cache import MIN_BYTES, MIN_GGUF_BYTES, WEIGHTS_FILE, folder_lock, packed_folder
from h2o_stream.models.templates import with_template
from h2o_stream.models.tokenizer import FileTokenizer, read_object
from h2o_stream.native.description import Description, DescriptionError
from h2o_stream.native.matrix import require
from h2o_stream.runtime.checkpoint_packing import KINDS, PackedCheckpoint, packed_size
from h2o_stream.runtime.config_parameters import parameters_of_config
from h2o_stream.runtime.describe import describe_file
from h2o_stream.runtime.families import ARCHITECTURES
from h2o_stream.runtime.families.architecture import Architecture
from h2o_stream.runtime.gguf_parameters import parameters_of_gguf
from h2o_stream.runtime.gguf_weights import GgufWeights
from h2o_stream.runtime.heads import measured_windows
from h2o_stream.runtime.measured import Windows, read_windows, save_windows, shipped_digest
from h2o_stream.runtime.model import RuntimeModel
from h2o_stream.runtime.packed_file import PackedWeights, packed_difference, write_packed
from h2o_stream.runtime.parameters import Parameters
from h2o_stream.runtime.safetensors_files import mapped_tensors
from h2o_stream.runtime.weights import CheckpointWeights, Weights

T = TypeVar("T")


class Source(ABC):
    """A file or folder that may be described without torch.

    Args:
        name: what the user typed.
        dtype: dtype of vectors, keys and values.
        quantize: how matrices are packed, as `ModelConfig` has it.
        variant: the dtype and what else distinguishes ways to load it, for what is kept of it.
        parameters: what the header or the config says of the model.
        generation: how it is recommended to sample.
        folder: where its packed weights are kept; None if they are not.
    """

    _kept_as: str

    def __init__(
        self,
        name: str,
        path: Path,
        dtype: str,
        quantize: str,
        variant: str,
        architecture: Architecture,
        parameters: Parameters,
        generation: Any,
        folder: Path | None,
    ) -> None:
        self.name, self.path, self.dtype, self.quantize, self.variant = name, path, dtype, quantize, variant
        self.architecture, self.parameters = architecture, parameters
        self.generation, self.folder = generation, folder

    def describe(self, progress: ProgressCallback, notify: Callable[[str], None] | None = None) -> Description:
        """Describe the model; its weights come from where they were packed before, or else from the file.

        `notify` gets a line when the packed weights of a large file are kept for the next start; None to keep none.

        Raises:
            DescriptionError: weights are missing or cannot be packed.
            OutOfMemoryError: there is no memory for them.
        """

        def described(weights: Weights) -> Description:
            return describe_file(self.architecture, self.parameters, weights, self.dtype)

        description = self.with_weights(described, progress, notify)
        layers = zip(description.layers, self.parameters.windows, strict=True)
        require(any(layer.attention and window is None for layer, window in layers), "no layer attends to all tokens")
        return description

    def with_weights(
        self, make: Callable[[Any], T], progress: ProgressCallback, notify: Callable[[str], None] | None
    ) -> T:
        """What `make` makes of the weights: packed ones that are damaged are packed anew, if they may be kept.

        Other arguments and errors as for `describe`.
        """
        folder = self.folder
        was_there = folder is not None and folder.exists()
        try:
            return make(self._weights(progress, notify))
        except DescriptionError as error:
            if notify is None or folder is None or not was_there:
                raise
            notify(f"The packed weights in {folder} are damaged and will be recreated: {error}")
            with folder_lock(folder):
                shutil.rmtree(folder, ignore_errors=True)
        return make(self._weights(progress, notify))

    def _weights(self, progress: ProgressCallback, notify: Callable[[str], None] | None) -> Weights:
        """Its weights. Arguments and errors as for `describe`."""
        weights, folder = self._opened(progress), self.folder
        if folder is None or isinstance(weights, CheckpointWeights):
            return weights
        if notify is not None and not folder.exists():
            metadata = {"model": self.name, "quantize": self._kept_as, "source": str(self.path.absolute())}
            write_packed(weights.entries(), metadata, folder, notify)
        if folder.exists():
            weights.kept = mapped_tensors(folder / WEIGHTS_FILE)
        return weights

    @abstractmethod
    def _opened(self, progress: ProgressCallback) -> PackedWeights | CheckpointWeights:
        """Its weights, of which nothing was packed before; errors as for `describe`."""

    def packed_difference(self) -> str:
        """The first matrix in the folder that is not, bit by bit, that of the file; or nothing."""
        weights = self._opened(ignore)
        if self.folder is None or isinstance(weights, CheckpointWeights):
            return ""
        return packed_difference(weights.entries(), self.folder)

    def model(
        self, description: Description, windows: Windows = (), is_called: Callable[[str], bool] = lambda digest: False
    ) -> RuntimeModel:
        """The described model; the rest as in `RuntimeModel`."""
        parameters = self.parameters
        return RuntimeModel(
            description,
            windows,
            shipped_digest(self.path, self.variant) or file_digest(self.path, self.variant),
            is_called,
            parameters.context,
            parameters.max_distance,
            parameters.windows,
            self.generation,
            parameters.refused_positions,
        )

    def windows(self, description: Description, progress: ProgressCallback) -> Windows:
        """The windows of the heads by what they attend to, measured if that was not done before."""
        if windows := read_windows(self.path, self.variant):
            return windows
        begun = time.perf_counter()
        measured = measured_windows(description, self.parameters.windows, self.parameters.context, progress)
        if time.perf_counter() - begun > LONG_S:
            save_windows(self.path, self.variant, measured)
        return measured

    @abstractmethod
    def tokenizer(self) -> tuple[FileTokenizer, tuple[str, ...]]:
        """The tokenizer, with a chat template, and strings that end a reply.

        Raises:
            DescriptionError: only transformers can tell what it is.
        """


class ModelFile(Source):
    """A GGUF file; arguments as for `Source`.

    Raises:
        DescriptionError: its architecture or a parameter is not known here.
        ModelNotFoundError, UnsupportedModelError: see `GgufFile`.
    """

    def __init__(self, name: str, path: Path, dtype: str) -> None:
        self.file = GgufFile(path)
        parameters = parameters_of_gguf(self.file)
        architecture, generation = ARCHITECTURES[self.file.architecture], read_generation_config(self.file)
        kept_as = "gguf-runtime" if architecture.stored_as_in_gguf else "gguf"
        kept = self.file.quantized and self.file.nbytes >= MIN_GGUF_BYTES
        folder = packed_folder(name, path, kept_as) if kept else None
        quantize = "auto" if self.file.quantized else "none"
        super().__init__(name, path, dtype, quantize, dtype, architecture, parameters, generation, folder)
        self._kept_as = kept_as

    def _opened(self, progress: ProgressCallback) -> GgufWeights:
        """See `Source`."""
        weights = GgufWeights(self.file, self.architecture, self.parameters, self.dtype, progress)
        _check_fits(self.name, weights.num_dense, self.dtype)
        return weights

    def tokenizer(self) -> tuple[FileTokenizer, tuple[str, ...]]:
        """See `Source`."""
        return with_template(file_tokenizer(self.file))


class Checkpoint(Source):
    """The folder of a transformers checkpoint; arguments as for `Source`.

    For ``auto`` the widest precision that fits into memory is taken; `notify` gets a line about a choice that may
    surprise.

    Raises:
        DescriptionError: its type or a parameter is not known here, or only transformers can tell what to load.
        ModelNotFoundError: a file is damaged.
        OutOfMemoryError: no allowed precision fits.
    """

    def __init__(
        self, name: str, path: Path, dtype: str, quantize: str, notify: Callable[[str], None] = ignore
    ) -> None:
        check_folder(path)
        config = read_object(path / "config.json")
        architecture, parameters = parameters_of_config(config)
        require(not architecture.only_modules, f"{config.get('model_type')} needs a cache of transformers")
        self._dense = CheckpointWeights(path, architecture, parameters, dtype)
        precision = self._precision(name, quantize, dtype)
        if precision.reason:
            notify(precision.reason)
        quantize = precision.quantize
        packs = quantize != "none" and PackedCheckpoint(self._dense, quantize, ignore).nbytes >= MIN_BYTES
        folder = packed_folder(name, path, quantize) if packs else None
        generation = read_generation_config(path)
        variant = f"{dtype} {quantize}"
        super().__init__(name, path, dtype, quantize, variant, architecture, parameters, generation, folder)
        self._kept_as = quantize

    def _precision(self, name: str, quantize: str, dtype: str) -> Precision:
        weights = self._dense
        int8, int4 = (packed_size(weights, each, item_size(dtype)) for each in KINDS)
        largest = max((math.prod(matrix.shape) for matrix in weights.matrices()), default=0)
        sizes = WeightSizes(4 * weights.num_weights, int8, int4, 2 * largest)
        return choose_precision(name, sizes, free_bytes(), quantize, (dtype,))

    def _opened(self, progress: ProgressCallback) -> PackedCheckpoint | CheckpointWeights:
        """See `Source`."""
        return self._dense if self.quantize == "none" else PackedCheckpoint(self._dense, self.quantize, progress)

    def tokenizer(self) -> tuple[FileTokenizer, tuple[str, ...]]:
        """See `Source`."""
        tokenizer = file_tokenizer(self.path)
        if tokenizer is None:
            raise DescriptionError("only transformers can tell what its tokenizer is")
        return with_template(tokenizer)


def _check_fits(name: str, num_weights: int, dtype: str) -> None:
    """Raises OutOfMemoryError if so many weights that are not packed may have to be."""
    needed, free = num_weights * item_size(dtype), free_bytes()
    if needed > DEFAULT_SHARE * free:
        raise OutOfMemoryError(
            f"the dense weights of {name} take {format_bytes(needed)}, {format_bytes(free)} of memory are free"
        )
