"""The chat template for models that bring none: base models such as Meta-Llama-3-8B."""

from __future__ import annotations

FALLBACK_TEMPLATE = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n' }}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""A plain dialogue, which any base model continues."""

FALLBACK_STOPS = ("\nUser:",)
"""A base model does not end its turn, it goes on with the user's: that is where a reply stops."""
