"""Executes the chat's commands: lines that begin with a slash."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

from rich.table import Table

from h2o_stream.config import RecallMode, SamplingConfig, ThinkMode
from h2o_stream.errors import ConfigError, DataError, H2OStreamError
from h2o_stream.recall.passage import Candidate
from h2o_stream.resources import is_file, user_path
from h2o_stream.session.memory import report_memory
from h2o_stream.session.retention import retention
from h2o_stream.session.transcript import Entry
from h2o_stream.session.why import explain
from h2o_stream.texts import read_text
from h2o_stream.ui.command_list import ALIASES, COMMANDS, unknown_command
from h2o_stream.ui.documents import read_file
from h2o_stream.ui.format import SOURCES, format_bytes, legend
from h2o_stream.ui.heatmap import explanation, heatmap
from h2o_stream.ui.memory import memory_lines
from h2o_stream.ui.recall import candidates_table
from h2o_stream.ui.session_commands import SessionCommands
from h2o_stream.ui.tables import print_report
from h2o_stream.ui.terminal import one_line

_SETTING_ALIASES = {"temp": "temperature", "n": "max_tokens"}

_DRAWN = {"show": "shown", "fold": "folded", "hide": "hidden"}


class Commands(SessionCommands):
    """Executes commands in a chat. The command ``/name`` is the method ``_name``."""

    def execute(self, line: str) -> str | None:
        """Execute a command line. Returns a message for the model, or None."""
        name, _, argument = line.partition(" ")
        name, argument = name.strip(), argument.strip()
        name = ALIASES.get(name, name)
        command = COMMANDS.get(name)
        if command is None:
            self._terminal.error(unknown_command(name))
        elif command.requires_argument and not argument:
            self._terminal.error(f"{name} needs {command.argument}: {command.summary}")
        elif argument and not command.argument:
            self._terminal.error(f"{name} takes no argument")
        else:
            try:
                method: Callable[[str], str | None] = getattr(self, f"_{name[1:]}")
                return method(argument)
            except H2OStreamError as error:
                self._terminal.error(str(error))
        return None

    def _help(self, argument: str) -> None:
        table = Table.grid(padding=(0, 2, 0, 0))
        for name, command in COMMANDS.items():
            table.add_row(f"{name} {command.argument}".strip(), command.summary)
        self._terminal.console.print(table)
        self._terminal.console.print("Ctrl-C stops a reply and keeps what was said.")
        self._terminal.console.print('For several lines: Meta-Enter, or """ around them; Ctrl-X Ctrl-E for an editor.')

    def _reset(self, argument: str) -> None:
        self._history.reset()
        self._terminal.note("Started a new conversation.")

    def _system(self, argument: str) -> None:
        if argument:
            self._history.reset(argument)
            self._terminal.note("Started a new conversation with this system prompt.")
        else:
            system = self._history.conversation.system
            self._terminal.note("the template's own, if it has one" if system is None else system)

    def _set(self, argument: str) -> None:
        engine = self._history.conversation.engine
        name, _, value = argument.partition(" ")
        name = _SETTING_ALIASES.get(name, name).replace("-", "_")
        sampling = dataclasses.replace(engine.sampling, **{name: _parse_setting(name, value.strip())})
        engine.set_sampling(sampling, reseed=name == "seed")
        self._context.keep_options("/set", **{name: getattr(sampling, name)})
        self._terminal.note(f"{name} is now {value.strip()}")

    def _show(self, argument: str) -> None:
        if argument == "config":
            rows = [(name, value, source) for name, (value, source) in self._context.sources.items()]
        elif argument:
            raise ConfigError(f"/show takes config or nothing, not {argument}")
        else:
            engine = self._history.conversation.engine
            sampling = dataclasses.asdict(engine.sampling) | engine.sampler.settings | {"seed": engine.sampler.seed}
            sources = engine.sampler.sources
            rows = [
                (name, value, SOURCES[sources[name]] if name in sources else "") for name, value in sampling.items()
            ]
        table = Table.grid(padding=(0, 2, 0, 0))
        for name, value, source in rows:
            table.add_row(name, "-" if value is None else one_line(value), source)
        self._terminal.console.print(table)

    def _window(self, argument: str) -> None:
        self._context.change(window=_parse_number("/window", argument))
        self._note_change()

    def _policy(self, argument: str) -> None:
        self._context.change(policy=argument.lower())
        self._note_change()

    def _model(self, argument: str) -> None:
        self._context.change(argument)
        self._note_change()

    def _note_change(self) -> None:
        counts, turns = self._history.conversation.engine.counts, len(self._history.entries)
        fed = (
            f"fed again: {turns} turn{'s' * (turns != 1)}, {counts.seen:,} tokens, of which {counts.cached:,} are kept"
            if turns
            else ""
        )
        self._terminal.note("; ".join(filter(None, (f"now {self._context.loaded.title}", fed))))

    def _stats(self, argument: str) -> None:
        counts = self._history.conversation.engine.counts
        loaded = self._context.loaded
        print_report(self._terminal, self._context.report, loaded.title, loaded.conversation.engine.context)
        context = self._context.loaded.conversation.engine.context
        uses = ", ".join(text for _, text in legend(counts, context))
        self._terminal.note(f"now {uses}; {format_bytes(counts.nbytes)}")

    def _memory(self, argument: str) -> None:
        conversation = self._history.conversation
        for line in memory_lines(report_memory(conversation.engine, conversation.turn_spans)):
            self._terminal.note(line)

    def _why(self, argument: str) -> None:
        conversation = self._history.conversation
        first, _, rest = argument.partition(" ")
        layer, word = (int(first), rest.strip()) if first.isdecimal() else (None, argument)
        if not conversation.turn_spans:
            raise H2OStreamError("nothing was said yet")
        if word:
            for found in explain(self._history, word, layer):
                self._terminal.console.print(explanation(found))
            return
        turns = retention(
            conversation.engine, conversation.turn_spans, layer, conversation.recalled, conversation.thoughts
        )
        self._terminal.console.print(heatmap(turns, "all layers" if layer is None else f"layer {layer}"))

    def _pin(self, argument: str) -> None:
        before = self._history.conversation.engine.counts.window
        if self._context.feed(self._history.pin(argument)):
            counts = self._history.conversation.engine.counts
            self._terminal.note("pinned" + f"; window {counts.window_note}" * (counts.window > before))

    def _pins(self, argument: str) -> None:
        conversation = self._history.conversation
        counts = conversation.engine.counts
        self._terminal.note(
            f"{counts.sinks} sinks and {counts.pinned} pinned tokens of {counts.window_text or 'no limit'}"
        )
        for number, text in enumerate([conversation.system or "the template's own opening", *conversation.pins]):
            self._terminal.note(f"{number or 'system'}: {text}")

    def _file(self, argument: str) -> str | None:
        name, question = _split_path(argument)
        path = user_path(name, f"/file {name}")
        text = read_text(path, f"/file {name}")
        if not text.strip():
            raise DataError(f"/file {name}: the file is empty")
        return read_file(self._context, path.name, text.strip(), question)

    def _regen(self, argument: str) -> str:
        return self._history.regenerate()

    def _undo(self, argument: str) -> None:
        undone = self._history.undo(_parse_number("/undo", argument) if argument else 1)
        self._terminal.note(f"undone: {' '.join(undone[0].prompt.split())[:60]}" + (" ..." if len(undone) > 1 else ""))

    def _recall(self, argument: str) -> None:
        recall = self._history.conversation.recall
        if argument in get_args(RecallMode):
            recall.mode = cast(RecallMode, argument)
            self._context.keep_options("/recall", recall=argument)
            self._terminal.note(f"recall is {argument}")
        elif argument.isdecimal():
            self._read_again(int(argument))
        elif recall.mode == "off":
            self._terminal.note("recall is off; /recall auto switches it on")
        elif argument:
            self._show_candidates(recall.decide(argument), "nothing would be recalled: no passage has these words")
        else:
            self._show_candidates(recall.last, "no passage was found for the last message")

    def _show_candidates(self, candidates: Sequence[Candidate], otherwise: str) -> None:
        if candidates:
            self._terminal.console.print(candidates_table(candidates))
        else:
            self._terminal.note(otherwise)

    def _think(self, argument: str) -> None:
        if argument in ("on", "off"):
            self._history.conversation.switch_thinking(argument == "on")
            self._context.keep_options("/think", think="off" if argument == "off" else self._context.think)
            self._terminal.note(f"thinking is {argument} from the next message on")
        elif argument in _DRAWN:
            self._context.think = cast(ThinkMode, argument)
            self._context.keep_options("/think", think=argument)
            self._terminal.note(f"thinking is now {_DRAWN[argument]}")
        elif argument and not argument.isdecimal():
            raise ConfigError(f"/think takes show, fold, hide, on, off or the number of a turn, not {argument!r}")
        else:
            self._show_thinking(int(argument) if argument else None)

    def _show_thinking(self, number: int | None) -> None:
        entries = self._history.entries
        if number is None and not entries:
            raise H2OStreamError("nothing was said yet")
        entry = entries[-1] if number is None else self._entry(number)
        if entry.thinking:
            self._terminal.console.print(entry.thinking, style="dim")
        else:
            self._terminal.note(f"turn {entry.turn} has no thinking")

    def _entry(self, number: int) -> Entry:
        entry = next((entry for entry in self._history.entries if entry.turn == number), None)
        if entry is None:
            raise H2OStreamError(f"there is no turn {number} in the transcript")
        return entry

    def _read_again(self, number: int) -> None:
        entry = self._entry(number)
        if self._context.feed(self._history.feed_turn(entry.prompt, entry.text)):
            self._terminal.note(f"turn {number} was read again: {' '.join(entry.prompt.split())[:60]}")

    def _exit(self, argument: str) -> None:
        self._context.leaving = True


def _split_path(text: str) -> tuple[str, str]:
    """A path and the text after it. The path is the longest prefix that is a file, or else the quoted part."""
    gaps = [gap.start() for gap in re.finditer(r"\s", text)]
    for end in (len(text), *reversed(gaps)):
        if is_file(Path(text[:end])):
            return text[:end], text[end:].strip()
    quoted = re.match(r"""(["'])(.+?)\1""", text)
    end = quoted.end() if quoted else gaps[0] if gaps else len(text)
    return quoted[2] if quoted else text[:end], text[end:].strip()


def _parse_number(command: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{command} takes a number, not {text!r}")
    return int(text)


def _parse_setting(name: str, value: str) -> Any:
    """The value of a field of `SamplingConfig` from its text."""
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
