"""Decode steps as one captured CUDA graph, for models whose steps run eagerly on a GPU.

Once all windows have their final size, every step has the same shapes and addresses. So one step is captured, and its
replay decodes an endless stream without Python between the kernels. A change of the cache's revision (pins, another
number of rows, a new stream) captures it again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.cache.head_group import HeadGroup

WARM_UP = 3
"""Steps that run eagerly before one is captured: libraries allocate and tune in them."""


class Caches(Protocol):
    """What captured steps need of a cache, or of those of several streams; see `H2OCache`."""

    revision: int
    engine_note: str

    @property
    def steady(self) -> bool:
        """Whether every window has its final size."""

    @property
    def head_groups(self) -> Iterable[HeadGroup]:
        """All head groups."""

    def writing(self) -> AbstractContextManager[None]:
        """Write to the slots inside the block."""

    def count_token(self) -> None:
        """A step has taken a token of each row."""


class Recording(Protocol):
    """A captured step."""

    logits: Tensor

    def replay(self) -> None:
        """Run the step again, on what its inputs hold now."""


class CudaRecording:
    """A step as a CUDA graph. Capturing runs nothing: the cache is unchanged."""

    def __init__(self, step: Callable[[], Tensor]) -> None:
        self._graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # the graph's own is that of one device
        with (
            torch.cuda.stream(torch.cuda.current_stream()),  # which a capture that fails does not restore
            torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"),
        ):
            self.logits = step()

    def replay(self) -> None:
        """Run the captured step again."""
        self._graph.replay()


class GraphSteps:
    """Runs single tokens by replaying a captured step; see `Steps`.

    Args:
        forward: the model's own, which calls our attention, or one that computes the same.
        cache: its slots are written by the captured step.
        record: captures a call, by default as a CUDA graph.
        otherwise: takes the place of `forward` in a step that cannot be captured with it.
        count: counts the tokens of a step, by default one of each row.
    """

    takes_prompts = False

    def __init__(
        self,
        forward: Callable[..., Any],
        cache: Caches,
        record: Callable[[Callable[[], Tensor]], Recording] = CudaRecording,
        otherwise: Callable[..., Any] | None = None,
        count: Callable[[], None] | None = None,
    ) -> None:
        self._count = count or cache.count_token
        self._forward, self._cache, self._record, self._otherwise = forward, cache, record, otherwise
        self._recording: Recording | None = None
        self._revision, self._warm, self._watched, self._failed = -1, 0, False, False
        self._inputs: dict[str, Tensor] = {}

    def logits(self, kwargs: dict[str, Any]) -> Tensor | None:
        """Logits of one token, by a captured graph if there is one for this step; None if it is not taken."""
        cache = self._cache
        if self._failed or not cache.steady:
            return None
        if cache.revision != self._revision:
            self._revision, self._warm, self._recording = cache.revision, 0, None
            self._watched = any(group.watch for group in cache.head_groups)
        if self._watched or self._warm < WARM_UP:
            self._warm += 1
            return None
        if self._recording is None and not self._capture(kwargs):
            return None
        assert self._recording is not None
        for name, tensor in self._inputs.items():
            tensor.copy_(kwargs[name])
        with cache.writing():
            self._recording.replay()
            self._count()
        return self._recording.logits.clone()

    @torch.inference_mode(False)  # inputs are written in place, later perhaps outside of it
    @torch.no_grad()
    def _capture(self, kwargs: dict[str, Any]) -> bool:
        """Capture a step with inputs of these shapes. Returns whether that was possible."""
        self._inputs = {name: kwargs[name].clone() for name in ("input_ids", "position_ids")}
        fixed = {"past_key_values": self._cache, "h2o_cache": self._cache, "use_cache": True, "return_dict": True}
        try:
            self._recording = self._record(lambda: self._forward(**self._inputs, **fixed).logits)
        except RuntimeError as error:
            if self._otherwise is not None:
                self._forward, self._otherwise = self._otherwise, None
                return self._capture(kwargs)
            self._failed, cause = True, error.__context__ or error  # the end of a failed capture fails, too
            reason = next(iter(str(cause).splitlines()), type(cause).__name__)
            self._cache.engine_note = f"eager: a step cannot be captured ({reason})"
            warnings.warn(f"steps run eagerly, one cannot be captured: {reason}", stacklevel=2)
        return not self._failed


def with_batched_experts(model: Any) -> Callable[..., Any] | None:
    """The forward of a mixture of experts, whose products are of batches; None for other models.

    Grouped ones of float32 read the size of each group on the host.
    """
    forward = model.forward
    if not (hasattr(model, "set_experts_implementation") and model._can_set_experts_implementation()):
        return None

    def batched(**kwargs: Any) -> Any:
        before = model.get_experts_implementation()
        model.set_experts_implementation("batched_mm")
        try:
            return forward(**kwargs)
        finally:
            model.set_experts_implementation(before)

    return batched


def why_not(cache: H2OCache, device: torch.device) -> str:
    """Why the steps of a cache cannot be captured, or nothing."""
    if device.type != "cuda":
        return "not on a CUDA device"
    if cache.storage_device is not None:
        return "the cache is in host memory or on disk"
    if any(group.policy.head_state(1, 1, 1) for group in cache.head_groups):
        return "the policy keeps a state of each head"
    return ""
