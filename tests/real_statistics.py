"""Tiny models with the statistics of real ones: the numbers that thresholds and probes have to cope with.

What real files have. Qwen2.5-Coder-0.5B-Instruct, from its file: norms before attention from -1.2 to 16.5 (medians of
layers from 0.07 to 3.3), before MLPs from -0.05 to 8, the last one to 17; biases of queries from -81 to 50, of keys
from -211 to 158 (287 times their median; the largest in the slowest dimensions of RoPE), of values from -11 to 8;
columns of projections up to 18 and rows up to 35 times the median; 151,936 rows of embeddings, of which the last 271
belong to no token and are all alike. Gemma 3 270M: `post_ffw_norm` from -0.2 to 1,649, as 1 + w; 262,144 rows.
Published figures of others (Massive Activations, arXiv 2402.17762): one or two channels of the first token, and of
delimiters, are 1,000 to 10,000 times the median of all.
"""

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

MASSIVE = (1, 7, 33)
"""Tokens with a massive activation."""

_LARGEST = {"q": 81.0, "k": 211.0, "v": 11.0}
"""Of biases."""


def with_real_statistics(model: Any, seed: int = 0, strength: float = 1.0) -> Any:
    """A copy of a random model whose weights are spread like those of real ones.

    Args:
        model: left as it is.
        seed: of the numbers.
        strength: 1 for what real models have, 0 for nothing of it.
    """
    model, random = copy.deepcopy(model).float(), torch.Generator().manual_seed(seed)
    hidden = model.config.get_text_config().hidden_size
    outliers = torch.randperm(hidden, generator=random)[:2]
    for name, module in _norms(model):
        after = "post" in name.replace("post_attention_layernorm", "") or "after" in name
        _spread_norm(module, outliers if module.weight.numel() == hidden else None, after, random, strength)
    for name, parameter in model.named_parameters():
        kind = next((kind for kind in _LARGEST if f"{kind}_proj.bias" in name), None)
        if kind is not None:
            _spread_bias(parameter.data, _LARGEST[kind] * strength, model, kind, random)
        elif (
            parameter.dim() == 2 and parameter.shape[0] == hidden and name.endswith(("down_proj.weight", "fc2.weight"))
        ):
            parameter.data[outliers] *= 1 + 9 * strength
        elif parameter.dim() == 2 and parameter.shape[1] == hidden and "_proj" in name:
            parameter.data[:, outliers] *= 1 + 2 * strength
    rows = model.get_input_embeddings().weight.data
    rows[:, outliers[0]] *= 1 + 9 * strength
    massive = [token for token in MASSIVE if token < len(rows)]
    rows[massive, outliers[1]] = 1000 * strength * rows.abs().median()
    padding = max(1, len(rows) // 64)
    rows[-padding:] = rows[-1].clone()  # they belong to no token
    return model


def _norms(model: Any) -> Iterator[tuple[str, Any]]:
    """The norms of a model that have weights, by name; those of single heads are small, too, in real models."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        named = "norm" in type(module).__name__.lower() or "norm" in name.rpartition(".")[2]
        if isinstance(weight, nn.Parameter) and weight.dim() == 1 and named and not any(module.children()):
            yield name, module


def _spread_norm(module: Any, outliers: Tensor | None, after: bool, random: torch.Generator, strength: float) -> None:
    """Weights of a norm: around some size, one of them large, one negative.

    Norms after a block, as Gemma has them, make outliers; those before a block, and the last one, make them small.
    """
    weight, offset = module.weight.data, _offset(module)
    spread = (torch.randn(weight.shape, generator=random) * 0.5 * strength).exp()
    median = (0.07 * 50 ** float(torch.rand((), generator=random))) ** strength
    factors = median * spread
    first, second = torch.randperm(len(factors), generator=random)[:2].tolist()
    factors[first] = 7.0**strength * median
    factors[second] = -0.2 * strength
    if outliers is not None:
        factors[outliers] *= 0.01**strength
        if after:
            factors[outliers[0]] = 1649.0**strength
    weight.copy_(factors - offset)


def _offset(module: Any) -> float:
    """1 if a norm multiplies by 1 + w. Random models do not say it by their numbers."""
    x = torch.linspace(-1, 1, module.weight.numel(), dtype=torch.float32)[None]
    held = module.weight.data.clone()
    with torch.no_grad():
        module.weight.data.zero_()
        try:
            offset = float(module(x).abs().max() > 1e-3)
        except (TypeError, AttributeError):  # it has a gate
            offset = float(module(x, torch.ones_like(x)).abs().max() > 1e-3)
        module.weight.data.copy_(held)
    return offset


def _spread_bias(bias: Tensor, largest: float, model: Any, kind: str, random: torch.Generator) -> None:
    """Biases of a projection to heads: of keys, the largest are where RoPE turns slowest."""
    bias.normal_(0, min(largest, 0.5), generator=random)
    size = getattr(model.config.get_text_config(), "head_dim", None) or 8
    slow = [size // 2 - 1, size - 1] if kind == "k" else [int(torch.randint(size, (), generator=random))]
    if bias.numel() % size == 0 and largest:
        bias.view(-1, size)[:, slow] = largest * torch.rand(len(slow), generator=random) * math.copysign(1, bias[0])
