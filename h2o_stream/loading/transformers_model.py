"""Loads a model of transformers and its tokenizer; the packed weights of GGUF files are those of the runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedTokenizerFast,
)
from transformers.initialization import no_init_weights
from transformers.utils.logging import disable_progress_bar

from h2o_stream.attachment.support import check_supported, with_default_positions
from h2o_stream.base.memory import free_bytes, trim_heap
from h2o_stream.base.progress import ProgressCallback, ignore
from h2o_stream.base.startup import gc_paused
from h2o_stream.cache.arrays import to_tensors
from h2o_stream.cache.identity import FILE_DIGEST
from h2o_stream.cache.rope import ABSOLUTE_TAKEN
from h2o_stream.config import CacheConfig, ModelConfig
from h2o_stream.errors import (
    ConfigError,
    DataError,
    H2OStreamError,
    ModelNotFoundError,
    OutOfMemoryError,
    UnsupportedModelError,
    means_out_of_memory,
)
from h2o_stream.gpu import available
from h2o_stream.loading.hf_config import config_by_transformers, described, hf_config
from h2o_stream.loading.hf_weights import HfWeights, borrowed
from h2o_stream.loading.reading_progress import report_progress
from h2o_stream.models.file_identity import file_digest
from h2o_stream.models.find import find, local_path
from h2o_stream.models.fitting import Precision, choose_precision
from h2o_stream.models.folder_sizes import check_folder
from h2o_stream.models.generation_config import end_token_ids
from h2o_stream.models.gguf import GgufFile
from h2o_stream.models.gguf_pretokenizer import missing_name
from h2o_stream.models.gguf_tokenizer import TOKEN_KEYS, gguf_tokenizer
from h2o_stream.models.hub import download_bars, reachable
from h2o_stream.models.huge_pages import move_to_huge_pages
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.models.other_files import ADAPTER
from h2o_stream.models.packed_experts import SplitExperts, split_stacked_experts
from h2o_stream.models.precision import (
    allowed_dtypes,
    device_map_kwargs,
    device_of,
    dtype_of,
    tensor_parallel_kwargs,
    weight_sizes,
)
from h2o_stream.models.quantize import PackedConfig, pack_model, set_dtype
from h2o_stream.models.templates import with_template
from h2o_stream.native import library
from h2o_stream.native.description import DescriptionError
from h2o_stream.native.pointers import dtype_name
from h2o_stream.runtime.sources import Checkpoint, ModelFile


def load(
    config: ModelConfig,
    cache: CacheConfig | None = None,
    notify: Callable[[str], None] = ignore,
    progress: ProgressCallback = ignore,
    source: str | None = None,
    from_packed: bool = True,
) -> LoadedModel:
    """Load the model that `config` names. With a `cache`, unsupported architectures are refused before weights are
    read. `source` is what `find` has returned, if it was called before. Without `from_packed`, weights are packed
    anew, and what was kept of them is neither used nor replaced.

    `notify` gets one-line messages about slow steps and automatic choices; `progress` may stop loading
    (`ProgressCallback`).

    Raises:
        ModelNotFoundError: not found; the message says what to do.
        UnsupportedModelError: the architecture cannot be loaded, or not used with this cache.
        ConfigError: invalid dtype, device or budgets.
        OutOfMemoryError: there is not enough free memory.
    """
    with gc_paused():
        source = source or find(config.model, config.offline, progress)
        config = _offline_if_unreachable(config, source)
        try:
            return _Loader(config, source, notify, progress, from_packed).load(cache)
        except (H2OStreamError, KeyboardInterrupt):
            raise
        except Exception as error:
            if means_out_of_memory(error):
                raise OutOfMemoryError(
                    f"{config.model} does not fit into the memory of {config.device}; take --quantize int4, "
                    "--device-map auto or a smaller --model"
                ) from error
            raise _load_error(config.model, source, error) from error  # numbers of a config can raise anything


class _Loader:
    """Loads one model from the result of `find`; the other arguments are those of `load`."""

    def __init__(
        self,
        config: ModelConfig,
        source: str,
        notify: Callable[[str], None],
        progress: ProgressCallback,
        from_packed: bool,
    ) -> None:
        disable_progress_bar()  # replaced by our own
        self._from_packed = from_packed
        self._config, self._notify, self._progress = config, notify, progress
        self._file, self._source = _open_source(source, notify), source
        self._local = {"local_files_only": True} if config.offline else {}
        self._bars = {"tqdm_class": download_bars(progress)}
        self._device = device_of(config.device)
        self._described = None if self._file is None else described(config.model, self._file)
        if self._file is None:
            self._hf_config = AutoConfig.from_pretrained(self._source, **self._local)
        elif self._described is None:
            self._hf_config = config_by_transformers(self._file)
        else:
            self._hf_config = hf_config(self._file, self._described.parameters)

    def load(self, cache: CacheConfig | None) -> LoadedModel:
        name, kind = self._config.model, type(self._hf_config)
        if kind not in AutoModelForCausalLM._model_mapping:
            raise UnsupportedModelError(f"{name} is a {self._hf_config.model_type}, not a causal language model")
        self._class = AutoModelForCausalLM._model_mapping[kind]
        if cache is not None:
            check_supported(self._class, self._hf_config, cache)
            if with_default_positions(self._hf_config, cache) != cache:
                self._notify(ABSOLUTE_TAKEN)
        with ThreadPoolExecutor(1) as executor:
            tokenizer_future = executor.submit(self._tokenizer)
            model = self._model().eval()
        tokenizer, stops = tokenizer_future.result()
        trim_heap()
        return LoadedModel(name, model, tokenizer, stops, None if self._file is None else self._file.path)

    def _tokenizer(self) -> tuple[Any, tuple[str, ...]]:
        """The tokenizer with a chat template, and stop strings."""
        tokenizer = _tokenizer(self._file, self._source, self._local)
        if not hasattr(tokenizer, "backend_tokenizer"):
            raise UnsupportedModelError(
                f"{self._config.model} has no tokenizer of the tokenizers library (tokenizer.json)"
            )
        return with_template(tokenizer)

    def _model(self) -> Any:
        config = self._config
        if config.device_map or config.tensor_parallel or self._device.type != "cpu":
            return self._load_to_devices()
        skeleton = self._skeleton()
        if self._file is not None and self._file.quantized and config.quantize == "auto":
            if library.loaded() is not None and self._described is not None:
                return self._load_gguf(self._described, skeleton)
            reason = library.why_not() or "only transformers reads them"
            self._notify(f"The weights of {config.model} are unpacked: {reason}.")
        if self._file is None:
            split_stacked_experts(skeleton)
        quantized = getattr(self._hf_config, "quantization_config", None) is not None
        if quantized and config.quantize not in ("auto", "none"):
            raise ConfigError(f"{config.model} has quantized weights, which --quantize {config.quantize} does not pack")
        precision = choose_precision(
            config.model,
            weight_sizes(skeleton),
            free_bytes(),
            "none" if quantized and config.quantize == "auto" else config.quantize,
            allowed_dtypes(config.dtype),
            can_pack=library.loaded() is not None,
        )
        if precision.reason:
            self._notify(precision.reason)
        if precision.quantize != "none":
            return self._load_packed(precision, skeleton)
        model = self._load_dense(getattr(torch, precision.dtype), skeleton)
        move_to_huge_pages(model)
        if self._file is not None and self._file.quantized:
            return model
        return self._with_digest(model, precision.dtype + ("" if self._file else " none"))

    def _load_to_devices(self) -> Any:
        """Load to a GPU, or across several devices or processes."""
        config, dtype = self._config, dtype_of(self._config.dtype, self._device)
        if config.quantize not in ("auto", "none"):
            raise ConfigError(
                f"--quantize {config.quantize} packs weights for the CPU, but the model is on {self._device}; omit it"
            )
        skeleton = self._skeleton()
        if config.tensor_parallel:
            device_kwargs = tensor_parallel_kwargs(self._hf_config)
        else:
            device_kwargs = device_map_kwargs(config, dtype.itemsize * skeleton.num_parameters())
        in_blocks = not device_kwargs and config.quantize == "auto" and not available.why_not(self._device)
        return self._load_dense(dtype, skeleton, in_blocks, **(device_kwargs or {"device_map": {"": self._device}}))

    def _skeleton(self) -> Any:
        with torch.device("meta"), no_init_weights():
            return self._class(self._hf_config)

    def _load_dense(self, dtype: Any, skeleton: Any, in_blocks: bool = False, **device_kwargs: Any) -> Any:
        with report_progress("reading", skeleton, self._progress):
            if self._described is not None:
                reader = HfWeights(self._described, skeleton, "blocks" if in_blocks else "none")
                weights = reader.lazy(dtype)
                if in_blocks:
                    from h2o_stream.loading.gpu_blocks import keep_blocks

                    if (kept := keep_blocks(weights, reader, skeleton, self._device)) is None:
                        return self._load_dense(dtype, self._skeleton(), **device_kwargs)
                    device_kwargs["quantization_config"] = kept
                return self._with_weights(weights, dtype=dtype, **device_kwargs)
            if self._file is not None:
                name = self._file.path.name
                unpacking = GgufConfig(gguf_file=name, dequantize=True)
                file_options = {"config": self._hf_config, "gguf_file": name, "quantization_config": unpacking}
                model = self._read(self._file.path.parent, dtype=dtype, **file_options, **device_kwargs)
                return self._with_generation(model)
            return self._read(self._source, dtype=dtype, **self._bars, **device_kwargs, **self._local)

    def _load_gguf(self, source: ModelFile, skeleton: Any) -> Any:
        """Load a quantized file: its matrices stay packed."""
        dtype = dtype_of(self._config.dtype, self._device)
        reader, notify = HfWeights(source, skeleton, "auto"), self._notify if self._from_packed else None
        try:
            weights = source.with_weights(lambda kept: reader.packed(kept, dtype), self._progress, notify)
        except DescriptionError as error:
            raise UnsupportedModelError(f"{source.path.name} cannot be served: {error}") from error
        return self._with_digest(self._with_packed(reader, weights, dtype), dtype_name(dtype))

    def _with_packed(self, reader: HfWeights, weights: dict[str, Any], dtype: torch.dtype) -> Any:
        packed = PackedConfig({name: kind.name for name, kind in reader.kinds.items()})
        return self._with_weights(weights, dtype=dtype, quantization_config=packed)

    def _with_digest(self, model: Any, variant: str) -> Any:
        """The model as `runtime.sources` calls it in states."""
        path = local_path(self._source, self._config.offline) if self._file is None else self._file.path
        setattr(model, FILE_DIGEST, file_digest(path, variant))
        return model

    def _load_packed(self, precision: Precision, skeleton: Any) -> Any:
        """Pack weights, or load cached ones."""
        quantize, dtype = precision.quantize, getattr(torch, precision.dtype)
        if self._described is not None:
            reader = HfWeights(self._described, skeleton, quantize)
            return self._with_packed(reader, reader.packed(None, dtype, self._progress), dtype)

        def read() -> Any:
            model = pack_model(self._load_dense("auto", skeleton), quantize, self._progress)
            set_dtype(model, dtype)
            return model

        if self._file is not None:
            return read()
        path = local_path(self._source, self._config.offline)
        splits = any(isinstance(module, SplitExperts) for module in skeleton.modules())
        model = self._load_kept(path, precision) if self._from_packed and not splits else None
        return self._with_digest(model or read(), f"{precision.dtype} {quantize}")

    def _load_kept(self, path: Path, precision: Precision) -> Any:
        """Load what the runtime keeps of a checkpoint, packed now or before; None if it keeps nothing of it."""

        def read(weights: Any) -> Any:
            if weights.kept is None:
                return None
            for entry in weights.entries():
                weights.kept_tiles(entry, weights.kept)
            tiles = {name: borrowed(array) for name, array in weights.kept.items() if name.endswith(".tiles")}
            packed = PackedConfig({name: kind.name for name, (_, kind) in weights.packed.items()})
            state = to_tensors(weights.unpacked()) | tiles
            return self._with_weights(state, dtype=getattr(torch, precision.dtype), quantization_config=packed)

        try:
            source = Checkpoint(self._config.model, path, precision.dtype, precision.quantize)
            return source.with_weights(read, self._progress, self._notify)
        except DescriptionError:
            return None

    def _with_weights(self, weights: dict[str, Any], **kwargs: Any) -> Any:
        return self._with_generation(self._read(None, config=self._hf_config, state_dict=weights, **kwargs))

    def _read(self, source: Any, **kwargs: Any) -> Any:
        """The model with all of its weights; raises DataError for missing ones, which transformers makes at random."""
        model, report = self._class.from_pretrained(source, output_loading_info=True, **kwargs)
        if missing := sorted(report["missing_keys"]):
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            raise DataError(f"{self._config.model} is damaged or incomplete: it has no {missing[0]}{more}")
        if getattr(model, "_hf_peft_config_loaded", False):  # transformers finds them, also on the Hub
            raise UnsupportedModelError(f"{self._config.model} has {ADAPTER}")
        return model

    def _with_generation(self, model: Any) -> Any:
        """The model with the generation config of its source, which is not beside its weights."""
        if self._file is not None:
            bos, pad = (self._file.metadata.get(TOKEN_KEYS[name]) for name in ("bos_token", "pad_token"))
            ends = end_token_ids(self._file)
            model.generation_config = GenerationConfig(bos_token_id=bos, eos_token_id=ends, pad_token_id=pad)
        elif (Path(self._source) / "generation_config.json").exists():
            model.generation_config = GenerationConfig.from_pretrained(self._source)
        return model


def load_tokenizer(config: ModelConfig, notify: Callable[[str], None] = ignore) -> Any:
    """Load the tokenizer that `config` names, without weights; raises ModelNotFoundError that says what to do."""
    with gc_paused():
        source = find(config.model, config.offline)
        config = _offline_if_unreachable(config, source)
        file, local = _open_source(source, notify), {"local_files_only": True} if config.offline else {}
        try:
            return _tokenizer(file, source, local)
        except Exception as error:  # as does the tokenizers library
            raise _load_error(config.model, source, error) from error


def _offline_if_unreachable(config: ModelConfig, source: str) -> ModelConfig:
    """Use only the local cache if `source` is a Hub id and the Hub cannot be reached."""
    return config if config.offline or Path(source).exists() or reachable(source) else replace(config, offline=True)


def _open_source(source: str, notify: Callable[[str], None]) -> GgufFile | None:
    """The GGUF file, if `source` is one; the folder or Hub id of a checkpoint otherwise."""
    path = Path(source)
    if not path.is_file():
        if path.is_dir():
            check_folder(path)
        return None
    file = GgufFile(path)
    if note := missing_name(file):
        notify(note)
    return file


def _tokenizer(file: GgufFile | None, source: str, local: Mapping[str, bool]) -> Any:
    """The tokenizer of a GGUF file or of a checkpoint, of a class of transformers."""
    if file is None:
        return AutoTokenizer.from_pretrained(source, **local)
    read = gguf_tokenizer(file)
    special = dict.fromkeys(TOKEN_KEYS) | read.special_tokens_map
    return PreTrainedTokenizerFast(tokenizer_object=read.backend_tokenizer, chat_template=read.chat_template, **special)


def _load_error(name: str, source: str, error: Exception) -> Exception:
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if "model type" in reason or "Unrecognized model" in reason or "configuration class" in reason:
        return UnsupportedModelError(f"{name} cannot be served: {reason}")
    return ModelNotFoundError(f"{name} could not be loaded from {source}: {reason}")
