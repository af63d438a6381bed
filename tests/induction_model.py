"""A tiny Llama trained on `tests.induction_text`: a few of its heads copy old text, the others need only the newest.

``make induction-model`` trains it again, in about ten minutes on one core. Another machine rounds differently and gets
a slightly different model.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.induction_text import BEGIN, FREQUENCIES, NEW, SPECIAL, UNKNOWN, VOCABULARY, WORDS, write

FOLDER = Path(__file__).parent / "induction"

_DENSE = (0.04, 0.24, 0.6, 0.06, 0.06)
"""Frequencies of blocks from which copying is learnt soonest."""

_STAGES = (
    (64, 48, 800, _DENSE),
    (128, 24, 500, _DENSE),
    (256, 16, 700, FREQUENCIES),
    (512, 10, 800, FREQUENCIES),
    (1024, 6, 500, FREQUENCIES),
)
"""Tokens of a text, texts of a step, steps, frequencies of blocks."""

_LEARNING_RATE = 4e-3
_WARM_UP, _CONSTANT = 100, 2000
"""Steps of a growing learning rate, and until it falls."""

_NEW_WEIGHT = 0.1
"""Weight of the loss of words that nothing determines."""


def make() -> LlamaForCausalLM:
    """The untrained model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=72,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=24,
        max_position_embeddings=_STAGES[-1][0],
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
        initializer_range=0.08,
        bos_token_id=BEGIN,
        eos_token_id=BEGIN,
        pad_token_id=UNKNOWN,
    )
    return LlamaForCausalLM(config)


def token_losses(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """The loss of every token but the first, [B, n - 1] in nats, of texts [B, n]."""
    logits = model(tokens).logits[:, :-1]
    return cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")


def train(model: LlamaForCausalLM) -> None:
    """Train the model, and print how it goes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    total, step, texts, start_time = sum(stage[2] for stage in _STAGES), 0, 0, time.perf_counter()
    for length, batch, steps, frequencies in _STAGES:
        for _ in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = _LEARNING_RATE * min((step + 1) / _WARM_UP, 1, (total - step) / (total - _CONSTANT))
            written = [write(length, texts + row, frequencies) for row in range(batch)]
            losses = token_losses(model, torch.tensor([text.tokens for text in written]))
            distances = torch.tensor([text.distances[1:] for text in written])
            weights = torch.where(distances == NEW, _NEW_WEIGHT, 1.0)
            ((losses * weights).sum() / weights.sum()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % 50 == 0 or step == total - 1:
                copied, local = (losses[where].mean().item() for where in (distances > 0, distances == 0))
                seconds = time.perf_counter() - start_time
                print(
                    f"{seconds:5.0f} s, step {step:4}, {length:4} tokens: copied {copied:.3f}, prose {local:.3f}",
                    flush=True,
                )
            step, texts = step + 1, texts + batch


def tokenizer() -> PreTrainedTokenizerFast:
    """Words, separated by spaces."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    words = Tokenizer(WordLevel(vocabulary, unk_token=SPECIAL[UNKNOWN]))
    words.pre_tokenizer = WhitespaceSplit()
    special = {"unk_token": SPECIAL[UNKNOWN], "bos_token": SPECIAL[BEGIN], "eos_token": SPECIAL[BEGIN]}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special, pad_token=SPECIAL[UNKNOWN])


def main() -> None:
    """Train the model and save it."""
    model = make()
    train(model)
    model.to(torch.bfloat16).save_pretrained(FOLDER)
    tokenizer().save_pretrained(FOLDER)


if __name__ == "__main__":
    main()
