"""Chooses device, dtype and distribution of a model, before any weight is read."""

from __future__ import annotations

import os
from typing import Any

import torch

from h2o_stream.base.processes import Processes
from h2o_stream.base.resources import cache_folder
from h2o_stream.config import ModelConfig
from h2o_stream.errors import ConfigError
from h2o_stream.models.fitting import WeightSizes


def weight_sizes(model: Any) -> WeightSizes:
    """Sizes of a model, which may be on the meta device; experts are stacked before they are packed."""
    from h2o_stream.models.packed_experts import SplitExperts
    from h2o_stream.models.quantize import packed_bytes

    numels = [weight.numel() for weight in model.parameters()]
    split = [module for module in model.modules() if isinstance(module, SplitExperts)]
    stacked = sum(weight.numel() for experts in split for weight in experts.parameters())
    int8, int4 = (packed_bytes(model, quantize) for quantize in ("int8", "int4"))
    return WeightSizes(4 * sum(numels), int8, int4, 2 * max(stacked, *numels))


def device_of(name: str) -> torch.device:
    """The torch device for a name; ``auto`` is CUDA's or the CPU. Raises ConfigError if it is not available."""
    if name == "auto":
        rank = os.environ.get("LOCAL_RANK", "0")  # set by launchers of several processes
        name = f"cuda:{rank}" if torch.cuda.is_available() else "cpu"  # not a Mac's GPU: kernels are faster
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {name!r} cannot be used here: {reason}; try --device cpu") from error
    return device


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """The torch dtype for a name.

    ``auto`` is bfloat16 if the hardware supports it, otherwise float32, because emulation is slower than float32.
    """
    if name == "auto" and device.type != "cpu":
        return torch.bfloat16
    dtype: torch.dtype = getattr(torch, allowed_dtypes(name)[0])
    return dtype


def allowed_dtypes(name: str) -> tuple[str, ...]:
    """The names of the dtypes that a name allows on a CPU, best first."""
    if name != "auto":
        return (name,)
    native = any(getattr(torch.cpu, f"_is_{unit}_supported", bool)() for unit in ("avx512_bf16", "amx_tile"))
    return ("bfloat16",) if native else ("float32", "bfloat16")


def device_map_kwargs(config: ModelConfig, weight_bytes: int) -> dict[str, Any]:
    """Arguments of `from_pretrained` for a device map; percentages are of `weight_bytes`."""
    if not config.device_map:
        return {}
    memory = {name: _size(size, weight_bytes) for name, size in (config.memory_by_device() or {}).items()}
    return {
        "device_map": config.device_map,
        "offload_folder": str(cache_folder() / "offload"),
        **({"max_memory": memory} if memory else {}),
    }


def _size(size: str, weight_bytes: int) -> int | str:
    """A maximum as accelerate takes it."""
    return round(weight_bytes * float(size[:-1]) / 100) if size.endswith("%") else size


def tensor_parallel_kwargs(config: Any) -> dict[str, Any]:
    """Arguments of `from_pretrained` for tensor parallelism.

    Raises:
        ConfigError: there is only one process, or the KV heads cannot be divided among them.
    """
    from transformers.distributed import DistributedConfig

    count, heads = Processes().count, config.get_text_config().num_key_value_heads
    if count == 1:
        raise ConfigError("--tensor-parallel needs several processes; start them with torchrun --nproc-per-node N")
    if heads % count:
        raise ConfigError(f"{heads} KV heads cannot be divided among {count} processes; choose a divisor")
    return {"distributed_config": DistributedConfig(tp_plan="auto")}
