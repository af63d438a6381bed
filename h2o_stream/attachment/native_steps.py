"""Decides whether decode steps are native: describes a model, and verifies the description against its own logits."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from ctypes import CDLL
from typing import Any

from h2o_stream.attachment.describe import describe
from h2o_stream.attachment.model_facts import input_device
from h2o_stream.attachment.verification import Verification
from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.cache.layer import LayerSpec
from h2o_stream.native import library
from h2o_stream.native.description import Description, DescriptionError
from h2o_stream.native.model_guard import ModelGuard
from h2o_stream.native.native_model import NativeModel
from h2o_stream.native.slots import why_not
from h2o_stream.native.stepper import Stepper
from h2o_stream.native.tensor_stepper import CheckedStepper, TensorStepper


def make_stepper(model: Any, cache: H2OCache, verification: Verification) -> TensorStepper | CheckedStepper | str:
    """Native steps of an attached model, or the reason why there are none.

    Args:
        model: takes its attention from `cache`; its forward is its own.
        cache: empty; loses its native kernels if they fail.
        verification: passed with eager steps; native ones must pass it too.
    """
    native = library.loaded()
    if native is None:
        return library.why_not()
    described, steps = _described(native, model, cache), None
    if not isinstance(described, str):
        steps = functools.partial(_stepper, native, *described)
    if reason := _why_not(cache, verification, steps):
        if steps is None or _why_not(cache, verification, None):
            cache.kernels = None
        return reason
    if isinstance(described, str) or steps is None:
        return str(described)
    stepper = steps(cache)
    return CheckedStepper(stepper, model) if os.environ.get(library.CHECK_VARIABLE) else stepper


def _stepper(native: CDLL, model: NativeModel, unchanged: ModelGuard, cache: H2OCache) -> TensorStepper:
    return TensorStepper(Stepper(native, model, unchanged, cache))


def _described(native: CDLL, model: Any, cache: H2OCache) -> tuple[NativeModel, ModelGuard] | str:
    """The description as structures, and what watches that it holds; or the reason why steps stay eager."""
    if (device := input_device(model)).type != "cpu":
        return f"the model is on {device}"
    if cache.storage_device is not None or (getattr(model, "tp_size", None) or 1) > 1:
        return "the cache is in host memory or on disk, or the model is shared by several processes"
    try:
        description = describe(model)
        check_states(description, cache.specs)
        guard = ModelGuard(native, model, description)
    except DescriptionError as reason:
        return str(reason)
    if cache.plan.positions == "absolute" and not description.supports_absolute:
        return "its rotary frequencies change with the length of the text"
    return next(filter(None, map(why_not, cache.head_groups)), "") or (NativeModel(description), guard)


def check_states(description: Description, specs: Sequence[LayerSpec]) -> None:
    """Check that layers attend, and keep states of the sizes, that the cache knows."""
    for number, (layer, spec) in enumerate(zip(description.layers, specs, strict=True)):
        described = dict(layer.mixer.states) if layer.mixer else {}
        if dict(spec.state_shapes) != described or spec.attends != (layer.attention is not None):
            raise DescriptionError(f"layer {number} keeps states {described} beside {dict(spec.state_shapes)}")


def _why_not(cache: H2OCache, verification: Verification, steps: Callable[[H2OCache], TensorStepper] | None) -> str:
    """Why native kernels, and steps if there are any, do not compute what the model does, or nothing."""
    if cache.kernels is None:
        return ""
    engine = f"{'steps' if steps else 'kernels'} of {library.identity()}"
    return verification.cached(engine, functools.partial(verification.why_not, cache.kernels, steps))
