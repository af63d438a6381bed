"""Where a model goes: its device, its dtype, and how it is spread over several."""

from __future__ import annotations

import os
from typing import Any

import torch

from h2o_stream.config import ModelConfig
from h2o_stream.errors import ConfigError
from h2o_stream.processes import Processes
from h2o_stream.resources import cache_folder


def device_of(name: str) -> torch.device:
    """The torch device of a name; ``auto`` is the best there is.

    Raises:
        ConfigError: it cannot be used here.
    """
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


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """The torch dtype of a name.

    ``auto`` is bfloat16 where the hardware computes in it, float32 elsewhere: emulated, it is slower than float32.
    """
    if name == "auto" and device.type != "cpu":
        return torch.bfloat16
    return allowed_dtypes(name)[0]


def allowed_dtypes(name: str) -> tuple[torch.dtype, ...]:
    """The dtypes that a name allows on a CPU, the best first."""
    if name != "auto":
        return (getattr(torch, name),)
    native = any(getattr(torch.cpu, f"_is_{unit}_supported", bool)() for unit in ("avx512_bf16", "amx_tile"))
    return (torch.bfloat16,) if native else (torch.float32, torch.bfloat16)


def device_map_kwargs(config: ModelConfig) -> dict[str, Any]:
    """Where weights go, as transformers takes it."""
    if not config.device_map:
        return {}
    memory = config.memory_by_device()
    return {
        "device_map": config.device_map,
        "offload_folder": str(cache_folder() / "offload"),
        **({"max_memory": memory} if memory else {}),
    }


def tensor_parallel_kwargs(described: Any) -> dict[str, Any]:
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
