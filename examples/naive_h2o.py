"""H2O (arXiv 2306.14048) in plain torch, to be read from top to bottom: the policy `h2o-paper` of this package.

    python examples/naive_h2o.py "Tell me a story." 200      # a message, and the most tokens of the reply

Attention keeps returning to a few tokens, the heavy hitters. So each KV head of each layer keeps only the tokens that
received the most attention so far and the most recent ones, and a stream can run forever in a cache of that size. This
code copies the whole cache in every step; h2o_stream keeps the same tokens in fixed slots, many times faster.

Shapes: Hq query heads, Hkv KV heads, Q new tokens, K tokens in the cache, D head size. There is one stream.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from h2o_stream.config import DEFAULT_MODEL, ModelConfig
from h2o_stream.loading.transformers_model import load


class HeavyHitters:
    """What one layer keeps: of each KV head so many heavy hitters and recent tokens, oldest first."""

    def __init__(self, config: Any, heavy: int, recent: int) -> None:
        self.heavy, self.recent, self.theta = heavy, recent, config.rope_parameters["rope_theta"]
        self.key = self.value = torch.zeros(config.num_key_value_heads, 0, config.head_dim)  # [Hkv, K, D]
        self.score = torch.zeros(config.num_key_value_heads, 0)  # [Hkv, K], the attention received so far
        self.index = self.score.long()  # [Hkv, K], the place in the stream

    def attend(self, query: Tensor, key: Tensor, value: Tensor, start: int) -> Tensor:
        """Attention of the tokens from index `start` on: [Hq, Q, D], [Hkv, Q, D] and [Hkv, Q, D] to [Hq, Q, D]."""
        (heads, new, _), index = key.shape, torch.arange(start, start + key.shape[1])
        self.key, self.value = torch.cat((self.key, key), 1), torch.cat((self.value, value), 1)
        self.score = torch.cat((self.score, torch.zeros(heads, new)), 1)
        self.index = torch.cat((self.index, index.expand(heads, -1)), 1)

        # A position is the place in the cache, not in the stream. So it never exceeds what the model was trained for.
        positions = torch.arange(self.key.shape[1])
        keys = self.rotate(self.key, positions)[:, None]
        queries = self.rotate(query, positions[-new:]).view(
            heads, -1, *key.shape[1:]
        )  # Hq / Hkv query heads share a KV head
        logits = queries @ keys.mT / query.shape[-1] ** 0.5  # [Hkv, Hq / Hkv, Q, K]
        later = positions > positions[-new:, None]
        weights = logits.masked_fill(later, -torch.inf).softmax(-1)
        output: Tensor = weights @ self.value[:, None]

        self.score += weights.sum((1, 2))
        self.evict()
        return output.flatten(0, 1)

    def evict(self) -> None:
        """Of the tokens before the recent ones, keep those with the highest scores."""
        heads, tokens = self.score.shape
        if tokens > self.heavy + self.recent:
            heavy = self.score[:, : tokens - self.recent].topk(self.heavy).indices.sort().values
            recent = torch.arange(tokens - self.recent, tokens).expand(heads, -1)
            kept = torch.arange(heads)[:, None], torch.cat((heavy, recent), 1)
            self.key, self.value = self.key[kept], self.value[kept]
            self.score, self.index = self.score[kept], self.index[kept]

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE: rotate x [..., n, D] to positions [n]."""
        half = x.shape[-1] // 2
        angles = positions[:, None] * self.theta ** (-torch.arange(half) / half)
        cos, sin, first, second = angles.cos(), angles.sin(), x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **more: Any) -> tuple[Tensor, None]:
    """What transformers calls in each layer in place of its own attention."""
    output = more["layers"][module.layer_idx].attend(query[0], key[0], value[0], more["start"])
    return output.transpose(0, 1)[None], None


AttentionInterface.register("naive_h2o", attention)


class Stream:
    """A stream of tokens through a Llama."""

    def __init__(self, model: Any, heavy: int, recent: int) -> None:
        model.set_attn_implementation("naive_h2o")
        self.model, self.seen = model, 0
        self.layers = [HeavyHitters(model.config, heavy, recent) for _ in model.model.layers]

    def feed(self, tokens: list[int]) -> Tensor:
        """Feed tokens and return their logits [Q, V]."""
        ids = torch.tensor([tokens])
        zeros = torch.zeros_like(ids)  # at position 0 the model's own RoPE rotates nothing
        more: Any = {"layers": self.layers, "start": self.seen, "use_cache": False}
        logits: Tensor = self.model(ids, position_ids=zeros, **more).logits[0]
        self.seen += len(tokens)
        return logits


@torch.no_grad()
def main(message: str, max_tokens: str = "100", model: str = DEFAULT_MODEL) -> None:
    """Reply to a message from a cache of 64 tokens, and say which of them the first head of the last layer keeps."""
    loaded = load(ModelConfig(model, dtype="float32", device="cpu", quantize="none"))
    tokenizer, stream = loaded.tokenizer, Stream(loaded.model, heavy=32, recent=32)
    turn = [{"role": "user", "content": message}]
    prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
    reply = [int(stream.feed(prompt)[-1].argmax())]
    while reply[-1] != tokenizer.eos_token_id and len(reply) < int(max_tokens):
        print(tokenizer.decode(reply[-1:]), end="", flush=True)
        reply.append(int(stream.feed(reply[-1:])[-1].argmax()))
    kept = [tokenizer.decode((prompt + reply)[index]) for index in stream.layers[-1].index[0].tolist()]
    print(f"\n\nKept {len(kept)} of {stream.seen} tokens:", kept)


if __name__ == "__main__":
    main(*sys.argv[1:])
