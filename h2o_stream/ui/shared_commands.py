"""The chat's commands that need no model: a chat with a server has them, too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from rich.table import Table

from h2o_stream.base.options import whole_number
from h2o_stream.base.resources import named_prompts, user_path
from h2o_stream.errors import ConfigError, H2OStreamError
from h2o_stream.session.transcript import Entry, Header, export
from h2o_stream.ui.command_list import ALIASES, COMMANDS, unknown_command
from h2o_stream.ui.sessions import show_matches, show_sessions
from h2o_stream.ui.terminal import Terminal, folded

_TITLE = 60


class SharedCommands(ABC):
    """Executes commands: ``/name`` is the method ``_name``. A subclass has the conversation, and further commands.

    It has turns and a header, starts a new conversation (None keeps the system prompt), goes back by some turns, and
    takes up a turn: the next message takes the place of that and all after it.
    """

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    @property
    @abstractmethod
    def _turns(self) -> Sequence[Entry]: ...
    @abstractmethod
    def _header(self) -> Header: ...
    @abstractmethod
    def _start_over(self, system: str | None) -> None: ...
    @abstractmethod
    def _go_back(self, count: int) -> None: ...
    @abstractmethod
    def _take_up(self, entry: Entry) -> None: ...

    def execute(self, line: str) -> str | None:
        """Execute a command line. Returns a message for the model, or None."""
        name, _, argument = line.partition(" ")
        name, argument = name.strip(), argument.strip()
        name = ALIASES.get(name, name)
        command, method = COMMANDS.get(name), getattr(self, f"_{name[1:]}", None)
        if command is None:
            self._terminal.error(unknown_command(name))
        elif method is None:
            self._terminal.error(f"{name} needs the model in this process; the server was started with its options")
        elif command.requires_argument and not argument:
            self._terminal.error(f"{name} needs {command.argument}: {command.summary}")
        elif argument and not command.argument:
            self._terminal.error(f"{name} takes no argument")
        else:
            try:
                message: str | None = method(argument)
                return message
            except H2OStreamError as error:
                self._terminal.error(str(error))
        return None

    def _help(self, argument: str) -> None:
        table = Table.grid(padding=(0, 2, 0, 0))
        for name, command in COMMANDS.items():
            if hasattr(self, f"_{name[1:]}"):
                table.add_row(f"{name} {command.argument}".strip(), command.summary)
        self._terminal.console.print(folded(table))
        self._terminal.console.print("Ctrl-C stops a reply and keeps what was said.")
        self._terminal.console.print('For several lines: Meta-Enter, or """ around them; Ctrl-X Ctrl-E for an editor.')

    def _reset(self, argument: str) -> None:
        self._start_over(None)
        self._terminal.note("Started a new conversation.")

    def _system(self, argument: str) -> None:
        if argument:
            self._start_over(named_prompts().get(argument, argument))
            self._terminal.note("Started a new conversation with this system prompt.")
        else:
            system = self._header().system
            self._terminal.note("the template's own, if it has one" if system is None else system)

    def _undo(self, argument: str) -> None:
        count, entries = number_of("/undo", argument) if argument else 1, self._existing_turns()
        self._go_back(count)
        self._terminal.note(f"undone: {title_of(entries[-count])}" + (" ..." if count > 1 else ""))

    def _edit(self, argument: str) -> None:
        spoken = [entry for entry in self._turns if entry.kind == "said"]
        if not spoken:
            raise H2OStreamError("nothing was said yet")
        entry = self._entry(number_of("/edit", argument)) if argument else spoken[-1]
        if entry.kind != "said":
            raise H2OStreamError(f"turn {entry.turn} is no message of yours")
        self._take_up(entry)
        later = len(self._turns) - self._turns.index(entry)
        what = "this turn" if later == 1 else f"this turn and the {later - 1} after it"
        self._terminal.note(f"the next message takes the place of {what}: {title_of(entry)}")

    def _copy(self, argument: str) -> None:
        text = (self._entry(number_of("/copy", argument)) if argument else self._existing_turns()[-1]).text
        self._terminal.copy(text)
        self._terminal.note(f"copied {len(text):,} characters")

    def _existing_turns(self) -> Sequence[Entry]:
        """The turns; raises H2OStreamError if there are none."""
        if not self._turns:
            raise H2OStreamError("nothing was said yet")
        return self._turns

    def _entry(self, number: int) -> Entry:
        entry = next((entry for entry in self._turns if entry.turn == number), None)
        if entry is None:
            raise H2OStreamError(f"there is no turn {number} in the transcript")
        return entry

    def _sessions(self, argument: str) -> None:
        show_sessions(self._terminal, self._terminal.console)

    def _search(self, argument: str) -> None:
        show_matches(self._terminal.console, argument)

    def _export(self, argument: str, thinking: bool = False) -> None:
        path = user_path(argument, f"/export {argument}")
        export(path, self._header(), self._turns, thinking)
        self._terminal.note(f"written: {argument}")


def title_of(entry: Entry) -> str:
    """The beginning of a turn's message, on one line."""
    text = " ".join(entry.prompt.split())
    return text if len(text) <= _TITLE else f"{text[: _TITLE - 1]}…"


def number_of(command: str, text: str) -> int:
    """The number that a command is given; raises ConfigError if it is none."""
    if (number := whole_number(text)) is None:
        raise ConfigError(f"{command} takes a number, not {text!r}")
    return number
