"""Executes the chat's commands: lines that begin with a slash."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import cast, get_args

from rich.table import Table

from h2o_stream.base.memory import format_bytes
from h2o_stream.base.resources import named_prompts
from h2o_stream.config import RecallMode, ThinkMode
from h2o_stream.errors import ConfigError, H2OStreamError
from h2o_stream.recall.passage import Candidate
from h2o_stream.session.retention import retention
from h2o_stream.session.transactions import NoStateError
from h2o_stream.session.transcript import Entry
from h2o_stream.session.why import explain
from h2o_stream.ui.command_list import ALIASES, COMMANDS, unknown_command
from h2o_stream.ui.documents import read_files
from h2o_stream.ui.files import find_files, read_all
from h2o_stream.ui.format import SOURCES, legend
from h2o_stream.ui.heatmap import explanation, heatmap
from h2o_stream.ui.recall import candidates_table, note_recalled
from h2o_stream.ui.session_commands import SessionCommands
from h2o_stream.ui.settings import parse_setting
from h2o_stream.ui.tables import print_report
from h2o_stream.ui.terminal import one_line

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
            self._history.reset(named_prompts().get(argument, argument))
            self._terminal.note("Started a new conversation with this system prompt.")
        else:
            system = self._history.conversation.system
            self._terminal.note("the template's own, if it has one" if system is None else system)

    def _set(self, argument: str) -> None:
        engine = self._history.conversation.engine
        name, value = parse_setting(argument)
        sampling = dataclasses.replace(engine.sampling, **{name: value})
        engine.set_sampling(sampling, reseed=name == "seed")
        self._context.keep_options("/set", **{name: getattr(sampling, name)})
        self._terminal.note(f"{name} is now {argument.partition(' ')[2].strip()}")

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

    def _why(self, argument: str) -> None:
        conversation = self._history.conversation
        first, _, rest = argument.partition(" ")
        layer, word = (int(first), rest.strip()) if first.isdecimal() else (None, argument)
        if not conversation.turn_spans:
            raise H2OStreamError("nothing was said yet")
        if word:
            for place in explain(self._history, word, layer):
                self._terminal.console.print(explanation(place))
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
            if counts.window > before:
                self._context.record_change()

    def _pins(self, argument: str) -> None:
        conversation = self._history.conversation
        counts = conversation.engine.counts
        self._terminal.note(
            f"{counts.sinks} sinks and {counts.pinned} pinned tokens of {counts.window_text or 'no limit'}"
        )
        for number, text in enumerate([conversation.system or "the template's own opening", *conversation.pins]):
            self._terminal.note(f"{number or 'system'}: {text}")

    def _file(self, argument: str) -> str | None:
        files, question = find_files(argument)
        return read_files(self._context, read_all(files, self._terminal.note), question)

    def _regen(self, argument: str) -> str:
        try:
            return self._history.regenerate()
        except NoStateError:
            prompt = self._history.entries[-1].prompt
            self._context.go_back(1)
            return prompt

    def _undo(self, argument: str) -> None:
        count, entries = _parse_number("/undo", argument) if argument else 1, self._history.entries
        self._context.go_back(count)
        self._terminal.note(f"undone: {_title(entries[-count])}" + (" ..." if count > 1 else ""))

    def _edit(self, argument: str) -> None:
        spoken = [entry for entry in self._history.entries if entry.kind == "said"]
        if not spoken:
            raise H2OStreamError("nothing was said yet")
        entry = self._entry(_parse_number("/edit", argument)) if argument else spoken[-1]
        if entry.kind != "said":
            raise H2OStreamError(f"turn {entry.turn} is no message of yours")
        self._context.edited = entry
        later = len(self._history.entries) - self._history.entries.index(entry)
        what = "this turn" if later == 1 else f"this turn and the {later - 1} after it"
        self._terminal.note(f"the next message takes the place of {what}: {_title(entry)}")

    def _copy(self, argument: str) -> None:
        entries = self._history.entries
        if not argument and not entries:
            raise H2OStreamError("nothing was said yet")
        text = (self._entry(_parse_number("/copy", argument)) if argument else entries[-1]).text
        self._terminal.copy(text)
        self._terminal.note(f"copied {len(text):,} characters")

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
            self._show_found(argument)
        else:
            self._show_candidates(recall.last, "no passage was found for the last message")

    def _show_found(self, message: str) -> None:
        """What would be read again before a message."""
        recall = self._history.conversation.recall
        last = recall.last
        passages = recall.find(message)
        candidates, recall.last = recall.last, last
        if passages.whole:
            note_recalled(self._terminal, passages)
        else:
            self._show_candidates(candidates, "nothing would be recalled: no passage has these words")

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
            self._terminal.note(f"turn {number} was read again: {_title(entry)}")

    def _exit(self, argument: str) -> None:
        self._context.leaving = True


_TITLE = 60


def _title(entry: Entry) -> str:
    text = " ".join(entry.prompt.split())
    return text if len(text) <= _TITLE else f"{text[: _TITLE - 1]}…"


def _parse_number(command: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{command} takes a number, not {text!r}")
    return int(text)
