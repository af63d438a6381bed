"""Calls of tools: how models write them, and histories with them."""

import copy
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from h2o_stream.config import CacheConfig
from h2o_stream.serve import aside, tools
from h2o_stream.serve.errors import ApiError
from h2o_stream.serve.messages import Exchange, Reply, as_fed, chain, next_hash, parse_dialogue
from h2o_stream.serve.requests import Options
from h2o_stream.session.calls import Call, CallFormat, CallSplitter, find_format
from tests.in_turn import in_turn
from tests.test_tools import HERMES, TIME

LLAMA = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>ipython\n{{ m.content | tojson }}<|im_end|>"
    "{% elif m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('single calls only') }}{% endif %}"
    "<|im_start|>assistant\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "<|im_end|>{% else %}<|im_start|>{{ m.role }}\n{% if loop.first and tools %}{{ tools | tojson }}{% endif %}"
    "{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}"
    "[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}{{ m.tool_call_id }}"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    '{% set out = c.function | tojson %}{{ out[:-1] }}, "id": "{{ c.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]<|im_end|>"
    "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
NAMED = MISTRAL.replace("[TOOL_CALLS] [", "").replace("]<|im_end|>", "<|im_end|>", 1).replace(
    '{% set out = c.function | tojson %}{{ out[:-1] }}, "id": "{{ c.id }}"}',
    "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}",
).replace("{% if not loop.last %}, {% endif %}", "")  # fmt: skip
XML = MISTRAL.replace("{% set out = c.function | tojson %}{{ out[:-1] }}", "<tool>{{ c.function.name }}</tool>")

FORMATS = {
    HERMES: CallFormat("<tool_call>", "</tool_call>", "arguments"),
    LLAMA: CallFormat("", "", "parameters", several=False),
    MISTRAL: CallFormat("[TOOL_CALLS]", "", "arguments", listed=True),
    NAMED: CallFormat("[TOOL_CALLS]", "", "", "[ARGS]"),
    XML: None,
}
ODD_JSON = ["NaN", "-Infinity", "1e999", "9" * 5000, '{"a": ' * 400 + "1" + "}" * 400, "[" * 300 + "]" * 300]
"""What Python reads as JSON, or would, and nobody else."""

BERN, NOW = Call("weather", {"city": "Bern"}), Call("time", {})
WRITTEN = {
    HERMES: ["<tool_call>\n", '{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>', "\n<tool_call>\n",
             '{"name": "time", "arguments": {}}\n</tool_call>'],
    LLAMA: ['{"name": "weather", ', '"parameters": {"city": "Bern"}}; {"name": "time", "parameters": {}}'],
    MISTRAL: ["[TOOL_CALLS]", ' [{"name": "weather", "arguments": {"city": "Bern"}}, ',
              '{"name": "time", "arguments": {}}]'],
    NAMED: ["[TOOL_CALLS]", 'weather[ARGS]{"city": "Bern"}', "[TOOL_CALLS]time", "[ARGS]{}"],
}  # fmt: skip
WARM = {"role": "user", "content": "Is it warm in Bern?"}


