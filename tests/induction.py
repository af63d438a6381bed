"""A model that copies, built by hand: its retrieval head is known, and nothing was trained.

Two layers of four heads. In the first, one head looks at the previous token and writes down which one it was. In the
second, one head looks for places whose previous token is the present one and predicts what stands there: an induction
head (arXiv 2209.11895). The other heads attend to everything alike and write nothing.
"""

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, HEADS, SIZE = 512, 4, 128
CODE = 48
"""Numbers that stand for a token: as many dimensions of a head as RoPE leaves almost alone."""

SLOW = [*range(SIZE // 2 - CODE // 2, SIZE // 2), *range(SIZE - CODE // 2, SIZE)]
FAST = torch.arange(24)
TOKEN, PREVIOUS, NEXT, ONE = slice(0, CODE), slice(CODE, 2 * CODE), slice(2 * CODE, 3 * CODE), 3 * CODE
"""Parts of the residual stream: the token, the one before, the prediction, and a constant."""

INDUCTION = (1, 2)
"""Layer and head."""


def make_induction_model() -> LlamaForCausalLM:
    """The model, in float32."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=160, intermediate_size=8, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, head_dim=SIZE, max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e8},
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for weights in model.parameters():
        if weights.dim() == 2:
            torch.nn.init.zeros_(weights)
    generator = torch.Generator().manual_seed(0)
    codes = torch.nn.functional.normalize(torch.randn(VOCABULARY, CODE, generator=generator), dim=-1)
    identity = torch.eye(CODE)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, TOKEN] = codes
        model.model.embed_tokens.weight[:, ONE] = 1.0
        model.lm_head.weight[:, NEXT] = 2 * codes
        first, second = (layer.self_attn for layer in model.model.layers)

        frequencies = 1e8 ** (-2.0 * FAST / SIZE)
        query, key, value, output = _weights_of(first, 1)
        key[FAST, ONE] = 1.0
        query[FAST, ONE] = 4 * frequencies.cos()
        query[FAST + SIZE // 2, ONE] = -4 * frequencies.sin()
        value[:CODE, TOKEN] = 0.1 * identity
        output[PREVIOUS, :CODE] = identity

        query, key, value, output = _weights_of(second, INDUCTION[1])
        query[SLOW, TOKEN] = 4 * identity
        key[SLOW, PREVIOUS] = 4 * identity
        value[:CODE, TOKEN] = identity
        output[NEXT, :CODE] = identity
    return model


def _weights_of(attention: torch.nn.Module, head: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of one head's query, key, value and output weights."""
    rows = slice(head * SIZE, (head + 1) * SIZE)
    query, key, value = (getattr(attention, f"{name}_proj").weight[rows] for name in "qkv")
    return query, key, value, attention.o_proj.weight[:, rows]
