"""Fallback chat template for models without one: base models such as Meta-Llama-3-8B."""

from __future__ import annotations

from typing import Any

FALLBACK_TEMPLATE = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n' }}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""A plain dialogue that any base model can continue."""

FALLBACK_STOPS = ("\nUser:",)
"""Base models do not end their turn but continue with the user's; replies stop there."""


def with_template(tokenizer: Any) -> tuple[Any, tuple[str, ...]]:
    """The tokenizer with a chat template, given the fallback if it has none, and strings that end replies."""
    if tokenizer.chat_template:
        return tokenizer, ()
    tokenizer.chat_template = FALLBACK_TEMPLATE
    return tokenizer, FALLBACK_STOPS
