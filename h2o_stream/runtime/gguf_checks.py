"""Checks numbers in the metadata of GGUF files, before anything is allocated."""

from __future__ import annotations

import math
import re
from typing import Any

from h2o_stream.models.gguf import GgufFile

_DIMENSIONS = (
    "embedding_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "expert_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "rope.dimension_count_swa",
)
_OPTIONAL_DIMENSIONS = (
    "attention.key_length_mla",
    "attention.value_length_mla",
    "attention.kv_lora_rank",
    "attention.q_lora_rank",
    "embedding_length_per_layer_input",
    "ssm.group_count",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
)

_FACTORS = ("rope.scaling.factor", "rope.scale_linear")

_POSITIVE = (
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)


def check_sizes(file: GgufFile) -> None:
    """Check that sizes in the metadata are consistent with the tensors, before allocating anything.

    Raises:
        ModelNotFoundError: a size is 0 that must not be, or larger than any dimension of the tensors, or layers are
            missing or too many.
    """
    largest_dim = max((size for tensor in file.tensors.values() for size in tensor.shape), default=0)
    inner = "feed_forward_length"
    for key in ("block_count", inner, *_DIMENSIONS, *_OPTIONAL_DIMENSIONS):
        limit = len(file.tensors) if key == "block_count" else largest_dim
        value = _read_metadata(file, key)
        optional = isinstance(value, list) or key in _OPTIONAL_DIMENSIONS or key.startswith("expert_")
        optional |= key == inner and bool(_read_metadata(file, "expert_count"))  # every layer may have experts
        for size in value if isinstance(value, list) else [] if value is None else [value]:
            least = 0 if optional else 1  # no experts, or none in a layer
            if type(size) is not int or not least <= size <= limit:
                raise file.damaged(f"{file.architecture}.{key} is {size!r}, not a number from 1 to {limit}")
    layers = {int(name.split(".")[1]) for name in file.tensors if re.match(r"blk\.\d+\.", name)}
    count, guessing = (_read_metadata(file, key) or 0 for key in ("block_count", "nextn_predict_layers"))
    if type(count) is not int or type(guessing) is not int:
        raise file.damaged(f"it has {count!r} layers, of which {guessing!r} guess tokens")
    if count and layers and not count - guessing <= max(layers) + 1 <= count:
        raise file.damaged(f"{file.architecture}.block_count is {count}, and it has {max(layers) + 1} layers")


def check_rope(file: GgufFile) -> None:
    """Check the numbers of RoPE in the metadata.

    Raises:
        ModelNotFoundError: one is not a positive number; only a scaling factor may be 0, for none.
    """
    for key in (*_POSITIVE, *_FACTORS):
        value = _read_metadata(file, key)
        if value is None or (key in _FACTORS and value == 0):
            continue
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise file.damaged(f"{file.architecture}.{key} is {value!r}, not a positive number")
    for end in ("", "_swa"):
        size = _read_metadata(file, f"attention.key_length{end}")
        heads, hidden = (_read_metadata(file, key) for key in ("attention.head_count", "embedding_length"))
        if size is None and not end and type(heads) is int and type(hidden) is int:
            size = hidden // heads
        dims = _read_metadata(file, f"rope.dimension_count{end}")
        if type(dims) is int and type(size) is int and dims > size:
            reason = f"{file.architecture}.rope.dimension_count{end} is {dims}, more than the {size} numbers of a head"
            raise file.damaged(reason)


def _read_metadata(file: GgufFile, key: str) -> Any:
    return file.metadata.get(f"{file.architecture}.{key}")
