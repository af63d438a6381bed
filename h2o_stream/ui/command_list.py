"""The chat's commands: names, arguments and summaries. Needs no model, so it is available immediately."""

from __future__ import annotations

import dataclasses
import difflib
import re

_COMMAND = re.compile(r"/[a-z?]+(\s|$)")


def is_command(message: str) -> bool:
    """Whether a message is a command: a slash and a word. Two slashes, and paths, are for the model."""
    return _COMMAND.match(message) is not None


@dataclasses.dataclass(frozen=True)
class Command:
    """A command, with its argument as shown by /help (in brackets if it is optional) and what it does."""

    argument: str
    summary: str
    takes_file: bool = False

    @property
    def requires_argument(self) -> bool:
        """Whether the argument is required."""
        return bool(self.argument) and not self.argument.startswith("[")


COMMANDS = {
    "/help": Command("", "list the commands"),
    "/reset": Command("", "forget the conversation, keep the system prompt"),
    "/system": Command("[TEXT]", "show the system prompt, or start a new conversation with another or a named one"),
    "/set": Command("NAME VALUE", "change a sampling setting: temperature, top_p, top_k, min_p, seed, max_tokens, ..."),
    "/show": Command("[config]", "show the sampling settings; config: every option and where its value comes from"),
    "/window": Command("N", "keep N tokens from now on; the conversation is fed again"),
    "/policy": Command("NAME", "evict by another policy from now on; the conversation is fed again"),
    "/model": Command("NAME", "continue with another model, to which the conversation is fed"),
    "/stats": Command("", "show the state of the cache, and the speed"),
    "/why": Command(
        "[LAYER] [WORD]",
        "show which words the cache still holds, and how many heads hold them; WORD: why it is kept, or when it went",
    ),
    "/pin": Command("TEXT", "feed a text and never evict it"),
    "/pins": Command("", "show what is never evicted"),
    "/file": Command(
        "PATH [QUESTION]",
        "send a file, a folder or *.txt, followed by a question; put a PATH with spaces in quotes",
        takes_file=True,
    ),
    "/regen": Command("", "undo the last reply and generate another"),
    "/undo": Command("[N]", "undo the last turn, or the last N"),
    "/edit": Command("[N]", "change your last message, or that of turn N, and go on from there"),
    "/copy": Command("[N]", "copy the last reply, or that of turn N, to the clipboard"),
    "/recall": Command(
        "[TEXT|auto|wide|off|N]",
        "show what was recalled for the last message, or would be for TEXT, and why; auto, wide, off: switch it; "
        "N: feed turn N of the transcript again",
    ),
    "/think": Command(
        "[show|fold|hide|on|off|N]",
        "show what the model thought before its last reply, or in turn N; show, fold, hide: how thinking is shown; "
        "on, off: switch it, where the model's template can",
    ),
    "/rename": Command("NAME", "call this session NAME, under which it is kept until you remove it"),
    "/fork": Command("NAME", "continue in a copy, a session called NAME"),
    "/save": Command("NAME", "save a copy as session NAME"),
    "/load": Command("NAME", "resume session NAME"),
    "/sessions": Command("", "list the sessions"),
    "/search": Command("WORDS", "show where words were said, in all sessions"),
    "/export": Command("FILE", "write the transcript to FILE.md or FILE.json", takes_file=True),
    "/exit": Command("", "leave (so does Ctrl-D)"),
}

ALIASES = {
    **dict.fromkeys(("/?", "/commands"), "/help"),
    **dict.fromkeys(("/clear", "/new", "/restart"), "/reset"),
    **dict.fromkeys(("/retry", "/redo", "/regenerate"), "/regen"),
    **dict.fromkeys(("/quit", "/q", "/bye"), "/exit"),
    **dict.fromkeys(("/read", "/attach", "/add"), "/file"),
    **dict.fromkeys(("/open", "/resume"), "/load"),
    **dict.fromkeys(("/prompt", "/persona"), "/system"),
    **dict.fromkeys(("/settings", "/config"), "/show"),
    **dict.fromkeys(("/find", "/grep"), "/search"),
    **dict.fromkeys(("/context", "/usage"), "/stats"),
    "/back": "/undo",
    "/list": "/sessions",
    "/name": "/rename",
}
"""Names that other programs have for these commands."""


def unknown_command(name: str) -> str:
    """The error about a name that is no command."""
    nearest = difflib.get_close_matches(name, (*COMMANDS, *ALIASES), 1)
    meant = f"; did you mean {nearest[0]}?" if nearest else ","
    return f"{name} is not a command{meant} /help lists them; start with // to send it to the model"