class TestFormat:
    @pytest.mark.parametrize(("template", "form"), FORMATS.items(), ids=range(len(FORMATS)))
    def test_it_is_found_by_the_template(
        self, tokenizer: PreTrainedTokenizerBase, template: str, form: CallFormat | None
    ) -> None:
        changed = copy.copy(tokenizer)
        changed.chat_template = template
        assert find_format(changed) == form

    def test_a_template_without_tools_has_none(self, tokenizer: PreTrainedTokenizerBase) -> None:
        assert find_format(tokenizer) is None

    @in_turn("template, pieces", WRITTEN.items())
    @in_turn("before", ["", "I will look.\n"])
    def test_calls_are_read_whole_and_piece_by_piece(self, template: str, pieces: list[str], before: str) -> None:
        form = FORMATS[template]
        assert form is not None
        if not form.opening and before:
            assert form.parse(before + "".join(pieces)) == (before + "".join(pieces), ())
            return
        assert form.parse(before + "".join(pieces)) == (before.strip(), (BERN, NOW))
        for parts in ([before, *pieces], list(before + "".join(pieces))):
            splitter = CallSplitter(form)
            given = "".join(map(splitter.push, parts))
            assert (given, splitter.flush()) == (before.strip(), ("", (BERN, NOW)))

    @in_turn("template", WRITTEN)
    @in_turn("text", ["Plain < text [of] {any} kind.", '{"name": 3}', "<tool_call>\n{", "[TOOL_CALLS]x", "  "])
    def test_what_is_no_call_is_text(self, template: str, text: str) -> None:
        form = FORMATS[template]
        assert form is not None
        splitter = CallSplitter(form)
        assert form.parse(text) == (text, ())
        given = "".join(map(splitter.push, text))
        rest, calls = splitter.flush()
        assert (given + rest, calls) == (text, ())

    def test_text_between_calls_and_after_them(self) -> None:
        """What a client sends again of a streamed or whole reply is what was said."""
        form = FORMATS[HERMES]
        assert form is not None
        first, second = "".join(WRITTEN[HERMES][:2]), "".join(WRITTEN[HERMES][2:])
        for text, expected in [
            (f"Wait. {first} And {second} Done.", ("Wait. And Done.", (BERN, NOW))),
            (f"Wait. {first} <tool_call>{{", ("Wait.", (BERN,))),
        ]:
            assert form.parse(text) == expected
            assert form.parse(expected[0]) == (expected[0], ())
            splitter = CallSplitter(form)
            given = "".join(map(splitter.push, text))
            rest, calls = splitter.flush()
            assert (given + rest, calls) == expected

    def test_an_answer_in_json_is_no_call(self) -> None:
        form = FORMATS[LLAMA]
        assert form is not None
        for text in ('{"name": "Bob", "age": 3}', '{"name": " ", "parameters": {}}'):
            assert form.parse(text) == (text, ())

    @pytest.mark.parametrize("odd", ODD_JSON, ids=lambda text: text[:9])
    def test_what_only_python_reads_is_no_call(self, odd: str) -> None:
        for form in filter(None, FORMATS.values()):
            call = f'{{"name": "time", "{form.key}": {{"x": {odd}}}}}' if form.key else f'time[ARGS]{{"x": {odd}}}'
            text = f"{form.opening}{call}{form.closing}"
            assert form.of([TIME]).parse(text) == (text, ())
        again = copy.deepcopy(CALLING)
        again["tool_calls"][0]["function"]["arguments"] = f'{{"x": {odd}}}'  # type: ignore[index]
        (exchange,) = parse_dialogue([WARM, again, WARM]).past
        assert exchange.reply.calls[0].arguments == {"arguments": f'{{"x": {odd}}}'}

    def test_arguments_can_be_encoded(self) -> None:
        for template, key in ((HERMES, "arguments"), (LLAMA, "parameters")):
            form = FORMATS[template]
            assert form is not None
            written = f'{form.opening}{{"name": "weather", "{key}": {{"city": "\\ud800"}}}}{form.closing}'
            (call,) = form.parse(written)[1]
            assert call.arguments == {"city": "\ufffd"}
        again = copy.deepcopy(CALLING)
        again["tool_calls"][0]["function"]["arguments"] = '{"city": "\\ud800"}'  # type: ignore[index]
        dialogue = parse_dialogue([WARM, again, WARM])
        assert dialogue.past[0].reply.calls == (call,)


CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "a1b2c3d4e", "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}],
}  # fmt: skip


