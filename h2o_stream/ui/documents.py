"""Long texts: read as turns of their own, so that recall finds their passages when they are asked about."""

from __future__ import annotations

import re
from collections.abc import Sequence

from h2o_stream.base.resources import replace_surrogates
from h2o_stream.recall.passages import sentences
from h2o_stream.recall.speech import is_question
from h2o_stream.ui.chat_context import ChatContext

_MAX_SHARE = 0.5
"""Share of the window above which a file is read as a turn of its own."""

_QUESTION_SHARE = 0.25
"""Share of the window up to which the end of a long message is taken for the question about the rest."""

_REPLY = "Thank you. What would you like to know about it?"
"""The reply to a text that is only read. A small model repeats one that is no question, such as "I have read it.", as
its answer to what is asked next."""


def read_files(context: ChatContext, files: Sequence[tuple[str, str]], question: str) -> str | None:
    """What to say about files, given by names and texts: the texts with the question. Long ones are read first, each as
    a turn, if recall is on, so that only the question remains.

    None if there is none, or if Ctrl-C ended the reading. What was read stays in the conversation.
    """
    texts = [f"{name}:\n\n{text}" for name, text in files]
    if not _exceeds(context, (together := "\n\n".join(texts)), _MAX_SHARE):
        return f"{together}\n\n{question}".strip()
    for number, ((name, _), text) in enumerate(zip(files, texts, strict=True), 1):
        ask = "" if question or number < len(files) else "; ask about it"
        if not _read(context, text, f" of {name}{ask}" if ask or len(files) > 1 else ""):
            return None
    return question or None


def read_ahead(context: ChatContext, message: str, text: str = "") -> str | None:
    """What to say of a message, which asks about a text before it; None if Ctrl-C ended the reading.

    If both are longer than the window and recall is on, all but the question is read first. Without a text, that is the
    last paragraph, or the last line or sentence that asks. If none is short, all is said as it is.
    """
    message, text = replace_surrogates(message), replace_surrogates(text).strip()
    splits = [(text, message)] if text else [split_question(message), *split_asking(message)]
    message = f"{text}\n\n{message}".strip()
    if not _exceeds(context, message, 1.0):
        return message
    for body, question in splits:
        if body and not _exceeds(context, question, _QUESTION_SHARE):
            return question if _read(context, body, "") else None
    return message


def split_question(text: str) -> tuple[str, str]:
    """All but the last paragraph of a text, and that paragraph. The first part is empty if there is only one."""
    text = text.strip()
    *body, question = re.split(r"\n\s*\n", text)
    return text[: -len(question)].rstrip() if body else "", question


def split_asking(text: str) -> list[tuple[str, str]]:
    """A text divided before its last line, and before its last sentence; [] if it does not end with a question."""
    text = text.strip()
    if not is_question(text):
        return []
    return [(text[:start].rstrip(), text[start:]) for start in (text.rfind("\n") + 1, sentences(text)[-1].start)]


def _exceeds(context: ChatContext, text: str, share: float) -> bool:
    """Whether recall is on, and a text has more tokens than this share of the window."""
    conversation = context.history.conversation
    counts, tokenizer = conversation.engine.counts, conversation.engine.tokenizer
    window = counts.window - counts.grown
    if conversation.recall.mode == "off" or not window:
        return False
    return len(tokenizer(text, add_special_tokens=False)["input_ids"]) > share * window


def _read(context: ChatContext, text: str, note: str) -> bool:
    engine = context.history.conversation.engine
    before = len(engine.tokens)
    complete = context.feed(context.history.feed_turn(text, _REPLY))
    count = len(engine.tokens) - before
    if complete:
        context.terminal.note(f"read {count:,} tokens{note}", style="dim")
    elif count > 0:
        context.terminal.note(f"{count:,} tokens were read and stay in the conversation", style="dim")
    return complete
