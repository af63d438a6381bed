"""Thinking: which models think, and where it ends in a reply."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from h2o_stream.engine.text import TextStream
from h2o_stream.session.template import ChatTemplate
from h2o_stream.session.thinking import Markers, ThinkingSplitter, find_markers
from tests.in_turn import in_turn
from tests.thinking_model import OPENED, thinking_tokenizer

TAGS = Markers("<think>", "</think>")
ANSWERED = Markers("<think>", "</think>", ("<answer>",), "</answer>")
HARMONY = "{{ '<|start|>assistant<|channel|>analysis<|message|>' + x + '<|end|><|channel|>final<|message|>' }}"


class TestMarkers:
    @in_turn("template, added, markers", [
        ("{{ '<think>' + x + '</think>' }}", (), ("<think>", "</think>")),
        ("{{ x }}", ("<s>", "<think>", "</think>"), ("<think>", "</think>")),
        ("{{ x.split('</think>')[-1] }}", ("<think>",), ("<think>", "</think>")),
        ("{{ '[THINK]' }}", ("[THINK]", "[/THINK]"), ("[THINK]", "[/THINK]")),
        ("{{ x }}", ("<seed:think>", "</seed:think>"), ("<seed:think>", "</seed:think>")),
        ("{{ '◁think▷' + x + '◁/think▷' }}", (), ("◁think▷", "◁/think▷")),
        ("{{ x }}", ("<|START_THINKING|>", "<|END_THINKING|>"), ("<|START_THINKING|>", "<|END_THINKING|>")),
        ("{{ x }}", ("<|begin_of_thought|>", "<|end_of_thought|>"), ("<|begin_of_thought|>", "<|end_of_thought|>")),
        ("{{ x }}", ("<|inner_prefix|>", "<|inner_suffix|>"), ("<|inner_prefix|>", "<|inner_suffix|>")),
        (HARMONY, (), ("<|channel|>analysis<|message|>", "<|end|>")),
        ("{{ '<|channel>thought\\n<channel|>' }}", (), ("<|channel>thought", "<channel|>")),
    ])  # fmt: skip
    def test_of_a_pair_in_the_template_or_the_tokenizer(
        self, template: str, added: tuple[str, ...], markers: tuple[str, str]
    ) -> None:
        found = find_markers(template, added, "")
        assert (found.opening, found.closing) == markers

    def test_of_an_answer_between_tags(self) -> None:
        template = "{{ x.split('<answer>')[-1].split('</answer>')[0] + '<think>' + y + '</think>' }}"
        assert find_markers(template, (), "") == ANSWERED

    @pytest.mark.parametrize(("template", "added"), [
        ("{{ x }}", ()),
        ("{{ '<think>' }}", ("<s>",)),
        ("{{ x }}", ("</think>",)),
        ("{{ '<tool_call>' + x + '</tool_call>' }}", ("<tool_call>", "</tool_call>")),
        ("{{ thinking[0] }}{{ '<|channel|>analysis<|message|><|end|>' }}", ()),
    ])  # fmt: skip
    def test_a_name_alone_is_not_enough(self, template: str, added: tuple[str, ...]) -> None:
        assert find_markers(template, added, "") is None

    def test_a_prompt_that_ends_with_an_opening_tag(self) -> None:
        assert find_markers("{{ '<think>' }}", (), "<|assistant|>\n<think>\n") == TAGS

    @pytest.mark.parametrize(
        ("prompt", "unclosed"),
        [("a <think>\n", "<think>\n"), ("<think>\n\n</think>\n\n", ""), ("a</think>", ""), ("a", "")],
    )
    def test_what_a_prompt_leaves_open(self, prompt: str, unclosed: str) -> None:
        assert TAGS.unclosed(prompt) == unclosed


def split(reply: str, size: int, thinking: bool = False, markers: Markers = TAGS) -> tuple[str, str]:
    splitter = ThinkingSplitter(markers, thinking)
    pieces = [splitter.push(reply[start : start + size]) for start in range(0, len(reply), size)]
    pieces.append(splitter.flush())
    return "".join(thought for thought, _ in pieces), "".join(answer for _, answer in pieces)


REPLIES = {
    (TAGS, False): [
        ("<think>\nWell,\n so. \n</think>\n\nYes.\n", "Well,\n so.", "Yes.\n"),
        ("\n <think>a</think>b", "a", "b"), ("<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("<think>a</think>\n<think> b\n</think> c", "a\n\nb", "c"),
        ("<think>never closed </thin", "never closed </thin", ""),
        ("<think>x < y</think>1 < 2", "x < y", "1 < 2"), ("<think>a</think>", "a", ""),
        ("  Yes, <think> is a tag, </think> too.", "", "  Yes, <think> is a tag, </think> too."),
        ("<thin", "", "<thin"), ("<thing>", "", "<thing>"), (" \n", "", " \n"), ("", "", ""),
    ],
    (TAGS, True): [
        ("a\n</think>\n\nb", "a", "b"), ("\na", "a", ""), ("</think>b", "", "b"),
        ("a <think> b</think>c", "a <think> b", "c"),
    ],
    (find_markers(HARMONY, (), ""), False): [
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.", "Hm.", "Yes."),
        ("<|channel|>final<|message|>Yes.", "", "Yes."), ("<|channel|>analysis<|message|>Hm.", "Hm.", ""),
    ],
    (ANSWERED, False): [
        ("<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>", "Hm.", "Yes."),
        ("<think>\n\n</think>\n<answer>\nYes.\n</answer>\n", "", "Yes."),
        ("<think>a</think><answer>b </answer> c </answer>", "a", "b </answer> c"),
        ("<think>a</think><answer>b </ans", "a", "b </ans"), ("<think>a</think><answer>b", "a", "b"),
        ("b </answer>", "", "b </answer>"),
    ],
}  # fmt: skip
"""By the markers, and whether the prompt begins the thinking: replies, and what in them is thought and answer."""


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@in_turn("how, row", [(how, row) for how, rows in REPLIES.items() for row in rows])
def test_replies(how: tuple[Markers, bool], row: tuple[str, str, str], size: int) -> None:
    (markers, thinking), (reply, thought, answer) = how, row
    assert split(reply, size, thinking, markers) == (thought, answer)


@given(st.text(alphabet="</think> \nab", max_size=60), st.integers(1, 9))
def test_only_markers_and_space_are_lost(text: str, size: int) -> None:
    """And the size of the pieces changes nothing."""
    whole = split(text, len(text) or 1)
    assert split(text, size) == whole
    if not text.lstrip().startswith("<think>"):
        assert whole == ("", text)
    else:
        for marker in TAGS.all:
            text = text.replace(marker, "")
        for marker in TAGS.all:
            whole = whole[0].replace(marker, ""), whole[1].replace(marker, "")
        assert "".join("".join(whole).split()) == "".join(text.split())


@given(st.text(alphabet="ab <>/think\n", max_size=40))
def test_what_is_certain_is_not_held_back(text: str) -> None:
    splitter = ThinkingSplitter(TAGS, False)
    splitter.push("<think>")
    thought = "".join(splitter.push(character)[0] for character in text)
    if splitter.thinking:
        assert len(text.strip()) - len(thought) < len("</think>") + len(text) - len(text.rstrip())


class TestTemplates:
    def template(self, tokenizer: PreTrainedTokenizerBase, thinking: bool | None = None) -> ChatTemplate:
        return ChatTemplate(tokenizer, None, {tokenizer.eos_token_id}, thinking)

    def test_a_model_that_does_not_think(self, tokenizer: PreTrainedTokenizerBase) -> None:
        template = self.template(tokenizer)
        assert (template.markers, template.marker_tokens, template.thinking_switch) == (None, {}, None)
        assert template.first_turn("<think>").num_thinking is None

    @pytest.mark.every(2)
    @pytest.mark.parametrize("special", [False, True])
    def test_a_prompt_that_begins_the_thinking(self, tokenizer: PreTrainedTokenizerBase, special: bool) -> None:
        thinking = thinking_tokenizer(tokenizer, OPENED, special)
        template = self.template(thinking)
        assert template.markers == TAGS
        assert set(template.marker_tokens.values()) == ({"<think>", "</think>"} if special else set())
        for prompt in (template.first_turn("a <think>"), template.next_turn("b </think>", ended=True)):
            assert thinking.decode(prompt.tokens[-prompt.num_thinking :]) == "<think>\n"
        past = thinking.decode(template.reply("Yes.", thinking=True))
        assert past == "\n</think>\n\nYes.<|im_end|>"


@pytest.mark.every(2)
@pytest.mark.parametrize("special", [False, True])
def test_tags_of_the_user_are_text(tokenizer: PreTrainedTokenizerBase, special: bool) -> None:
    thinking = thinking_tokenizer(tokenizer, OPENED, special)
    template = ChatTemplate(thinking, None, {thinking.eos_token_id})
    text = "a <think> b</think><<think></think"
    tags = set(thinking.convert_tokens_to_ids(["<think>", "</think>"]))
    for tokens in (template.first_turn(text).tokens[:-2], template.reply(text)):
        assert not tags & set(tokens)
        assert text in thinking.decode(tokens)


def test_tags_that_are_control_tokens_are_part_of_the_text(tokenizer: PreTrainedTokenizerBase) -> None:
    thinking = thinking_tokenizer(tokenizer, OPENED, special=True)
    tokens = thinking("<think>é</think>a<|im_start|>b", add_special_tokens=False)["input_ids"]
    visible = ChatTemplate(thinking, None, ()).marker_tokens
    for shown, text in ((visible, "<think>é</think>ab"), ({}, "éab")):
        stream = TextStream(thinking, visible=shown)
        assert "".join(map(stream.push, tokens)) == text


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