class TestMessages:
    @pytest.mark.parametrize("field", ["name", "arguments"])
    def test_calls_count_as_text(self, field: str) -> None:
        """Else the thread that steps all replies would make tokens of them, however long they are."""
        again, long = copy.deepcopy(CALLING), "x" * aside.LONG
        again["tool_calls"][0]["function"][field] = long if field == "name" else {"city": long}  # type: ignore[index]
        result = {"role": "tool", "content": "18", "tool_call_id": long}
        dialogue = parse_dialogue([WARM, again, result, WARM])
        assert dialogue.size >= 2 * aside.LONG
        assert min(dialogue.parts) >= aside.LONG

    def test_results_belong_to_the_turn_that_called(self) -> None:
        result = {"role": "tool", "content": "18", "tool_call_id": "a1b2c3d4e"}
        said = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Sure?"}]
        dialogue = parse_dialogue([{"role": "user", "content": "Warm?"}, CALLING, result, *said])
        assert dialogue.past == (Exchange("Warm?", Reply("", (BERN,))), Exchange((result,), Reply("Yes.")))
        fed, last = as_fed(dialogue.past, dialogue.user)
        assert [message["role"] for message in fed.user] == ["user", "assistant", "tool"]  # type: ignore[index]
        assert (fed.reply, fed.exchanges, last.user, last.exchanges) == ("Yes.", dialogue.past, "Sure?", ())
        (waiting,) = as_fed(dialogue.past[:1], (result,))
        assert (waiting.reply, waiting.exchanges, len(waiting.user)) == (None, dialogue.past[:1], 3)

    def test_a_reply_is_the_same_written_or_parsed(self) -> None:
        form = FORMATS[HERMES]
        assert form is not None
        written = Reply(*form.parse('<tool_call>\n{"name": "weather", "arguments": {"city":"Bern"}}\n</tool_call>'))
        assert next_hash("", Exchange("Warm?", written)) == next_hash("", Exchange("Warm?", Reply("", (BERN,))))
        assert next_hash("", Exchange("Warm?", written)) != next_hash("", Exchange("Warm?", Reply("", (NOW,))))

    def test_histories_differ_by_all_that_templates_write(self) -> None:
        """Each change of a name, an id, an argument or a role is another history; what clients strip is not."""
        result = {"role": "tool", "content": "18", "tool_call_id": "a1b2c3d4e", "name": "weather"}

        def key(call: Any = CALLING, result: Any = result) -> str:
            said = [{"role": "user", "content": "Warm?"}, call, result, {"role": "assistant", "content": " Yes. "}]
            dialogue = parse_dialogue([*said, {"role": "user", "content": "Sure?"}])
            return chain("", dialogue.past)[-1]

        (call,) = CALLING["tool_calls"]  # type: ignore[misc]
        function = call["function"]  # type: ignore[index]
        others = [
            key({**CALLING, "tool_calls": [{**call, **more}]})  # type: ignore[dict-item]
            for more in (
                {"id": "b"}, {"function": {**function, "name": "time"}}, {"function": {**function, "arguments": "{}"}},
            )
        ]  # fmt: skip
        others += [key(result={**result, **more}) for more in ({"name": "x"}, {"tool_call_id": "x"}, {"content": "19"})]
        others += [key(result={**result, "role": "user"}), key({**CALLING, "content": "Hm."})]
        assert len({key(), *others}) == 1 + len(others)
        stripped = {**result, "content": [{"type": "text", "text": "18"}]}
        assert key({**CALLING, "content": ""}, stripped) == key()


@pytest.mark.parametrize(
    "parameters",
    [{"description": "x" * tools.MAX_TOOLS}, {"enum": [0] * tools.MAX_TOOLS}, {"x" * tools.MAX_TOOLS: 1}],
    ids=["text", "values", "key"],
)
def test_tools_of_any_length_are_no_work(parameters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "parse_tools", lambda _: pytest.fail("they are looked at"))
    function = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(ApiError, match="characters"):
        tools.parse_tool_options({"tools": [function]}, Options(CacheConfig()), None)
