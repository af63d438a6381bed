"""What GGUF files say of attention with latent keys and values, as transformers has it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_KEYS, _VALUES = "attn_k_b.weight", "attn_v_b.weight"
"""The two parts of a matrix in newer files: of keys, by columns, and of values."""


def config(get: Callable[[str], Any], tensors: Collection[str]) -> dict[str, Any]:
    """Attributes of the config, by keys of files without the architecture."""
    rotated = int(get("rope.dimension_count"))
    sizes = (get(f"attention.{name}_length_mla") or get(f"attention.{name}_length") for name in ("key", "value"))
    head_size, value_size = map(int, sizes)
    groups = int(get("expert_group_count") or 1)
    return {
        "head_dim": rotated,
        "num_key_value_heads": int(get("attention.head_count")),
        "q_lora_rank": get("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": head_size - rotated,
        "v_head_dim": value_size,
        "n_group": groups,
        "topk_group": int(get("expert_group_used_count") or groups),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "first_k_dense_replace": int(get("leading_dense_block_count") or 0)
        if get("expert_count")
        else int(get("block_count")),
    }


def is_part(name: str) -> bool:
    """Whether a tensor is one of two parts of a matrix."""
    return name.endswith((_KEYS, _VALUES))


def parts_by_weight(names: dict[str, str]) -> dict[str, str]:
    """Weights by tensors, for the parts of those in `names`."""
    wholes = {name: weight for name, weight in names.items() if name.endswith("attn_kv_b.weight")}
    return {
        name.replace("attn_kv_b.weight", part): whole for name, whole in wholes.items() for part in (_KEYS, _VALUES)
    }


def put_part(tensors: dict[str, Any], whole: str, values: NDArray[Any], name: str) -> None:
    """Add one of two parts to the tensors that were read; both together are the weight `whole`, head by head.

    Args:
        tensors: by weight; a part waits for the other under its name and `of`.
        whole: name of the weight.
        values: [heads, rank, elements] of keys, or [heads, size, rank] of values.
        name: of the tensor.
    """
    waiting = f"{whole} of"
    part = values.swapaxes(1, 2) if name.endswith(_KEYS) else values
    other = tensors.pop(waiting, None)
    if other is None:
        tensors[waiting] = part
        return
    pair = (part, other) if name.endswith(_KEYS) else (other, part)
    rows = np.concatenate(pair, 1)
    tensors[whole] = torch.from_numpy(rows.reshape(-1, rows.shape[-1]))
