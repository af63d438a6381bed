"""Text that a tiny random model predicts better than any other model does: what it says itself."""

from typing import Any

import torch

from tests.gguf_files import TOKENS

_LINES, _LENGTH = 12, 24


def likely_lines(model: Any, seed: int = 0) -> tuple[str, ...]:
    """Lines of letters, which follow one another; the tokenizer of `gguf_files` merges none of them."""
    ids = [number for number, token in enumerate(TOKENS) if len(token) == 1 and token in "bcdefgijklmopqrsuvwxyz"]
    random = torch.Generator().manual_seed(seed)
    said, cache = [ids[0]], None
    for _ in range(_LINES * _LENGTH - 1):
        output = model(torch.tensor([said[-1:]]), past_key_values=cache, use_cache=True)
        cache, shares = output.past_key_values, (2 * output.logits[0, -1, ids].float()).softmax(-1)
        said.append(ids[int(torch.multinomial(shares, 1, generator=random))])
    text = "".join(TOKENS[token] for token in said)
    return tuple(text[start : start + _LENGTH] for start in range(0, len(text), _LENGTH))
