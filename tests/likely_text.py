"""Text that a tiny random model predicts better than any other model does: what it says itself."""

from typing import Any

import torch

from tests.gguf_files import TOKENS

_LINES, _LENGTH = 12, 24


def likely_lines(model: Any, seed: int = 0) -> tuple[str, ...]:
    """Lines of letters, none of which the tokenizer of `gguf_files` merges."""
    ids = [number for number, token in enumerate(TOKENS) if len(token) == 1 and token in "bcdefgijklmopqrsuvwxyz"]
    random = torch.Generator().manual_seed(seed)
    lines = torch.tensor(ids)[torch.randint(len(ids), (_LINES, 1), generator=random)]
    for _ in range(_LENGTH):
        logits = model(lines, use_cache=False).logits[:, -1, ids].float()
        drawn = torch.multinomial((2 * logits).softmax(-1), 1, generator=random)
        lines = torch.cat((lines, torch.tensor(ids)[drawn]), 1)
    return tuple("".join(TOKENS[token] for token in line) for line in lines.tolist())
