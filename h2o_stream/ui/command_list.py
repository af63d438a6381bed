"""The commands of the chat: names, what they take and what they do. Needs no model, so that it is there at once."""

from __future__ import annotations

import dataclasses
import re

_COMMAND = re.compile(r"/[a-z?]+(\s|$)")


def is_command(message: str) -> bool:
    """Whether a message is for the chat: a slash and a word. Two slashes, and paths, are for the model."""
    return _COMMAND.match(message) is not None


@dataclasses.dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        takes: what comes after it, for people; in brackets what may be left out.
        summary: what it does.
        takes_file: whether that is the name of a file.
    """

    takes: str
    summary: str
    takes_file: bool = False

    @property
    def needs(self) -> bool:
        """Whether something has to come after it."""
        return bool(self.takes) and not self.takes.startswith("[")


COMMANDS = {
    "/help": Command("", "list the commands"),
    "/reset": Command("", "forget the conversation, keep the system prompt"),
    "/system": Command("[TEXT]", "show the system prompt, or begin anew with another"),
    "/set": Command("NAME VALUE", "sampling from now on: temperature, top_p, top_k, min_p, seed, max_tokens, ..."),
    "/show": Command("[config]", "sampling as it is; config: every option and where its value comes from"),
    "/stats": Command("", "what is in the cache, and how fast it goes"),
    "/why": Command("[LAYER]", "which words the cache still holds, by how many heads hold them"),
    "/pin": Command("TEXT", "have a text read and never evict it"),
    "/pins": Command("", "what is never evicted"),
    "/file": Command(
        "PATH [QUESTION]",
        "say a file, with a question after it; quotes may hold a PATH with spaces",
        takes_file=True,
    ),
    "/regen": Command("", "take back the last reply and give another"),
    "/undo": Command("[N]", "take back the last turn, or the last N"),
    "/recall": Command("N", "have turn N of the transcript read again"),
    "/fork": Command("NAME", "go on in a copy, a session called NAME"),
    "/save": Command("NAME", "save a copy as session NAME"),
    "/load": Command("NAME", "go on with session NAME"),
    "/sessions": Command("", "list the sessions"),
    "/export": Command("FILE", "write the transcript: FILE.md or FILE.json", takes_file=True),
    "/exit": Command("", "leave (so does Ctrl-D)"),
}
