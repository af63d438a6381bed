"""Chat templates in the forms of published families, written for the tests, and the tokens that frame their turns."""

from dataclasses import dataclass, field

_LOOP = "{% for m in messages %}"
_ASKED = "{% if add_generation_prompt %}"


def _chatml(default: str = "") -> str:
    begun = f"{{% if messages[0].role != 'system' %}}<|im_start|>system\n{default}<|im_end|>\n{{% endif %}}"
    return (
        (begun if default else "")
        + _LOOP
        + "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
        + _ASKED
        + "{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


def _piped(after: str, first: str = "", end: str = "''") -> str:
    """Roles between bars, whose names templates put together from parts."""
    return (
        first
        + _LOOP
        + f"{{{{ '<|' + m.role + '|>{after}' + m.content + {end} }}}}{{% endfor %}}"
        + _ASKED
        + f"{{{{ '<|assistant|>{after}' }}}}{{% endif %}}"
    )


def _instructed(user: str, reply: str, first: str = "{{ bos_token }}", system: str = "") -> str:
    """Only users' messages are marked. A system prompt is within the first, or has marks of its own."""
    said = "{% if m.role == 'system' %}" + (system or "{% set ns.said = m.content + '\n\n' %}")
    return (
        "{% set ns = namespace(said='') %}" + first + _LOOP + said + "{% elif m.role == 'user' %}" + user
        + "{% set ns.said = '' %}{% else %}" + reply + "{% endif %}{% endfor %}"
    )  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A template.

    Attributes:
        ends: the token that ends a turn first, and others that may.
        markers: other control tokens that it frames turns with.
        bos: the token with which texts begin; nothing if they begin with none.
        adds_bos: whether the file says that it is added, which the template may have done.
        eos: the token that the file names so; the first of `ends` if nothing.
        others: further control tokens of the vocabulary.
        pre: the pre-tokenizer.
        strict: whether it takes no system prompt.
    """

    template: str
    ends: tuple[str, ...]
    markers: tuple[str, ...] = ()
    bos: str = ""
    adds_bos: bool = False
    eos: str = ""
    others: tuple[str, ...] = field(default=(), kw_only=True)
    pre: str = "gpt-2"
    strict: bool = False


_IM = ("<|im_start|>",)
_HEADERS = ("<|start_header_id|>", "<|end_header_id|>")
_GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + _LOOP
    + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim"
    + " + '<end_of_turn>\n' }}{% endfor %}"
    + _ASKED
    + "{{ '<start_of_turn>model\n' }}{% endif %}"
)
_INST = "{{ '[INST] ' + ns.said + m.content + ' [/INST]' }}"
_DEEPSEEK = "<\uff5c%s\uff5c>"
_BEGIN, _END = (_DEEPSEEK % f"{word}\u2581of\u2581sentence" for word in ("begin", "end"))

FAMILIES = {
    "Qwen 2.5": Family(_chatml("You are a helpful assistant."), ("<|im_end|>", "<|endoftext|>"), _IM, pre="qwen2"),
    "ChatML": Family(_chatml(), ("<|im_end|>",), _IM, "<s>", True, others=("</s>",)),
    "SmolLM 3": Family(
        _chatml("Reasoning: /think").replace("m.content +", "m.content.split('</think>')[-1] +"),
        ("<|im_end|>",), _IM, others=("<think>", "</think>", "<|end_of_text|>", "<|begin_of_text|>"),
    ),
    "Phi 4": Family(
        _LOOP + "{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endfor %}" + _ASKED
        + "{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}",
        ("<|im_end|>", "<|endoftext|>"), (*_IM, "<|im_sep|>"), eos="<|endoftext|>",
    ),
    "Llama 2": Family(
        _instructed(
            "{{ bos_token + '[INST] ' + ns.said + m.content + ' [/INST]' }}", "{{ ' ' + m.content + ' ' + eos_token }}",
            "", "{% set ns.said = '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' %}",
        ),
        ("</s>",), (), "<s>", True,
    ),
    "Llama 3": Family(
        _LOOP + "{% set text = '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim %}"
        "{{ (bos_token if loop.first else '') + text + '<|eot_id|>' }}{% endfor %}" + _ASKED
        + "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"), _HEADERS, "<|begin_of_text|>", True, "<|end_of_text|>",
        pre="llama-bpe",
    ),
    "Llama 4": Family(
        "{{ bos_token }}" + _LOOP + "{{ '<|header_start|>' + m.role + '<|header_end|>\n\n' + m.content + '<|eot|>' }}"
        "{% endfor %}" + _ASKED + "{{ '<|header_start|>assistant<|header_end|>\n\n' }}{% endif %}",
        ("<|eot|>",), ("<|header_start|>", "<|header_end|>"), "<|begin_of_text|>", pre="llama4",
    ),
    "Mistral 1": Family(
        _instructed(_INST, "{{ m.content + eos_token + ' ' }}"), ("</s>",), (), "<s>", True,
    ),
    "Mistral 3": Family(
        _instructed(_INST.replace(" [/INST]", "[/INST]"), "{{ ' ' + m.content + eos_token }}"),
        ("</s>",), ("[INST]", "[/INST]"), "<s>", True, others=("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"), pre="tekken",
    ),
    "Mistral 7": Family(
        _instructed(
            "[INST]{{ m.content }}[/INST]", "{{ m.content }}</s>",
            system="[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]",
        ),
        ("</s>",), ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), "<s>", True, pre="tekken",
    ),
    "Gemma": Family(
        _GEMMA, ("<end_of_turn>", "<eos>"), ("<start_of_turn>",), "<bos>", True, "<eos>", strict=True,
    ),
    "Phi 3": Family(
        _piped("\n", end="'<|end|>\n'"), ("<|end|>", "<|endoftext|>"), ("<|user|>", "<|assistant|>", "<|system|>"),
        eos="<|endoftext|>",
    ),
    "Granite": Family(
        _LOOP + "{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\n' }}{% endfor %}"
        + _ASKED + "{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}",
        ("<|end_of_text|>",), ("<|start_of_role|>", "<|end_of_role|>"), pre="starcoder",
    ),
    "DeepSeek": Family(
        _instructed(
            f"{{{{ ns.said + '{_DEEPSEEK % 'User'}' + m.content }}}}",
            f"{{{{ '{_DEEPSEEK % 'Assistant'}' + m.content + '{_END}' }}}}",
        ) + _ASKED + f"{{{{ '{_DEEPSEEK % 'Assistant'}' }}}}{{% endif %}}",
        (_END,), (_DEEPSEEK % "User", _DEEPSEEK % "Assistant"), _BEGIN, True, pre="deepseek-v3",
    ),
    "GLM 4": Family(
        _piped("\n", "[gMASK]<sop>"), ("<|user|>", "<|observation|>", "<|endoftext|>"),
        ("<|assistant|>", "<|system|>", "<sop>"), "[gMASK]", eos="<|endoftext|>", pre="glm4",
    ),
    "Command R": Family(
        "{{ bos_token }}" + _LOOP + "{{ '<|START_OF_TURN_TOKEN|><|' + {'user': 'USER', 'system': 'SYSTEM',"
        " 'assistant': 'CHATBOT'}[m.role] + '_TOKEN|>' + m.content | trim + '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
        + _ASKED + "{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}",
        ("<|END_OF_TURN_TOKEN|>",), ("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
        "<BOS_TOKEN>", True, others=("<EOS_TOKEN>",), pre="command-r",
    ),
    "OLMo 2": Family(
        _piped("\n", "{{ bos_token }}", "(eos_token if m.role == 'assistant' else '') + '\n'"),
        ("<|endoftext|>",), ("<|user|>", "<|assistant|>", "<|system|>"), "<|endoftext|>", pre="olmo",
    ),
    "Falcon 3": Family(
        _piped("\n", end="('<|endoftext|>' if m.role == 'assistant' else '') + '\n'"), ("<|endoftext|>",),
        ("<|user|>", "<|assistant|>", "<|system|>"), pre="falcon3",
    ),
    "Zephyr": Family(
        _piped("\n", end="eos_token + '\n'"), ("</s>",), ("<|user|>", "<|assistant|>", "<|system|>"), "<s>", True,
    ),
    "TinyLlama": Family(_piped("\n", end="eos_token + '\n'"), ("</s>",), (), "<s>", True),
    "Vicuna": Family(
        _instructed("{{ ns.said + 'USER: ' + m.content + ' ' }}", "{{ 'ASSISTANT: ' + m.content + '</s>' }}")
        + _ASKED + "{{ 'ASSISTANT:' }}{% endif %}",
        ("</s>",), (), "<s>", True,
    ),
    "Harmony": Family(
        _LOOP + "{{ '<|start|>' + m.role + ('<|channel|>final' if m.role == 'assistant' else '') + '<|message|>'"
        " + m.content + '<|end|>' }}{% endfor %}" + _ASKED + "{{ '<|start|>assistant' }}{% endif %}"
        "{# <|channel|>analysis<|message|> #}",
        ("<|return|>", "<|call|>", "<|endoftext|>"), ("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
        pre="gpt-4o",
    ),
    "Hermes": Family(
        "{{ bos_token }}" + _chatml() + "{# <tool_call> </tool_call> <tool_response> #}", ("<|im_end|>",), _IM,
        "<|begin_of_text|>", True, others=("<tool_call>", "</tool_call>"), pre="llama-bpe",
    ),
    "EXAONE": Family(
        _LOOP + "{{ '[|' + m.role + '|]' + m.content + ('[|endofturn|]\n' if m.role != 'user' else '\n') }}{% endfor %}"
        + _ASKED + "{{ '[|assistant|]' }}{% endif %}",
        ("[|endofturn|]",), ("[|user|]", "[|assistant|]", "[|system|]"), "[BOS]", pre="exaone",
    ),
    "OpenChat": Family(
        "{{ bos_token }}" + _LOOP + "{{ 'GPT4 Correct ' + m.role.title() + ': ' + m.content + '<|end_of_turn|>' }}"
        "{% endfor %}" + _ASKED + "{{ 'GPT4 Correct Assistant:' }}{% endif %}",
        ("<|end_of_turn|>",), (), "<s>", True, others=("</s>",),
    ),
    "Command R7B": Family(
        "{{ bos_token }}" + _LOOP + "{{ '<|START_OF_TURN_TOKEN|><|' + m.role + '|>' }}{% if m.role == 'assistant' %}"
        "{{ '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}{% else %}{{ m.content }}{% endif %}"
        "{{ '<|END_OF_TURN_TOKEN|>' }}{% endfor %}" + _ASKED
        + "{{ '<|START_OF_TURN_TOKEN|><|assistant|>' }}{% endif %}",
        ("<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"), ("<|START_OF_TURN_TOKEN|>", "<|START_RESPONSE|>", "<|user|>"),
        "<BOS_TOKEN>", True, "<|END_OF_TURN_TOKEN|>", pre="command-r",
    ),
}  # fmt: skip
"""Families by name."""
