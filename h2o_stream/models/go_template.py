"""Chat templates of ollama, in the language of Go, as Jinja: those of system prompt, prompt and response.

Templates that go through messages themselves, or have tools, are not translated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_NAMES = {".System": "system", ".Prompt": "prompt", ".Response": "response"}
_TESTS = {**_NAMES, ".First": "first"}
_PLACE = "{{ .Response }}"

_AROUND = """\
{%- macro before(system, prompt, first) +%}BEFORE{%+ endmacro -%}
{%- macro after(system, prompt, first) +%}AFTER{%+ endmacro -%}
{%- set said = namespace(system='', prompt='', first=true) -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- set said.system = message.content -%}
{%- elif message.role == 'user' -%}
{%- set said.prompt = said.prompt + ('\n\n' if said.prompt else '') + message.content -%}
{%- elif message.role == 'assistant' -%}
{{- before(said.system, said.prompt, said.first) + message.content + after(said.system, said.prompt, said.first) -}}
{%- set said.system = '' -%}{%- set said.prompt = '' -%}{%- set said.first = false -%}
{%- else -%}{{ raise_exception('there is no role ' + message.role) }}{%- endif -%}
{%- endfor -%}
{%- if said.prompt and add_generation_prompt -%}{{- before(said.system, said.prompt, said.first) -}}
{%- elif said.prompt -%}
{{- before(said.system, said.prompt, said.first) + after(said.system, said.prompt, said.first) -}}
{%- endif -%}"""


def as_jinja(template: str) -> str | None:
    """The same template for Jinja, or None if it has more than prompts, responses, and conditions on them."""
    if not any(what == ".Response" for *_, what, _ in _actions(template)):
        template += _PLACE
    before, after, depth, pieces, at = "", None, 0, list[str](), 0
    for start, stop, left, what, right in _actions(template):
        pieces.append(_literal(template[at:start]))
        at = stop
        word, _, test = what.partition(" ")
        if what == ".Response":
            if depth or after is not None:
                return None
            before, after = "".join([*pieces, "{{- '' }}" if left else ""]), ""
            pieces = ["{{ '' -}}" if right else ""]
        elif what in _NAMES:
            pieces.append(f"{{{{{left} {_NAMES[what]} {right}}}}}")
        elif word == "if" and test.strip() in _TESTS:
            pieces.append(f"{{%{left or '+'} if {_TESTS[test.strip()]} {right or '+'}%}}")
            depth += 1
        elif what in ("else", "end"):
            depth -= what == "end"
            pieces.append(f"{{%{left or '+'} {'endif' if what == 'end' else 'else'} {right or '+'}%}}")
        else:
            return None
    after = "".join([*pieces, _literal(template[at:])])
    return _AROUND.replace("BEFORE", before, 1).replace("AFTER", after, 1) if depth == 0 else None


def _actions(template: str) -> Iterator[tuple[int, int, str, str, str]]:
    """Where each action begins and ends, what it says, and the dashes with which it does. Takes linear time."""
    stop = 0
    while (start := template.find("{{", stop)) >= 0 and (end := template.find("}}", start + 2)) >= 0:
        inside, stop = template[start + 2 : end], end + 2
        left = "-" if inside.startswith("-") else ""
        inside = inside[len(left) :]
        right = "-" if inside.endswith("-") else ""
        yield start, stop, left, inside.removesuffix(right).strip(), right


def _literal(text: str) -> str:
    """A text that Jinja leaves as it is."""
    return re.sub(r"\{(?=[{%#])|(?<=[%#}])\}", lambda match: f"{{{{ {match[0]!r} }}}}", text)
