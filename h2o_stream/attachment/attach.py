"""Attach a cache to any supported transformers model, and restore the model afterwards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, get_args

import torch
from transformers import PreTrainedModel

from h2o_stream.attachment import gpu_steps, native_steps
from h2o_stream.attachment.attention_interface import attention_names, using_h2o_attention
from h2o_stream.attachment.describe import weight_bytes
from h2o_stream.attachment.forward import AttachedForward, Steps, replaced_forward
from h2o_stream.attachment.model_facts import input_device, learned_positions, max_distance_of
from h2o_stream.attachment.retrieval_heads import give_retrieval_heads_more
from h2o_stream.attachment.support import check_supported, layer_specs, with_default_positions
from h2o_stream.attachment.verification import Verification, verify_logits
from h2o_stream.base.progress import ProgressCallback, ignore
from h2o_stream.cache.full_cache import FullCache
from h2o_stream.cache.h2o_cache import H2OCache
from h2o_stream.cache.identity import FILE_DIGEST, model_digest
from h2o_stream.cache.layer import LayerSpec
from h2o_stream.cache.recurrent import as_class_for
from h2o_stream.cache.rope import PositionsError
from h2o_stream.cache.sizing import provisional, sized
from h2o_stream.config import CacheConfig, CachePlan, EngineChoice
from h2o_stream.errors import ConfigError, H2OStreamError, UnsupportedModelError
from h2o_stream.gpu import available
from h2o_stream.native import kernels, library


@contextmanager
def attach(
    model: PreTrainedModel,
    config: CacheConfig | None = None,
    *,
    engine: EngineChoice = "auto",
    progress: ProgressCallback = ignore,
) -> Iterator[H2OCache | FullCache]:
    """Let `model` keep only what `config` says, under ``generate``, pipelines and plain forwards.

    A forward without ``past_key_values`` starts a new stream in place of the previous one; ``past_key_values=cache``
    continues it, and so does the ``past_key_values`` of its output. A forward that wants no cache (``use_cache=False``,
    by argument or config) is the model's own. Inference only: `backward` raises.

    Args:
        model: a causal language model of transformers, or PEFT's wrapper around one.
        config: policy, window and rules; the default is `h2o` with our defaults.
        engine: ``auto`` uses native code where it can; ``eager`` is for comparison.
        progress: called while the heads are measured, which takes a minute the first time that a large model is
            attached.

    Yields:
        The cache, with ``kept``, ``nbytes``, ``seen_tokens``, ``counts``, ``pin``, ``evict_first`` and
        ``state_dict``.

    Raises:
        UnsupportedModelError: the architecture is not supported.
        ConfigError: window or positions do not fit the model, or there is no such engine.
        H2OStreamError: the model is attached already.
    """
    if engine not in get_args(EngineChoice):
        raise ConfigError(f"engine is {engine!r}; choose one of {', '.join(get_args(EngineChoice))}")
    config = config or CacheConfig()
    model = _transformers_model(model)
    if getattr(model, "_h2o_cache", None) is not None:
        raise H2OStreamError(f"{type(model).__name__} is attached already; leave that block first")
    device = input_device(model)
    with torch.autocast(device.type, enabled=False), available.on(device):  # its rounding is no difference of ours
        cache, verification = _build(model, config, progress)
        stepper = _steps(model, cache, verification, engine)
    attention = attention_names(model)
    model._h2o_cache = cache
    try:
        with (
            using_h2o_attention(model) if cache.evicts else nullcontext(),
            replaced_forward(model, AttachedForward(model, cache, stepper, attention)),
        ):
            yield cache
    finally:
        del model._h2o_cache


def _transformers_model(model: Any) -> PreTrainedModel:
    """The model inside a wrapper: PEFT's wrapper runs the same modules and the forward that is replaced."""
    if hasattr(model, "_orig_mod"):
        raise UnsupportedModelError(
            "a model out of torch.compile runs graphs that ask for no cache of ours; attach the model it was made of"
        )
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _build(
    model: PreTrainedModel, config: CacheConfig, progress: ProgressCallback
) -> tuple[H2OCache | FullCache, Verification | None]:
    """The cache that `config` asks for, sized for `model`, and the check that eager logits passed, if it evicts.

    Raises:
        UnsupportedModelError: it does not; any alternative in the message has been tried.
    """
    digest = functools.partial(model_digest, model)
    config = with_default_positions(model.config, config)
    if config.policy == "full":
        plan = check_supported(type(model), model.config, config)
        device = input_device(model)
        in_host_memory = config.device == "cpu" and device.type != "cpu"
        return as_class_for(model, FullCache(plan, model.config, device, digest, in_host_memory)), None
    first = config if config.cache_size is None else provisional(config)
    try:
        plan, specs, verification = _verified(model, first)
    except PositionsError:
        _verified(model, replace(first, positions="absolute"))  # which the error recommends
        raise
    if plan.budgets == "measured":
        specs = give_retrieval_heads_more(model, specs, progress)
    cache = new_cache(model, config, specs, digest)
    cache.continues = verification.continues()
    return cache, verification


def new_cache(
    model: PreTrainedModel, config: CacheConfig, specs: Sequence[LayerSpec], digest: Callable[[], str]
) -> H2OCache:
    """A cache with these layers of a model, sized for it; digest and errors: see `H2OCache`."""
    max_distance = max_distance_of(model.config)

    def bytes_of(config: CacheConfig) -> int:
        return H2OCache(config, specs, max_distance).allocated_bytes()

    weights = functools.partial(weight_bytes, model)
    if config.auto_window:  # few bits are slow in torch, and not timed on GPUs
        config = replace(config, kv_bits=config.kv_bits or 16)
    device = input_device(model) if config.device == "auto" else None
    config = sized(config, max_distance, bytes_of, weights, [spec.shape for spec in specs], device)
    cache = H2OCache(config, specs, max_distance, learned_positions(model.config), digest)
    cache.is_called = lambda saved: saved == getattr(model, FILE_DIGEST, "")
    return as_class_for(model, cache)


def _verified(model: PreTrainedModel, config: CacheConfig) -> tuple[CachePlan, list[LayerSpec], Verification]:
    plan = check_supported(type(model), model.config, config)
    specs = layer_specs(model, plan)
    return plan, specs, verify_logits(model, plan.positions, config.device, specs)


def _steps(
    model: PreTrainedModel, cache: H2OCache | FullCache, verification: Verification | None, engine: EngineChoice
) -> Steps | None:
    """Set native kernels for the layers, if there are any, and return native steps of the whole model, or None."""
    if verification is None or not isinstance(cache, H2OCache):
        cache.engine_note = "eager: policy full keeps transformers' own cache"
        return None
    if engine == "eager":
        cache.engine_note = "eager: --engine eager"
        return None
    if gpu_steps.serves(model):
        return gpu_steps.make_stepper(model, cache, verification)
    cache.kernels = kernels.make_kernels()
    stepper = native_steps.make_stepper(model, cache, verification)
    if isinstance(stepper, str):
        cache.engine_note = f"eager: {stepper}"
        return None
    cache.engine_note = f"native, {library.name()}"
    return stepper
