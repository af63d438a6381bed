"""Decides how a model on a GPU is served: by fused layers, by its own forward with our attention, and captured or not.

What is not covered goes on as without Triton: each part is verified against the model's own logits before it is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from h2o_stream.attachment.describe import describe
from h2o_stream.attachment.forward import Steps
from h2o_stream.attachment.model_facts import input_device
from h2o_stream.attachment.native_steps import check_states
from h2o_stream.attachment.verification import Verification
from h2o_stream.base.resources import version_of
from h2o_stream.cache.group_rules import HeadShape
from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.gpu import available, graphs
from h2o_stream.native.description import DescriptionError
from h2o_stream.native.model_guard import ModelGuard

if TYPE_CHECKING:
    from h2o_stream.gpu.steps import FusedSteps


def serves(model: Any) -> bool:
    """Whether a model is on a GPU, or Triton interprets its kernels on the CPU."""
    device = input_device(model)
    return device.type == "cuda" or not available.why_not(device)


def make_stepper(model: Any, cache: H2OCache, verification: Verification) -> Steps | None:
    """Set the kernels of an empty cache, and return the steps of an attached model; None for its own forward."""
    device = input_device(model)
    spread = "weights are on several devices" if any(x.device != device for x in model.parameters()) else ""
    uncaptured = spread or graphs.why_not(cache, device)
    how = f"eager: {uncaptured}" if uncaptured else "captured as a CUDA graph"
    if reason := spread or _set_kernels(model, cache, verification):
        cache.engine_note = f"{how}; attention is eager: {reason}"
    else:
        fused = _fused(model, cache, verification, not uncaptured)
        if not isinstance(fused, str):
            cache.engine_note = f"fused by {_triton()}, {how}"
            return fused
        cache.engine_note = f"{how}; attention by {_triton()} alone: {fused}"
    if uncaptured:
        return None
    return graphs.GraphSteps(model.forward, cache, otherwise=graphs.with_batched_experts(model))


def _triton() -> str:
    return f"Triton {version_of('triton')}"


def _set_kernels(model: Any, cache: H2OCache, verification: Verification) -> str:
    """Set the kernels of attention; or why they are not used."""
    device = input_device(model)
    if reason := available.why_not(device):
        return reason
    if cache.storage_device is not None:
        return "keys and values are on another device"
    try:
        from h2o_stream.gpu.groups import why_not
        from h2o_stream.gpu.kernels import GpuKernels
    except ImportError as error:
        return f"{_triton()} is another one than is needed: {error}"
    if reason := next(filter(None, map(why_not, cache.head_groups)), ""):
        return reason
    made = GpuKernels(device)

    def why_not_right() -> str:
        for spec, layer in zip(cache.specs, cache.layers, strict=True):
            for group in layer.head_groups if spec.shape else ():
                made.rehearse(group, cast(HeadShape, spec.shape), model.dtype)
        return verification.why_not(made)

    reason = _trial(verification, f"kernels of {_triton()} {cache.plan}", why_not_right)
    if not reason:
        cache.kernels = made
    return reason


def _fused(model: Any, cache: H2OCache, verification: Verification, captured: bool) -> FusedSteps | str:
    """Fused steps; or the reason why there are none."""
    from h2o_stream.gpu import layers, steps

    try:
        description = describe(model)
        check_states(description, cache.specs)
        guard = ModelGuard(None, model, description)
    except DescriptionError as error:
        return str(error)
    if reason := layers.why_not(description) or steps.why_not(cache, description):
        return reason

    def make(cache: H2OCache) -> FusedSteps:
        assert cache.kernels is not None
        return steps.FusedSteps(description, cache, cache.kernels, guard, captured)

    why_not_right = functools.partial(verification.why_not, cache.kernels, make)
    return _trial(verification, f"steps of {_triton()}", why_not_right) or make(cache)


def _trial(verification: Verification, engine: str, why_not: Callable[[], str]) -> str:
    """Why something does not compute what the model does, or nothing."""
    try:
        return verification.cached(f"{engine} {torch.cuda.is_available() and torch.cuda.get_device_name()}", why_not)
    except Exception as error:  # noqa: BLE001 -- Triton and drivers raise anything, and there is another way
        return f"Triton: {next(iter(str(error).splitlines()), type(error).__name__)}"
