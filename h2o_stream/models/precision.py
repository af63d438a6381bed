"""Chooses device, dtype, distribution and precision of a model, before any weight is read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from h2o_stream.config import ModelConfig
from h2o_stream.errors import ConfigError, OutOfMemoryError
from h2o_stream.memory import format_bytes
from h2o_stream.processes import Processes
from h2o_stream.resources import cache_folder

DEFAULT_SHARE = 0.6
"""Share of the free memory that weights may take by default."""

MAX_SHARE = 0.9
"""Share they may take if the user asks for it or no smaller format is left."""


@dataclass(frozen=True)
class WeightSizes:
    """Bytes of a model's weights: in float32, with matrices packed in 8 or 4 bits, and the largest tensor, which exists
    twice for a moment.
    """

    float32: int
    int8: int
    int4: int
    largest: int

    @staticmethod
    def of(model: Any) -> WeightSizes:
        """Sizes of a model, which may be on the meta device."""
        from h2o_stream.models.quantize import packed_bytes

        numels = [weight.numel() for weight in model.parameters()]
        int8, int4 = (packed_bytes(model, quantize) for quantize in ("int8", "int4"))
        return WeightSizes(4 * sum(numels), int8, int4, 2 * max(numels))

    def bytes_of(self, dtype: torch.dtype, quantize: str) -> int:
        """Memory needed for loading."""
        if quantize == "none":
            return self.float32 * dtype.itemsize // 4
        return self.largest + (self.int8 if quantize == "int8" else self.int4)


@dataclass(frozen=True)
class Precision:
    """A choice of precision: dtype of unpacked weights and activations, packed format, a reason if it may surprise."""

    dtype: torch.dtype
    quantize: str
    reason: str = ""


def choose_precision(
    name: str,
    sizes: WeightSizes,
    free_bytes: int,
    quantize: str,
    dtypes: tuple[torch.dtype, ...],
    can_pack: bool = True,
) -> Precision:
    """Choose the precision of weights for the free memory: the user's, or for ``auto`` the widest that fits.

    Dtypes come best first; `can_pack` says whether this machine can pack weights. The name is for messages.

    Raises:
        OutOfMemoryError: no allowed choice fits.
    """

    def fits(dtype: torch.dtype, scheme: str, share: float) -> bool:
        return sizes.bytes_of(dtype, scheme) <= share * free_bytes

    def explain(dtype: torch.dtype, scheme: str) -> str:
        needed = format_bytes(sizes.bytes_of(dtypes[0], "none"))
        packed = format_bytes(sizes.bytes_of(dtype, scheme) - sizes.largest)
        return (
            f"{name} takes {needed} in {dtype_name(dtypes[0])} and {format_bytes(free_bytes)} of memory are free: "
            f"its weights are packed into {scheme} ({packed}); --quantize chooses otherwise."
        )

    best = dtypes[0]
    if quantize != "auto" or not can_pack:
        scheme = "none" if quantize == "auto" else quantize
        for dtype in dtypes:
            if fits(dtype, scheme, MAX_SHARE):
                return Precision(dtype, scheme)
    else:
        if fits(best, "none", DEFAULT_SHARE):
            return Precision(best, "none")
        for scheme, share in (("int8", DEFAULT_SHARE), ("int4", MAX_SHARE)):
            if fits(best, scheme, share):
                return Precision(best, scheme, explain(best, scheme))
        scheme = "int4"
    needed, smallest = sizes.bytes_of(dtypes[-1], scheme), sizes.bytes_of(best, "int4")
    can_shrink = scheme != "int4" and can_pack
    hint = f"--quantize int4 takes {format_bytes(smallest)}" if can_shrink else "take a smaller --model"
    width = dtype_name(dtypes[-1]) if scheme == "none" else scheme
    raise OutOfMemoryError(
        f"{name} needs {format_bytes(needed)} of memory in {width}, {format_bytes(free_bytes)} are free; {hint}"
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def device_of(name: str) -> torch.device:
    """The torch device for a name; ``auto`` is the best available.

    Raises:
        ConfigError: the device is not available.
    """
    if name == "auto":
        rank = os.environ.get("LOCAL_RANK", "0")  # set by launchers of several processes
        name = f"cuda:{rank}" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
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
    return allowed_dtypes(name)[0]


def allowed_dtypes(name: str) -> tuple[torch.dtype, ...]:
    """The dtypes that a name allows on a CPU, best first."""
    if name != "auto":
        return (getattr(torch, name),)
    native = any(getattr(torch.cpu, f"_is_{unit}_supported", bool)() for unit in ("avx512_bf16", "amx_tile"))
    return (torch.bfloat16,) if native else (torch.float32, torch.bfloat16)


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
