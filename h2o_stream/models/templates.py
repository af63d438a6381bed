"""Fallback chat template for models without one: base models such as Meta-Llama-3-8B."""

from __future__ import annotations

from typing import Any

from h2o_stream.models.turn_tokens import mark_controls, stop_texts

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


def with_template(tokenizer: Any) -> tuple[Any, tuple[str, ...]]:
    """The tokenizer, ready for conversations, and strings that end replies.

    It has a chat template, the fallback if it had none; and what frames turns are tokens of their own.
    """
    mark_controls(tokenizer)
    tokenizer.chat_template = tokenizer.chat_template or FALLBACK_TEMPLATE
    return tokenizer, stop_texts(tokenizer)
