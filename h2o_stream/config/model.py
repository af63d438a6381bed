"""Which model, and how it is loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass

from h2o_stream.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("auto", "none", "int8", "int4")

DEFAULT_MODEL = "smollm2-135m"

HUB_ANSWER_S = 2.5
"""How long the Hub may take to answer before the files on this machine have to do."""


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and how it is loaded.

    Args:
        model: ``smollm2-135m``, a Hub id, a local folder, a ``.gguf`` file or ``repo:file.gguf``.
        dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``.
        device: ``auto`` or a torch device such as ``cpu``, ``cuda``, ``cuda:1``, ``mps``.
        device_map: passed to transformers and accelerate (``auto`` spreads the layers); replaces `device`.
        max_memory: with `device_map`, the most for weights on each device, as ``0=10GiB,cpu=24GiB`` or, in parts
            of all weights, ``0=20%,cpu=80%``; weights that fit nowhere are read from disk in every step.
        tensor_parallel: every process of ``torchrun`` holds a shard of each matrix, and evicts for its own heads.
        offline: use only files on this machine, no network.
        quantize: format of the weight matrices on a CPU: ``none``, ``int8``, ``int4``, or ``auto``, which keeps the
            format of a quantized file and otherwise takes the widest that fits the free memory comfortably.
    """

    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    device: str = "auto"
    device_map: str | None = None
    offline: bool = False
    quantize: str = "auto"
    max_memory: str | None = None
    tensor_parallel: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is unknown; --dtype takes one of {', '.join(DTYPES)}")
        if self.quantize not in QUANTIZATIONS:
            raise ConfigError(
                f"quantize {self.quantize!r} is unknown; --quantize takes one of {', '.join(QUANTIZATIONS)}"
            )
        ways = {
            "--tensor-parallel": self.tensor_parallel,
            f"--device-map {self.device_map}": self.device_map,
            f"--quantize {self.quantize}": self.quantize not in ("auto", "none"),
        }
        chosen = [way for way, wanted in ways.items() if wanted]
        if len(chosen) > 1:
            raise ConfigError(f"{chosen[0]} does not go with {chosen[1]}; leave one out")
        if self.max_memory and not self.device_map:
            raise ConfigError(f"max_memory is {self.max_memory}, which needs --device-map auto")
        self.memory_by_device()

    def memory_by_device(self) -> dict[int | str, str] | None:
        """`max_memory` in the form of accelerate.

        Raises:
            ConfigError: it cannot be parsed.
        """
        if not self.max_memory:
            return None
        sizes: dict[int | str, str] = {}
        for item in self.max_memory.split(","):
            name, _, size = (part.strip() for part in item.partition("="))
            if not re.fullmatch(r"\d{1,9}|cpu", name) or not re.fullmatch(r"\d{1,9}(\.\d{1,9})?([KMG]i?B|%)", size):
                raise ConfigError(
                    f"{item!r} is no device and size; --max-memory takes them like 0=10GiB,cpu=24GiB or 0=20%,cpu=80%"
                )
            sizes[int(name) if name.isdecimal() else name] = size
        return sizes
