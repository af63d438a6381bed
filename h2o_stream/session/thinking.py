"""The thinking of a model: how its template and tokenizer mark it, and where it ends in a reply. Knows only text."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Literal

from h2o_stream.engine.text import Markers, overlap

_TAG = re.compile(
    r"[<\[◁][|｜]?[\w:]{0,40}(?:think|thought|reason|inner_prefix)[\w:]{0,40}[|｜]?[>\]▷]",  # noqa: RUF001
    re.IGNORECASE,
)
"""A tag by whose name thinking may begin. It counts only with its counterpart."""

_SPLIT = re.compile(r"""\.split\(\s*["']([<\[◁][|｜]?/[^"'\s]+)["']""")  # noqa: RUF001
"""Where a template divides past replies at a closing tag."""

_WORDS = (("start", "end"), ("begin", "end"), ("prefix", "suffix"))
"""Words that tell an opening tag from its closing one, if a slash does not."""

_ANSWERS = ("answer", "response")
"""Tags around the answer of models that think: HunYuan; Granite 3.3, ERNIE. They count if a template has both."""

_CHANNELS = (
    Markers("<|channel|>analysis<|message|>", "<|end|>", ("<|start|>assistant", "<|channel|>final<|message|>")),
    Markers("<|channel>thought", "<channel|>"),
)
"""The formats of gpt-oss and Gemma 4, where thinking is a channel. One counts if a template has all of its texts."""


def find_markers(template: str, added: Collection[str], prompt: str) -> Markers | None:
    """How a model marks its thinking; None if it is not known to think.

    The evidence is a pair of tags for thinking, each in the template or an added token; or an opening tag with which
    the template itself ends the prompt; or a closing tag at which it divides past replies.
    """
    for channels in _CHANNELS:
        if all(marker in template for marker in channels.all):
            return channels
    tags = dict.fromkeys((*_TAG.findall(template), *(token for token in added if _TAG.fullmatch(token))))
    for opening in tags:
        for closing in _counterparts(opening):
            if closing in template or closing in added:
                around = next((x for x in _ANSWERS if f"<{x}>" in template and f"</{x}>" in template), None)
                return (
                    Markers(opening, closing, (f"<{around}>",), f"</{around}>") if around else Markers(opening, closing)
                )
    ending = next((tag for tag in tags if prompt.rstrip().endswith(tag)), None)
    if ending is not None:
        return Markers(ending, next(_counterparts(ending)))
    pairs = ((closing.replace("/", "", 1), closing) for closing in _SPLIT.findall(template))
    return next((Markers(*pair) for pair in pairs if _TAG.fullmatch(pair[0])), None)


def _counterparts(opening: str) -> Iterator[str]:
    """The possible closing tags of an opening one."""
    yield re.sub(r"\w", r"/\g<0>", opening, count=1)
    for word, counterpart in _WORDS:
        for before, after in ((word, counterpart), (word.upper(), counterpart.upper())):
            if before in opening:
                yield opening.replace(before, after)


class ThinkingSplitter:
    """Splits a reply, piece by piece, into thinking and answer.

    Thinking comes before the answer, in one or more parts; later, the same markers are text of the answer. The space
    around thinking is dropped. A reply without thinking passes through unchanged.
    """

    def __init__(self, markers: Markers, thinking: bool) -> None:
        self._markers = markers
        self._state: Literal["before", "thinking", "answer"] = "thinking" if thinking else "before"
        self._pending = ""
        self._marked = self._new_part = thinking
        self._thought = False

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends within thinking."""
        return self._state == "thinking"

    def push(self, text: str) -> tuple[str, str]:
        """Append text. Returns the thinking and the answer that it completes; a possible marker is held back."""
        self._pending += text
        thinking, previous = "", ""
        while self._state != previous:
            previous = self._state
            if self._state == "before":
                self._begin()
            elif self._state == "thinking":
                thinking += self._take_thinking()
        if self._state != "answer":
            return thinking, ""
        answer, self._pending = self._before_ending(self._pending)
        return thinking, answer

    def flush(self) -> tuple[str, str]:
        """The thinking and the answer that were held back when the text ended."""
        text, self._pending = self._pending, ""
        if self.thinking:
            return self._trimmed(text), ""
        if self._state == "answer":
            return "", "" if self._ending and text.strip() == self._ending else text
        return "", text.strip() if self._marked else text

    @property
    def _ending(self) -> str:
        """What ends the answer and does not belong to it, if its beginning was marked."""
        return self._markers.ending if self._marked else ""

    def _before_ending(self, text: str) -> tuple[str, str]:
        """A part of the answer, and what may be the mark at its end with the space around it."""
        if not self._ending:
            return text, ""
        place = text.rfind(self._ending)
        if place < 0 or text[place + len(self._ending) :].strip():
            place = len(text.rstrip()) - overlap(text.rstrip(), self._ending)
        kept = text[:place].rstrip()
        return kept, text[len(kept) :]

    def _begin(self) -> None:
        """Enter the thinking or the answer, if it is certain which of them follows."""
        text = self._pending.lstrip()
        markers = self._markers.opening, *self._markers.skipped
        while marker := next(filter(text.startswith, markers), ""):
            text = text[len(marker) :]
            self._pending, self._marked = text, True
            if marker == self._markers.opening:
                self._state, self._new_part = "thinking", True
                return
            text = text.lstrip()
        if not any(marker.startswith(text) for marker in markers):
            self._state = "answer"
            if self._marked:
                self._pending = text

    def _take_thinking(self) -> str:
        text, closing, after = self._pending.partition(self._markers.closing)
        if closing:
            self._state, self._pending = "before", after
        else:
            text = text[: len(text) - overlap(text, self._markers.closing)].rstrip()
            self._pending = self._pending[len(text) :]
        return self._trimmed(text)

    def _trimmed(self, text: str) -> str:
        """Thinking without the space around it, and with an empty line before all parts but the first."""
        text = text.rstrip()
        if self._new_part:
            text = text.lstrip()
        if not text:
            return ""
        gap = "\n\n" if self._new_part and self._thought else ""
        self._new_part, self._thought = False, True
        return gap + text
