"""What a Modelfile adds to a model in ollama's store: system prompt, parameters, stops, chat template.

What is not followed is named, never dropped: an adapter is refused, as it would be another model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError

from h2o_stream.base.json_text import parse_json
from h2o_stream.config import SamplingConfig
from h2o_stream.errors import ConfigError, UnsupportedModelError
from h2o_stream.models.go_template import as_jinja
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.models.other_tools import ollama_layers
from h2o_stream.models.rendering import apply_template
from h2o_stream.models.templates import with_template

_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
             "repeat_penalty": "repetition_penalty"}  # fmt: skip
"""Parameters of ollama that are settings of `Sampler`, and their names there."""

_NO_INFLUENCE = ("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_gqa", "low_vram",
                 "f16_kv", "use_mmap", "use_mlock", "numa", "vocab_only")  # fmt: skip
"""Parameters about memory and speed; conversations may be of any length."""

_FIRST = re.compile(r"\S{0,24}")
"""The token that begins texts, which ollama's templates leave to the tokenizer."""

_SAMPLE = [{"role": role, "content": content} for role, content in (
    ("system", "The system prompt."), ("user", "One."), ("assistant", "Two."), ("user", "Three."))]  # fmt: skip


def with_modelfile(loaded: LoadedModel, notify: Callable[[str], None]) -> LoadedModel:
    """A model with what its Modelfile says, if it is one of ollama's; a line tells what that is.

    Raises UnsupportedModelError if it has an adapter.
    """
    layers = ollama_layers(loaded.name)
    if "adapter" in layers:
        raise UnsupportedModelError(f"{loaded.name} has an adapter (LoRA), which is not applied here; merge it first")
    used, unused = list[str](), list[str]()
    system = layers.get("system", "").strip() or None
    used += ["SYSTEM"] if system else []
    sampling, stops = _parameters(layers.get("params", ""), used, unused)
    model_stops = loaded.stops
    if (template := layers.get("template", "")).strip():
        changed = _changed(loaded.tokenizer, template)
        if changed is None:
            unused.append("TEMPLATE, in place of which the file's own chat template is used")
        elif changed:
            used.append("TEMPLATE")
            loaded.tokenizer.chat_template = changed
            model_stops = with_template(loaded.tokenizer)[1]
    unused += ["MESSAGE"] if "messages" in layers else []
    if used or unused:
        parts = [f"uses {', '.join(used)}"] if used else []
        notify(f"{loaded.name}: {'; '.join([*parts, *(f'does not use {what}' for what in unused)])}")
    return replace(loaded, stops=(*model_stops, *stops), system=system, own_sampling=sampling)


def _parameters(text: str, used: list[str], unused: list[str]) -> tuple[dict[str, float], tuple[str, ...]]:
    """Sampling settings and stops of a layer of parameters; what is used, and what is not, is added to the lists."""
    try:
        values = parse_json(text) if text else {}
    except ValueError:
        values = None
    if not isinstance(values, dict):
        unused.append("PARAMETER, which cannot be read")
        return {}, ()
    sampling, stops = dict[str, float](), tuple[str, ...]()
    for name, value in values.items():
        if name == "stop":
            stops = tuple(stop for stop in _listed(value) if isinstance(stop, str) and stop)
            used += ["stop"] if stops else []
        elif name in _SAMPLING and _is_setting(_SAMPLING[name], value):
            sampling[_SAMPLING[name]] = value
            used.append(f"{name} {value}")
        elif name not in _NO_INFLUENCE:
            unused.append(str(name)[:40])
    return sampling, stops


def _listed(value: Any) -> Iterator[Any]:
    yield from value if isinstance(value, list) else [value]


def _is_setting(name: str, value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    setting: Mapping[str, Any] = {name: value}
    try:
        SamplingConfig(**setting)
    except ConfigError:
        return False
    return True


def _changed(tokenizer: Any, template: str) -> str | None:
    """The template for Jinja; nothing if the tokenizer's makes the same of messages, None if it is too complicated."""
    jinja, original = as_jinja(template), tokenizer.chat_template
    if jinja is None:
        return None
    ours = _rendered(tokenizer)
    tokenizer.chat_template = jinja
    theirs = _rendered(tokenizer)
    tokenizer.chat_template = original
    if "" in theirs:
        return None
    same = all(
        mine.endswith(other) and _FIRST.fullmatch(mine.removesuffix(other))
        for mine, other in zip(ours, theirs, strict=True)
    )
    return "" if same else jinja


def _rendered(tokenizer: Any) -> list[str]:
    """What the chat template makes of a conversation with and without a system prompt; nothing where it fails."""
    texts = list[str]()
    for messages in (_SAMPLE, _SAMPLE[1:]):
        try:
            texts.append(apply_template(tokenizer, messages, add_generation_prompt=True))
        except (TemplateError, TypeError):
            texts.append("")
    return texts
