"""Loads a model and its tokenizer, ready for the engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from h2o_stream.config import CacheConfig, ModelConfig
from h2o_stream.errors import (
    ConfigError,
    ModelNotFoundError,
    OutOfMemoryError,
    UnsupportedModelError,
    means_out_of_memory,
)
from h2o_stream.models.progress import Listener, ignore
from h2o_stream.processes import Processes
from h2o_stream.resources import cache_folder
from h2o_stream.startup import collector_paused


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory.

    Attributes:
        name: what the user called it.
        model: a causal language model of transformers, in evaluation mode.
        tokenizer: its tokenizer, with a chat template.
        stops: strings that end a reply, for models that have no end-of-turn token.
    """

    name: str
    model: Any
    tokenizer: Any
    stops: tuple[str, ...] = ()


def load(
    config: ModelConfig,
    cache: CacheConfig | None = None,
    notify: Callable[[str], None] = lambda line: None,
    progress: Listener = ignore,
) -> LoadedModel:
    """Load what `config` names.

    Args:
        config: name, dtype and device.
        cache: when given, an architecture it cannot serve is refused before any weight is read.
        notify: told one line about anything that takes long.
        progress: told how far it has come; may stop it, see `Listener`.

    Raises:
        ModelNotFoundError: with what to do about it.
        UnsupportedModelError: the architecture cannot be loaded, or not be served with this cache.
        ConfigError: dtype, device or budgets do not fit.
    """
    with collector_paused():
        from h2o_stream.models.find import find

        source = find(config.model, config.offline, notify, progress)
        return _load(config, source, cache, notify, progress)


def _load(
    config: ModelConfig, source: str, cache: CacheConfig | None, notify: Callable[[str], None], progress: Listener
) -> LoadedModel:
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from h2o_stream.cache.support import check_supported
    from h2o_stream.models.hub import download_bars
    from h2o_stream.models.pages import into_large_pages
    from h2o_stream.models.quantize import quantize
    from h2o_stream.models.templates import FALLBACK_STOPS, FALLBACK_TEMPLATE
    from h2o_stream.models.zero import ZeroInference

    disable_progress_bar()  # of reading weights: it takes a second
    device = device_of(config.device)
    local = {"local_files_only": True} if config.offline else {}
    try:
        described = AutoConfig.from_pretrained(source, **local)
        if type(described) not in AutoModelForCausalLM._model_mapping:
            raise UnsupportedModelError(f"{config.model} is a {described.model_type}, not a causal language model")
        if cache is not None:
            model_class = AutoModelForCausalLM._model_mapping[type(described)]
            check_supported(model_class, described, cache)
        tokenizer = AutoTokenizer.from_pretrained(source, **local)
        place = _placed(config)
        if config.tensor_parallel:
            place = _shared(described)
        dtype = dtype_of(config.dtype, device)
        zero = ZeroInference(dtype) if config.zero else None
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, tqdm_class=download_bars(progress), **place, **local
        )
    except (OSError, ValueError, KeyError, SafetensorError, RuntimeError, MemoryError) as error:
        if isinstance(error, ConfigError):
            raise
        if means_out_of_memory(error):
            raise OutOfMemoryError(
                f"{config.model} does not fit into the memory of {device}; take --dtype bfloat16, --quantize int4, "
                "--device-map auto or a smaller --model"
            ) from error
        raise _explained(config.model, source, error) from error
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise UnsupportedModelError(f"{config.model} has no tokenizer of the tokenizers library (tokenizer.json)")
    stops: tuple[str, ...] = ()
    if not tokenizer.chat_template:
        tokenizer.chat_template, stops = FALLBACK_TEMPLATE, FALLBACK_STOPS
    model = zero.take(model) if zero else model if place else model.to(device)
    model.eval()
    if config.quantize != "none":
        quantize(model, config.quantize, notify)
    if not zero and not place:
        into_large_pages(model)
    return LoadedModel(config.model, model, tokenizer, stops)


def _placed(config: ModelConfig) -> dict[str, Any]:
    """Where weights go, as transformers takes it."""
    if not config.device_map:
        return {}
    memory = config.memory_by_device()
    return {
        "device_map": config.device_map,
        "offload_folder": str(cache_folder() / "offload"),
        **({"max_memory": memory} if memory else {}),
    }


def _shared(described: Any) -> dict[str, Any]:
    """How weights are shared among processes, as transformers takes it.

    Raises:
        ConfigError: there is only one process, or the heads cannot be shared out among them.
    """
    from transformers.distributed import DistributedConfig

    count, heads = Processes().count, described.get_text_config().num_key_value_heads
    if count == 1:
        raise ConfigError("--tensor-parallel needs several processes; start them with torchrun --nproc-per-node N")
    if heads % count:
        raise ConfigError(f"{heads} KV heads cannot be shared by {count} processes; give torchrun a divisor")
    return {"distributed_config": DistributedConfig(tp_plan="auto")}


def load_tokenizer(config: ModelConfig, notify: Callable[[str], None] = lambda line: None) -> Any:
    """The tokenizer of what `config` names, without its weights.

    Raises:
        ModelNotFoundError: with what to do about it.
    """
    with collector_paused():
        from transformers import AutoTokenizer

        from h2o_stream.models.find import find

        source = find(config.model, config.offline, notify)
        local = {"local_files_only": True} if config.offline else {}
        try:
            return AutoTokenizer.from_pretrained(source, **local)
        except (OSError, ValueError, KeyError) as error:
            raise _explained(config.model, source, error) from error


def _explained(name: str, source: str, error: Exception) -> Exception:
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if "model type" in reason or "Unrecognized model" in reason or "configuration class" in reason:
        return UnsupportedModelError(f"{name} cannot be served: {reason}")
    return ModelNotFoundError(f"{name} could not be loaded from {source}: {reason}")


def device_of(name: str) -> Any:
    """The torch device of a name; ``auto`` is the best there is.

    Raises:
        ConfigError: it cannot be used here.
    """
    import torch

    if name == "auto":
        own = os.environ.get("LOCAL_RANK", "0")  # of this process among those of a launcher
        name = f"cuda:{own}" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {name!r} cannot be used here: {reason}; try --device cpu") from error
    return device


def dtype_of(name: str, device: Any) -> Any:
    """The torch dtype of a name.

    ``auto`` is bfloat16 where the hardware computes in it, float32 elsewhere: emulated, it is slower than float32.
    """
    import torch

    if name != "auto":
        return getattr(torch, name)
    if device.type != "cpu":
        return torch.bfloat16
    native = any(getattr(torch.cpu, f"_is_{unit}_supported", bool)() for unit in ("avx512_bf16", "amx_tile"))
    return torch.bfloat16 if native else torch.float32
