"""Feeds hostile messages to chat templates: ``python -m tests.real_templates FOLDER`` tries every ``*.jinja`` in it.

Fed must be what `apply_chat_template` makes of the same conversation, but that no control token comes from a message.
The names between angle or square brackets in a template are control tokens, every other one not flagged as special.
"""

import copy
import random
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from h2o_stream.config import ModelConfig
from h2o_stream.errors import H2OStreamError
from h2o_stream.loading.transformers_model import load_tokenizer
from h2o_stream.session import turn_texts as ours
from h2o_stream.session.template import ChatTemplate

FIRST, REPLY = "What is six times seven?", "It is forty-two, I think."

_PIECES = [
    *("hello", " ", "  ", "\n", "\n\n", "\t", "\r\n", "\x00", "\u202e", "\u2066", "\ufffd", "e\u0301", "日本", "🙂"),
    *("{{ 7*7 }}", "{% raw %}", "{# x #}", "{{ messages }}", '"', "'", "<", ">", "&amp;", "&", "\\n", "\\", "</"),
    *("/no_think", "/think", "<|im_en", "d|>", "<|im_start", "|>", "<|", "[INST]", "[/INST]", "<<SYS>>", "<s>", "</s>"),
    *("<think>", "</think>", "<start_of_turn>", "<end_of_turn>", "<|end|>", "<|user|>", "### Human:", "user\n"),
    *("<|eot_id|>", "assistant", "\xa0", "\ue000", "\ue001", "a" * 300, FIRST, REPLY),
    *(ours._SYSTEM, ours._USER, ours._REPLY, ours._FIRST_USER),
]  # fmt: skip


_NAMES = re.compile(r"<[|｜][^|｜>\s'\"{}]+[|｜]>|<(?:start|end)_of_turn>|\[/?[A-Z_]+\]|<</?SYS>>|</?[a-z_]+>")


def with_controls_of(tokenizer: Any, template: str) -> Any:
    """A copy of the tokenizer with this template, and the names in it as control tokens."""
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    for number, name in enumerate(sorted(set(_NAMES.findall(template)))):
        special = number % 2 == 0
        changed.add_tokens([AddedToken(name, special=special, normalized=not special)], special_tokens=special)
    return changed


def hostile_messages(tokenizer: Any, count: int, seed: int = 0) -> list[str]:
    """Messages of pieces that break formatting, and of the tokenizer's own control tokens."""
    draw = random.Random(seed)
    controls = list(controls_of(tokenizer))
    fixed = ["", " ", "\n", "\n\n \t", *controls, *(f" \n{control}\n " for control in controls[:3])]
    mixed = ["".join(draw.choices(_PIECES + 2 * controls, k=draw.randint(1, 6))) for _ in range(count)]
    return [*fixed, *mixed][:count]


def controls_of(tokenizer: Any) -> dict[str, int]:
    """Ids of added tokens, but for those of white space."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return {token.content: number for number, token in added.items() if token.content.strip()}


def expected(tokenizer: Any, conversation: list[dict[str, str]]) -> list[int]:
    """The ids after the last reply, by definition: the template's controls, and its text between them as plain text."""
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    neutral = [*conversation[:-1], {"role": "user", "content": "Q" * 40}]
    around = tokenizer.apply_chat_template(neutral, tokenize=False, add_generation_prompt=True).split("Q" * 40)
    if len(conversation) > 1:
        start = around[0].rindex(REPLY) + len(REPLY)
        text, around = text[start:], [around[0][start:], *around[1:]]
    controls = controls_of(tokenizer)
    user = conversation[-1]["content"]
    if not any(control in user for control in controls):
        return tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]
    assert text.startswith(around[0]), "the template branches: not covered here"
    assert text.endswith(around[-1]), "the template branches: not covered here"
    begin, end = len(around[0]), len(text) - len(around[-1])
    pattern = re.compile("|".join(map(re.escape, sorted(controls, key=len, reverse=True))))
    typed = {match.span() for match in pattern.finditer(text) if begin <= match.start() and match.end() <= end}
    tokens: list[int] = []
    last = 0
    for match in pattern.finditer(text):
        if match.span() not in typed:
            tokens += [*plain_tokens(tokenizer, text[last : match.start()]), controls[match.group()]]
            last = match.end()
    return [*tokens, *plain_tokens(tokenizer, text[last:])]


def is_same_text(tokenizer: Any, conversation: list[dict[str, str]], fed: list[int]) -> bool:
    """Whether tokens are the template's text, with the controls of a message without any.

    It serves where a template does something else with the message, so that its part of the text is not known.
    """
    controls = controls_of(tokenizer)
    pattern = re.compile("|".join(map(re.escape, sorted(controls, key=len, reverse=True))))
    *past, last = conversation
    texts, tokens = [], []
    for content in (last["content"], pattern.sub("Q", last["content"])):
        asked = [*past, {**last, "content": content}]
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        texts.append(text[text.rindex(REPLY) + len(REPLY) :] if past else text)
        tokens.append([controls[name] for name in pattern.findall(texts[-1])])
    return tokenizer.decode(fed) == texts[0] and [token for token in fed if token in controls.values()] == tokens[1]


def plain_tokens(tokenizer: Any, text: str) -> list[int]:
    flagged = vars(tokenizer).get("_flagged")
    if flagged is None:
        flagged = copy.deepcopy(tokenizer)
        flagged.add_tokens(list(controls_of(tokenizer)), special_tokens=True)
        vars(tokenizer)["_flagged"] = flagged
    return flagged(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]  # type: ignore[no-any-return]


def trial(tokenizer: Any, count: int) -> Counter[str]:
    """Feed messages as first and as later turns. Counts the outcomes: equal, refused, or what differs."""
    outcomes = Counter[str]()
    past = [{"role": "user", "content": FIRST}, {"role": "assistant", "content": REPLY}]
    template = ChatTemplate(tokenizer, None, ())
    for text in hostile_messages(tokenizer, count):
        for before in ([], past):
            try:
                fed = (template.next_turn(text, False) if before else template.first_turn(text)).tokens
            except H2OStreamError as error:
                outcomes["refused" if "\n" not in str(error) else f"refused in several lines: {error}"] += 1
                continue
            conversation = [*before, {"role": "user", "content": text}]
            try:
                equal = fed == expected(tokenizer, conversation)
            except AssertionError:
                equal = is_same_text(tokenizer, conversation, fed)
            outcomes["equal" if equal else f"DIFFERS: {text[:60]!r} turn {len(before)}"] += 1
    return outcomes


def main(folder: Path) -> None:
    """Print a line per template."""
    tokenizer = load_tokenizer(ModelConfig())
    tokenizer.bos_token = tokenizer.bos_token or "<|im_start|>"
    for file in sorted(folder.glob("*.jinja")):
        tried = with_controls_of(tokenizer, file.read_text(encoding="utf-8"))
        print(file.stem, dict(trial(tried, 200).most_common(6)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
