"""Which tokens frame the turns of a model: what its chat template writes, whatever the metadata of its file says."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from jinja2 import TemplateError
from tokenizers import AddedToken

from h2o_stream.models.rendering import apply_template
from h2o_stream.models.tokenizer import encode

BEGINNINGS = (
    "<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<|begin_of_sentence|>", "<BOS_TOKEN>", "[BOS]", "<|bos|>",
    "[gMASK]", "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
)  # fmt: skip
"""Tokens with which texts begin."""

TEXT_ENDS = (
    "</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<|end_of_sentence|>", "<EOS_TOKEN>", "[EOS]", "<|eos|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
    "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
)  # fmt: skip
"""Tokens with which texts end, the likeliest first."""

TURN_ENDS = frozenset((
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>",
    "<|end_of_turn|>", "[|endofturn|]", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "<|return|>", "<|call|>",
    "<|calls|>", "<|flush|>", "<|tool_response>", "<|observation|>",
))  # fmt: skip
"""Tokens with which turns end, or calls of tools."""

_MESSAGE_END, _REPLY_ENDS = "<|end|>", ("<|return|>", "<|flush|>")
"""What ends a message, where a reply may have several of them, and tokens of vocabularies in which that is so."""

NAMES = frozenset((*BEGINNINGS, *TEXT_ENDS, *TURN_ENDS))
"""All of them."""

_VARIABLES: Mapping[str, tuple[str, ...]] = {"bos_token": BEGINNINGS, "eos_token": TEXT_ENDS}

_MARKER = re.compile(r"<<?[^<>\s]{1,60}>>?|\[[^\[\]\s]{1,60}\]|◁[^◁▷\s]{1,60}▷")

_SYSTEM, _USER, _REPLY = "5f02-the-system-prompt-c7d1", "8e4b-the-user-19a6", "a370-the-reply-d25c"

_REFUSALS = (TemplateError, TypeError, ValueError, AttributeError, LookupError)
"""What templates raise on messages that they do not know."""


def is_marker(token: str) -> bool:
    """Whether a token is written as those are that are no text."""
    return _MARKER.fullmatch(token) is not None


def is_unmistakable(name: str) -> bool:
    """Whether one of `NAMES` is a control token in any vocabulary. Others may be words, of HTML for example."""
    return not {*name}.isdisjoint("|\uff5c_")


def missing_names(named: Mapping[str, Any], controls: Collection[str]) -> dict[str, str]:
    """Which of these control tokens are `bos_token` and `eos_token`, if they are not named."""
    missing = {name: _first(texts, controls) for name, texts in _VARIABLES.items() if named.get(name) is None}
    return {name: text for name, text in missing.items() if text is not None}


def _first(texts: Iterable[str], known: Collection[str]) -> str | None:
    return next((text for text in texts if text in known), None)


def mark_controls(tokenizer: Any) -> None:
    """Make control tokens of entries that the template frames turns with, or that have such a name, where the file says
    that they are ordinary. A template that needs `eos_token` gets it.

    The tokenizer would read such an entry as several pieces, or take it for text of the user. Entries that are only in
    the template's source, such as those around calls of tools, stay part of a reply's text.
    """
    template = tokenizer.chat_template
    source = " ".join(template.values() if isinstance(template, Mapping) else [template or ""])
    _add(tokenizer, _in_pieces(tokenizer, filter(is_unmistakable, NAMES)), special=True)
    if "eos_token" in source and tokenizer.special_tokens_map.get("eos_token") is None:
        controls = {token.content for token in _added(tokenizer).values() if token.special}
        controls |= _in_pieces(tokenizer, TEXT_ENDS)
        tokenizer.add_special_tokens({"eos_token": text} if (text := _first(TEXT_ENDS, controls)) else {})
    _add(tokenizer, {text for frame in _frames(tokenizer) for text in _MARKER.findall(frame)}, special=True)
    _add(tokenizer, _in_pieces(tokenizer, _MARKER.findall(source)), special=False)


def _in_pieces(tokenizer: Any, texts: Iterable[str]) -> set[str]:
    """Those entries of the vocabulary among these texts that a tokenizer reads as several."""
    backend = tokenizer.backend_tokenizer
    ids = {text: backend.token_to_id(text) for text in texts}
    return {text for text, number in ids.items() if number is not None and encode(backend, text) != [number]}


def _add(tokenizer: Any, texts: Collection[str], special: bool) -> None:
    """Make added tokens of those entries of the vocabulary among these texts that are none yet."""
    backend, known = tokenizer.backend_tokenizer, {token.content for token in _added(tokenizer).values()}
    present = sorted(text for text in {*texts} - known if backend.token_to_id(text) is not None)
    backend.add_tokens([AddedToken(text, special=special, normalized=False) for text in present])


def _frames(tokenizer: Any) -> Iterator[str]:
    """What the template makes of a conversation, without and with a system prompt, as far as it accepts them."""
    talk = _talk()
    for messages in (talk, [{"role": "system", "content": _SYSTEM}, *talk]):
        if (rendered := _rendered(tokenizer, messages)) is not None:
            yield rendered


def _talk() -> list[dict[str, str]]:
    roles = ("user", "assistant", "user")
    return [{"role": role, "content": text} for role, text in zip(roles, (_USER, _REPLY, _USER), strict=True)]


def _rendered(tokenizer: Any, messages: list[dict[str, str]]) -> str | None:
    try:
        return apply_template(tokenizer, messages, add_generation_prompt=True)
    except _REFUSALS:
        return None


def _after_reply(tokenizer: Any) -> str:
    """What the template writes between a reply and the next message."""
    rendered = _rendered(tokenizer, _talk()) if tokenizer.chat_template else None
    return (rendered or "").partition(_REPLY)[2].rpartition(_USER)[0]


def turn_end(tokenizer: Any) -> int | None:
    """The first control token that the template writes after a reply; None if it writes none.

    It may be the one that begins the next message, where no other is between them.
    """
    added = _added(tokenizer)
    tokens = encode(tokenizer.backend_tokenizer, _after_reply(tokenizer))
    return next((token for token in tokens if token in added and added[token].content.strip()), None)


def stop_texts(tokenizer: Any) -> tuple[str, ...]:
    """The text that ends a reply where the template writes no control token: the beginning of the next message."""
    text = re.search(r"\s?\S.*", _after_reply(tokenizer))
    return (text.group().rstrip(),) if text and turn_end(tokenizer) is None else ()


def end_tokens(generation: Any, tokenizer: Any) -> frozenset[int]:
    """All tokens that end a turn: that of the template, those of the generation config and the tokenizer, and those of
    known names. What the template or the vocabulary contradicts is left out: text, and ends of messages in a reply.
    """
    listed, added = generation.eos_token_id, _added(tokenizer)
    ends = {*(listed if isinstance(listed, list) else [listed]), tokenizer.eos_token_id} - {None}
    ends = {end for end in ends if 0 <= end < 2**31}  # some configs have -1
    turn_end_token = turn_end(tokenizer)
    if turn_end_token is not None:
        entry = tokenizer.backend_tokenizer.id_to_token
        ends = {number for number in ends if number in added or is_marker(entry(number) or "")} | {turn_end_token}
    ids = {token.content: number for number, token in added.items()}
    ends |= {ids[text] for text in TURN_ENDS & ids.keys()}
    ends |= {ids[text] for text in TEXT_ENDS if text in ids and added[ids[text]].special}
    if ids.keys() & {*_REPLY_ENDS}:
        ends.discard(ids.get(_MESSAGE_END))
    return frozenset(ends)


def with_bos(tokenizer: Any, tokens: list[int]) -> list[int]:
    """Tokens of a whole text, with those that the tokenizer puts before a text, unless the text begins with them."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    framed = tokenizer("a")["input_ids"]
    before = framed[: next((n for n in range(len(framed)) if framed[n : n + len(plain)] == plain), 0)]
    added = _added(tokenizer)
    written = tokens and tokens[0] in added and (tokens[0] in before or added[tokens[0]].content in BEGINNINGS)
    return tokens if written else [*before, *tokens]


def _added(tokenizer: Any) -> dict[int, AddedToken]:
    added: dict[int, AddedToken] = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return added
