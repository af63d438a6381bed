"""Describes a transformers model by the row of its type, as files are.

What `forward` of its classes does is not looked at, so callers verify a description by comparing logits.
"""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy
import torch

from h2o_stream.attachment.module_weights import ModuleWeights
from h2o_stream.cache.arrays import to_tensor
from h2o_stream.native.description import Description, DescriptionError
from h2o_stream.native.pointers import dtype_name
from h2o_stream.native.torch_modules import check_module, text_modules
from h2o_stream.runtime.config_parameters import parameters_of_config
from h2o_stream.runtime.describe import describe_file

_PLACEHOLDERS = r".*(image|video|audio|vision|speech).*_token_(id|index)"
"""Settings that name tokens for something else than text."""


def describe(model: Any) -> Description:
    """Describe a causal language model.

    Matrices and the embedding share the model's memory; norms and biases may be float32 copies, valid for the current
    weights.

    Raises:
        DescriptionError: the native step does not support some part of the model.
    """
    for name, module in text_modules(model):
        check_module(name or "the model", module)
    config = model.config.get_text_config().to_dict()
    architecture, parameters = parameters_of_config(config)
    weights, embedding = ModuleWeights(model, architecture), model.get_input_embeddings()
    dtype = embedding.dtype if hasattr(embedding, "dtype") else embedding.weight.dtype
    described = describe_file(architecture, replace(parameters, tied=False), weights, dtype_name(dtype))
    weights.check_all_read()
    described = replace(
        described,
        logits_dtype=dtype_name(getattr(model.get_output_embeddings(), "out_dtype", None) or dtype),
        placeholders=_placeholders(model.config),
    )
    return _with_tensors(described, model.device, {})  # type: ignore[no-any-return]


def _with_tensors(part: Any, device: torch.device, made: dict[int, Any]) -> Any:
    """A part of a description with tensors on a device in place of arrays; each array is `made` into one."""
    if isinstance(part, numpy.ndarray):
        return made.setdefault(id(part), to_tensor(part).to(device))
    if is_dataclass(part):
        parts = {field.name: _with_tensors(getattr(part, field.name), device, made) for field in fields(part)}
        return replace(part, **parts)  # type: ignore[type-var]
    return [_with_tensors(each, device, made) for each in part] if isinstance(part, list) else part


def _placeholders(config: Any) -> tuple[int, ...]:
    """Tokens that stand for images or sounds, in a model that also takes those."""
    if config is config.get_text_config():
        return ()
    named = [value for key, value in config.to_dict().items() if re.fullmatch(_PLACEHOLDERS, key)]
    return tuple(sorted({value for value in named if isinstance(value, int)}))


def weight_bytes(model: Any) -> int:
    """Bytes of matrices that a step reads; of a model that is not described, all weights but an untied embedding."""
    try:
        return describe(model).nbytes
    except DescriptionError:
        table, head = _sizes(model.get_input_embeddings()), _sizes(model.get_output_embeddings())
        unread = 0 if not head or table.keys() & head.keys() else sum(table.values())
        return sum(_sizes(model).values()) - unread


def _sizes(module: Any) -> dict[int, int]:
    """Bytes of all tensors, by address: what is shared counts once."""
    tensors = () if module is None else (*module.parameters(), *module.buffers())
    return {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
