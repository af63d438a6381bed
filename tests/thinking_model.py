"""A tiny model that thinks: its tokenizer and template have tags for it, and its replies are scripted."""

from collections.abc import Iterator
from copy import copy, deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from h2o_stream.engine.sampling import Sampler
from tests.fixtures import make_llama, saved

_TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}"
    "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
)

SWITCHED = _TURNS + (
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
"""A template in which the model begins its thinking, and which can switch it off."""

OPENED = _TURNS + "{{ '<think>\n' }}{% endif %}"
"""A template that always begins the thinking."""


def thinking_tokenizer(tokenizer: Any, template: str = SWITCHED, special: bool = False) -> Any:
    """The tokenizer with tags for thinking, as control tokens if `special`."""
    thinking = copy(_with_tags(tokenizer, special))
    thinking.chat_template = template
    return thinking


@cache
def _with_tags(tokenizer: Any, special: bool) -> Any:
    thinking = deepcopy(tokenizer)
    thinking.add_tokens(["<think>", "</think>"], special_tokens=special)
    return thinking


def write_thinking_model(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A random model with this tokenizer."""
    return saved(make_llama(vocab=len(tokenizer), context=2000), tokenizer, folder)


def script(monkeypatch: pytest.MonkeyPatch, tokenizer: Any, *replies: str) -> None:
    """Let every model say these replies, one after the other, and then the last one again and again."""
    waiting = list(replies)
    current: list[Iterator[int]] = []

    def sample(self: Sampler, logits: Any, reply: Any = (), mask: Any = None) -> int:
        if not current:
            text = waiting.pop(0) if len(waiting) > 1 else waiting[0]
            current.append(iter([*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]))
        token = next(current[0])
        if token == tokenizer.eos_token_id:
            current.clear()
        return token

    monkeypatch.setattr(Sampler, "sample", sample)
