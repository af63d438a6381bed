"""Executes the chat's commands: lines that begin with a slash."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast, get_args

from rich.table import Table

from h2o_stream.base.memory import format_bytes
from h2o_stream.base.options import whole_number
from h2o_stream.config import RecallMode, ThinkMode
from h2o_stream.errors import ConfigError, H2OStreamError
from h2o_stream.recall.passage import Candidate
from h2o_stream.session.folders import read_settings, remove_session, write_settings
from h2o_stream.session.history import ConversationHistory
from h2o_stream.session.retention import retention
from h2o_stream.session.transactions import NoStateError
from h2o_stream.session.transcript import Entry, Header
from h2o_stream.session.why import explain
from h2o_stream.ui.chat_context import ChatContext
from h2o_stream.ui.documents import read_files
from h2o_stream.ui.files import find_files, read_all
from h2o_stream.ui.format import SOURCES, legend
from h2o_stream.ui.heatmap import explanation, heatmap
from h2o_stream.ui.recall import candidates_table, note_recalled
from h2o_stream.ui.settings import parse_setting
from h2o_stream.ui.shared_commands import SharedCommands, number_of, title_of
from h2o_stream.ui.tables import print_report
from h2o_stream.ui.terminal import folded, one_line

_DRAWN = {"show": "shown", "fold": "folded", "hide": "hidden"}


class Commands(SharedCommands):
    """The commands of a chat with a model."""

    def __init__(self, context: ChatContext) -> None:
        super().__init__(context.terminal)
        self._context = context

    @property
    def _history(self) -> ConversationHistory:
        return self._context.history

    @property
    def _turns(self) -> Sequence[Entry]:
        return self._history.entries

    def _start_over(self, system: str | None) -> None:
        self._history.reset(system)

    def _go_back(self, count: int) -> None:
        self._context.go_back(count)

    def _take_up(self, entry: Entry) -> None:
        self._context.edited = entry

    def _header(self) -> Header:
        return self._history.header()

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
        self._terminal.console.print(folded(table))

    def _window(self, argument: str) -> None:
        self._context.change(window=number_of("/window", argument))
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
        layer = whole_number(first)
        word = argument if layer is None else rest.strip()
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
        self._existing_turns()
        try:
            return self._history.regenerate()
        except NoStateError:
            prompt = self._history.entries[-1].prompt
            self._context.go_back(1)
            return prompt

    def _recall(self, argument: str) -> None:
        recall = self._history.conversation.recall
        if argument in get_args(RecallMode):
            recall.mode = cast(RecallMode, argument)
            self._context.keep_options("/recall", recall=argument)
            self._terminal.note(f"recall is {argument}")
        elif (number := whole_number(argument)) is not None:
            self._read_again(number)
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
        elif (number := whole_number(argument)) is None and argument:
            raise ConfigError(f"/think takes show, fold, hide, on, off or the number of a turn, not {argument!r}")
        else:
            self._show_thinking(number)

    def _show_thinking(self, number: int | None) -> None:
        entry = self._existing_turns()[-1] if number is None else self._entry(number)
        if entry.thinking:
            self._terminal.console.print(entry.thinking, style="dim")
        else:
            self._terminal.note(f"turn {entry.turn} has no thinking")

    def _read_again(self, number: int) -> None:
        entry = self._entry(number)
        if self._context.feed(self._history.feed_turn(entry.prompt, entry.text)):
            self._terminal.note(f"turn {number} was read again: {title_of(entry)}")

    def _fork(self, argument: str) -> None:
        self._history.fork(argument)
        self._context.keep_options()
        self._terminal.note(f"the conversation continues as session {argument}")

    def _rename(self, argument: str) -> None:
        session = self._history.session
        self._history.fork(argument)
        self._context.keep_options()
        if session is not None:
            remove_session(session.name)
        self._terminal.note(f"this is session {argument} now")

    def _save(self, argument: str) -> None:
        self._history.save(argument)
        write_settings(argument, self._context.kept_options())
        self._terminal.note(f"saved as session {argument}")

    def _load(self, argument: str) -> None:
        self._context.open_session(argument)
        self._context.take_options(read_settings(argument))

    def _export(self, argument: str, thinking: bool = False) -> None:
        super()._export(argument, self._context.think == "show")

    def _exit(self, argument: str) -> None:
        self._context.leaving = True
