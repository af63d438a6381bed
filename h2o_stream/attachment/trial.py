"""A trial of a model on random tokens, which leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from h2o_stream.attachment.model_facts import input_device


def usual_tokens(model: Any, count: int) -> Tensor:
    """[1, count] random tokens, none of them special."""
    config = model.config
    text = config.get_text_config()
    settings = {**config.to_dict(), **text.to_dict()}
    named = [value for name, value in settings.items() if name.endswith(("_token_id", "_token_index"))]
    special = {token for value in named for token in (value if isinstance(value, list) else [value])}
    usual = [token for token in range(min(text.vocab_size, 4096)) if token not in special] or [0]
    chosen = torch.randint(len(usual), (1, count), generator=torch.Generator().manual_seed(0), device="cpu")
    return torch.tensor(usual, device="cpu")[chosen].to(input_device(model))


def logits_of(output: Any) -> Tensor:
    """The logits in what a forward returns."""
    logits: Tensor = output[0] if isinstance(output, tuple) else output.logits
    return logits


@contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """No gradients and no dropout, and the state of random numbers is restored."""
    training = [module for module in model.modules() if module.training]
    home = input_device(model)
    with torch.no_grad(), torch.random.fork_rng([home] if home.type == "cuda" else []):
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True
