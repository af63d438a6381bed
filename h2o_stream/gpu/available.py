"""Whether kernels can run on a device. Imports no Triton."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

INTERPRET = "TRITON_INTERPRET"
"""Set to 1, Triton's interpreter runs kernels on the CPU, slowly."""

_LEAST, _OVERLAPS = (8, 0), (9, 0)
"""Compute capabilities that kernels need, and from which on a kernel can start while the one before it ends."""


def why_not(device: torch.device) -> str:
    """Why kernels do not run on a device, or nothing."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if os.environ.get(INTERPRET) == "1":
        return ""
    if device.type != "cuda" or torch.version.cuda is None:
        return "not on a CUDA device"
    capability = torch.cuda.get_device_capability(device)
    return "" if capability >= _LEAST else f"compute capability {'.'.join(map(str, capability))} is below 8.0"


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a device the one that Triton launches kernels on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel can start while the one before it ends (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _OVERLAPS


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
