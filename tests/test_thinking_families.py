"""Thinking in the forms that chat templates of today's families have: marks, switches, what a prompt begins."""

from dataclasses import dataclass

import pytest
from transformers import PreTrainedTokenizerBase

from h2o_stream.session.template import ChatTemplate
from h2o_stream.session.thinking import Markers, ThinkingSplitter
from tests.thinking_model import thinking_tokenizer

TAGS = Markers("<think>", "</think>")
FOLLOWING = "</think>\n\nYes."
WHOLE = f"<think>\nHm.\n{FOLLOWING}"


def turns(generation: str, user: str = "m.content", reply: str = "m.content.split('</think>')[-1]") -> str:
    """A template: how it shows the user's messages and past replies, and what it ends the prompt with."""
    return (
        "{% set ns = namespace(thinks=true) %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        f"{{% if m.role == 'assistant' %}}{{{{ {reply} }}}}{{% elif m.role == 'user' %}}{{{{ {user} }}}}"
        "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}"
        "{% if '/no_think' in m.content %}{% set ns.thinks = false %}{% endif %}{% endfor %}"
        f"{{% if add_generation_prompt %}}{{{{ '<|im_start|>assistant\n' }}}}{generation}{{% endif %}}"
    )


def chosen(on: str, off: str, condition: str = "enable_thinking is defined and not enable_thinking") -> str:
    return f"{{% if {condition} %}}{{{{ '{off}' }}}}{{% else %}}{{{{ '{on}' }}}}{{% endif %}}"


@dataclass(frozen=True)
class Form:
    """A template, its marks and switch, and what prompts end with after the assistant's name: as it is, on, and off."""

    template: str
    switch: str | None
    endings: tuple[str, str, str]
    reply: str = FOLLOWING
    markers: Markers = TAGS


FORMS = {
    "Qwen 3.5": Form(
        turns(chosen("<think>\n", "<think>\n\n</think>\n\n")), "enable_thinking",
        ("<think>\n", "<think>\n", "<think>\n\n</think>\n\n"),
        f"Hm.\n{FOLLOWING}",
    ),
    "LFM2 Thinking": Form(
        "{% set keep_past_thinking = keep_past_thinking | default(false) %}"
        + turns("", reply="m.content if keep_past_thinking else m.content.split('</think>')[-1] | trim"),
        None, ("", "", ""), WHOLE,
    ),
    "SmolLM3": Form(
        turns("{% set enable_thinking = enable_thinking | default(true) %}" + chosen("", "<think>\n\n</think>\n")),
        "enable_thinking", ("", "", "<think>\n\n</think>\n"), WHOLE,
    ),
    "Granite": Form(
        turns(chosen("", "", "thinking"), reply="m.content.split('<response>')[-1].split('</response>')[0]")
        .replace("{% set ns", "{% if thinking %}{{ 'Write <think></think> and <response></response>.' }}{% endif %}"
        "{% set ns"),
        "thinking", ("", "", ""), "<think>\nHm.\n</think>\n<response>Yes.</response>",
        Markers("<think>", "</think>", ("<response>",), "</response>"),
    ),
    "GLM 4.5": Form(
        turns(chosen("", "<think></think>"), "m.content + ('/nothink' if enable_thinking is defined and not "
        "enable_thinking else '')", "'<think></think>' + m.content.split('</think>')[-1]"),
        "enable_thinking", ("", "", "<think></think>"), WHOLE,
    ),
    "GLM 4.7": Form(
        turns(chosen("<think>", "</think>")), "enable_thinking", ("<think>", "<think>", "</think>"),
        f"Hm.{FOLLOWING}",
    ),
    "Hunyuan": Form(
        turns(chosen("", "<think>\n\n</think>\n"), reply="m.content.split('<answer>')[-1].split('</answer>')[0]"),
        "enable_thinking", ("", "", "<think>\n\n</think>\n"),
        "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>", Markers("<think>", "</think>", ("<answer>",), "</answer>"),
    ),
    "ERNIE": Form(
        turns("{{ '<think>\n' }}", reply="'<response>\n' + m.content.split('</think>')[-1] + '\n</response>'"),
        None, ("<think>\n", "<think>\n", "<think>\n"), "Hm.\n</think>\n\n<response>\nYes.\n</response>",
        Markers("<think>", "</think>", ("<response>",), "</response>"),
    ),
    "Nemotron Nano 2": Form(
        turns(chosen("<think>\n", "<think></think>", "not ns.thinks"),
        "m.content.replace('/no_think', '').replace('/think', '').strip()"),
        "/no_think", ("<think>\n", "<think>\n", "<think></think>"), f"Hm.\n{FOLLOWING}",
    ),
    "Nemotron 3 Nano": Form(
        turns(chosen("<think>\n", "<think></think>", "not (enable_thinking | default(true))")),
        "enable_thinking", ("<think>\n", "<think>\n", "<think></think>"), f"Hm.\n{FOLLOWING}",
    ),
    "Seed-OSS": Form(
        turns(chosen("", "<seed:think><seed:cot_budget_reflect>0</seed:cot_budget_reflect></seed:think>",
        "thinking_budget is defined and thinking_budget == 0"), reply="m.content.split('</seed:think>')[-1]"),
        "thinking_budget", ("", "", "<seed:think><seed:cot_budget_reflect>0</seed:cot_budget_reflect></seed:think>"),
        "<seed:think>\nHm.\n</seed:think>\n\nYes.", Markers("<seed:think>", "</seed:think>"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_form(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    form = FORMS[name]
    thinking = thinking_tokenizer(tokenizer, form.template)
    for value, ending in zip((None, True, False), form.endings, strict=True):
        template = ChatTemplate(thinking, None, {thinking.eos_token_id}, value)
        assert (template.markers, template.thinking_switch) == (form.markers, form.switch)
        for prompt in (template.first_turn("a /think"), template.next_turn("b", ended=True)):
            text = thinking.decode(prompt.tokens)
            assert text.endswith(f"<|im_start|>assistant\n{ending}")
            begun = form.markers.unclosed(ending)
            assert prompt.num_thinking == (len(thinking(begun, add_special_tokens=False)["input_ids"]) or None)
    splitter = ThinkingSplitter(form.markers, bool(form.markers.unclosed(form.endings[0])))
    thought, answer = splitter.push(form.reply)
    rest = splitter.flush()
    assert (thought + rest[0], (answer + rest[1]).strip()) == ("Hm.", "Yes.")
