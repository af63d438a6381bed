"""What can be said to the chat itself: everything that begins with a slash."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from rich.table import Table

from h2o_stream.config import SamplingConfig
from h2o_stream.errors import ConfigError, DataError, H2OStreamError
from h2o_stream.resources import is_file, read_text, user_path
from h2o_stream.session.export import export
from h2o_stream.session.holdings import holdings
from h2o_stream.ui.command_list import COMMANDS
from h2o_stream.ui.figures import size
from h2o_stream.ui.strip import strip
from h2o_stream.ui.tables import print_report, sessions_table
from h2o_stream.ui.terminal import one_line

if TYPE_CHECKING:
    from h2o_stream.ui.chat import Chat

_SHORT = {"temp": "temperature", "n": "max_tokens"}


class Commands:
    """Carries out commands in a chat."""

    def __init__(self, chat: Chat) -> None:
        self._chat, self._terminal, self._keeper = chat, chat.terminal, chat.keeper

    def carry_out(self, line: str) -> str | None:
        """Do what a line says.

        Returns:
            What is to be said to the model now, or None.
        """
        name, _, rest = line.partition(" ")
        name, rest = name.strip(), rest.strip()
        command = COMMANDS.get(name)
        if command is None:
            self._terminal.error(f"{name} is not a command, /help lists them; start with // to say it to the model")
        elif command.needs and not rest:
            self._terminal.error(f"{name} needs {command.takes}: {command.summary}")
        elif rest and not command.takes:
            self._terminal.error(f"{name} takes nothing after it")
        else:
            try:
                carry_out: Callable[[str], str | None] = getattr(self, f"_{name[1:]}")
                return carry_out(rest)
            except H2OStreamError as error:
                self._terminal.error(str(error))
        return None

    def _help(self, rest: str) -> None:
        table = Table.grid(padding=(0, 2, 0, 0))
        for name, command in COMMANDS.items():
            table.add_row(f"{name} {command.takes}".strip(), command.summary)
        self._terminal.console.print(table)
        self._terminal.console.print("Ctrl-C stops a reply and keeps what was said.")
        self._terminal.console.print('Meta-Enter, or """ around them, for several lines; Ctrl-X Ctrl-E for an editor.')

    def _reset(self, rest: str) -> None:
        self._keeper.reset()
        self._terminal.note("The conversation starts anew.")

    def _system(self, rest: str) -> None:
        if rest:
            self._keeper.reset(rest)
            self._terminal.note("The conversation starts anew with this system prompt.")
        else:
            system = self._keeper.conversation.system
            self._terminal.note("the template's own, if it has one" if system is None else system)

    def _set(self, rest: str) -> None:
        engine = self._keeper.conversation.engine
        name, _, value = rest.partition(" ")
        name = _SHORT.get(name, name).replace("-", "_")
        sampling = dataclasses.replace(engine.sampling, **{name: _setting(name, value.strip())})
        engine.resample(sampling, reseed=name == "seed")
        self._terminal.note(f"{name} is {value.strip()} from now on")

    def _show(self, rest: str) -> None:
        if rest == "config":
            rows = [(name, value, source) for name, (value, source) in self._chat.sources.items()]
        elif rest:
            raise ConfigError(f"/show takes config or nothing, not {rest}")
        else:
            sampling = dataclasses.asdict(self._keeper.conversation.engine.sampling)
            sampling["seed"] = self._keeper.conversation.engine.sampler.seed
            rows = [(name, "the model's" if value is None else value, "") for name, value in sampling.items()]
        table = Table.grid(padding=(0, 2, 0, 0))
        for name, value, source in rows:
            table.add_row(name, "-" if value is None else one_line(value), source)
        self._terminal.console.print(table)

    def _stats(self, rest: str) -> None:
        counts = self._keeper.conversation.engine.counts
        print_report(self._terminal, self._chat.report, self._chat.ready.title)
        self._terminal.note(
            f"now {counts.sinks} sinks, {counts.pinned} pinned, {counts.heavy} heavy, {counts.recent} recent, "
            f"{counts.free} free; {size(counts.nbytes)}"
        )

    def _why(self, rest: str) -> None:
        conversation = self._keeper.conversation
        layer = _number("/why", rest) if rest else None
        held = holdings(conversation.engine, conversation.passages, layer)
        if not held:
            raise H2OStreamError("nothing was said yet")
        self._terminal.console.print(strip(held, "all layers" if layer is None else f"layer {layer}"))

    def _pin(self, rest: str) -> None:
        if self._chat.fed(self._keeper.pin(rest)):
            self._terminal.note("pinned")

    def _pins(self, rest: str) -> None:
        conversation = self._keeper.conversation
        counts = conversation.engine.counts
        self._terminal.note(f"{counts.sinks} sinks and {counts.pinned} pinned tokens of {counts.window or 'no limit'}")
        for number, text in enumerate([conversation.system or "the template's own opening", *conversation.pins]):
            self._terminal.note(f"{number or 'system'}: {text}")

    def _file(self, rest: str) -> str:
        name, question = _split_path(rest)
        path = user_path(name, f"/file {name}")
        text = read_text(path, f"/file {name}")
        if not text.strip():
            raise DataError(f"/file {name}: the file is empty")
        return f"{path.name}:\n\n{text.strip()}\n\n{question}".strip()

    def _regen(self, rest: str) -> str:
        return self._keeper.again()

    def _undo(self, rest: str) -> None:
        gone = self._keeper.undo(_number("/undo", rest) if rest else 1)
        self._terminal.note(f"taken back: {' '.join(gone[0].prompt.split())[:60]}" + (" ..." if len(gone) > 1 else ""))

    def _recall(self, rest: str) -> None:
        number = _number("/recall", rest)
        entry = next((entry for entry in self._keeper.entries if entry.turn == number), None)
        if entry is None:
            raise H2OStreamError(f"there is no turn {number} in the transcript")
        if self._chat.fed(self._keeper.tell(entry.prompt, entry.text)):
            self._terminal.note(f"turn {number} was read again: {' '.join(entry.prompt.split())[:60]}")

    def _fork(self, rest: str) -> None:
        self._keeper.fork(rest)
        self._terminal.note(f"the conversation goes on as session {rest}")

    def _save(self, rest: str) -> None:
        self._keeper.save(rest)
        self._terminal.note(f"saved as session {rest}")

    def _load(self, rest: str) -> None:
        self._chat.open_session(rest)

    def _sessions(self, rest: str) -> None:
        self._terminal.console.print(sessions_table())

    def _export(self, rest: str) -> None:
        export(user_path(rest, f"/export {rest}"), self._keeper.header(), self._keeper.entries)
        self._terminal.note(f"written: {rest}")

    def _exit(self, rest: str) -> None:
        self._chat.leaving = True


def _split_path(text: str) -> tuple[str, str]:
    """A path and what stands after it. The longest start that is a file is the path; else what is in quotes."""
    gaps = [gap.start() for gap in re.finditer(r"\s", text)]
    for end in (len(text), *reversed(gaps)):
        if is_file(Path(text[:end])):
            return text[:end], text[end:].strip()
    quoted = re.match(r"""(["'])(.+?)\1""", text)
    end = quoted.end() if quoted else gaps[0] if gaps else len(text)
    return quoted[2] if quoted else text[:end], text[end:].strip()


def _number(command: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{command} takes a number, not {text!r}")
    return int(text)


def _setting(name: str, value: str) -> Any:
    """The value of a field of `SamplingConfig` as it is typed."""
    hints = get_type_hints(SamplingConfig)
    if name not in hints:
        raise ConfigError(f"{name} cannot be set; /set takes one of {', '.join(hints)}")
    if name == "stop":
        return tuple(value.split()) if value else ()
    if not value:
        raise ConfigError(f"/set {name} needs a value")
    kind = float if "float" in str(hints[name]) else int
    try:
        return kind(value)
    except ValueError as error:
        raise ConfigError(f"{name} takes a number, not {value!r}") from error
