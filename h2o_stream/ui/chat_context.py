"""What the chat loop and its commands share: the conversation, the terminal and the statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from h2o_stream.config import ChatConfig, RecallConfig, SamplingConfig, Settings, ThinkMode
from h2o_stream.engine.events import Finished, PrefillProgress
from h2o_stream.errors import H2OStreamError
from h2o_stream.loading.loading import load_model, serves
from h2o_stream.session.automatic import automatic_session
from h2o_stream.session.folders import similar_session, write_settings
from h2o_stream.session.history import ConversationHistory
from h2o_stream.session.jsonl import JsonlWriter
from h2o_stream.session.report import RunReport
from h2o_stream.session.sessions import Session
from h2o_stream.session.transactions import NoStateError, ResumeError
from h2o_stream.session.transcript import Entry, Header
from h2o_stream.ui.loading import show_loading
from h2o_stream.ui.sessions import show_resumed
from h2o_stream.ui.settings import parse_setting
from h2o_stream.ui.start import LoadedConversation, converse
from h2o_stream.ui.terminal import PrefillStatus, Terminal


def header(loaded: LoadedConversation) -> Header:
    """Describes a conversation in its session."""
    plan = loaded.conversation.engine.cache.plan
    return Header(loaded.name, plan.policy, plan.window, None)


@dataclass
class ChatContext:
    """A chat's state, with every option's value and where it comes from."""

    loaded: LoadedConversation
    history: ConversationHistory
    config: ChatConfig
    terminal: Terminal
    jsonl: JsonlWriter
    sources: Mapping[str, tuple[Any, str]]
    think: ThinkMode
    report: RunReport = field(default_factory=RunReport)
    leaving: bool = False
    edited: Entry | None = None

    def feed(self, events: Iterator[PrefillProgress | Finished]) -> bool:
        """Show the progress of feeding without a reply, which Ctrl-C ends. Returns whether it was completed.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed where nobody can type another message.
        """
        interrupts = self.loaded.interrupts
        with interrupts, self.terminal.unechoed(), closing(PrefillStatus(self.terminal)) as status:
            complete = True
            for event in events:
                if isinstance(event, PrefillProgress):
                    status.show(event.done, event.total)
                else:
                    complete = False
                    self.terminal.error(event.detail or f"{event.reason}: not all of it was read")
        if interrupts.requested and not self.terminal.interactive:
            raise KeyboardInterrupt
        return complete

    def go_back(self, count: int) -> None:
        """Undo so many turns. Those before them are fed again if the state after them is no longer available.

        Raises:
            H2OStreamError: there are fewer turns, or Ctrl-C ended the feeding. The conversation goes on as before.
        """
        entries = self.history.entries
        try:
            self.history.undo(count)
        except NoStateError as error:
            self.terminal.note("the turns before are fed again", style="dim")
            if not self.feed(self.history.rewind(entries[-count - 1].turn)):
                raise H2OStreamError("stopped; the conversation goes on as before") from error

    def open_session(self, name: str | None = None) -> None:
        """Resume the session of this name, which exists, or that of the configuration, which may be new.

        If its state cannot be loaded, its transcript may be fed again.

        Raises:
            H2OStreamError: it cannot be opened, or its state cannot be loaded and its transcript is not to be fed.
        """
        create, name = name is None, name or self.config.session
        if name is None:
            return
        similar = similar_session(name) if create else None
        try:
            existed = self.history.open(name, create)
        except ResumeError as error:
            question = "Feed its transcript to this model again? The cache will differ from what it was."
            if isinstance(error, NoStateError):
                self.terminal.note(f"session {name} has no saved cache; its transcript is fed again", style="dim")
            elif not self.config.retell and not self._confirm(f"{error}.", question):
                raise ResumeError(f"{error}; --retell feeds its transcript again") from error
            if not self.feed(self.history.replay(name)):
                raise H2OStreamError(f"session {name} was not fed completely and is unchanged") from error
            existed = True
        if entries := self.history.entries:
            show_resumed(self.terminal, name, entries)
        elif not existed:
            self.terminal.note(f"session {name} started" + f"; did you mean {similar}?" * bool(similar), style="dim")

    def start_session(self, text: str) -> Session:
        """An automatic session with these first words, and the options of this chat; see `automatic_session`."""
        session = automatic_session(text)
        write_settings(session.name, self.kept_options())
        return session

    def keep_options(self, command: str = "", **changed: Any) -> None:
        """Keep the options of this chat in its session, with those that a command has changed."""
        self.sources = {**self.sources, **{name: (value, command) for name, value in changed.items()}}
        if self.history.session is not None:
            write_settings(self.history.session.name, self.kept_options())

    def take_options(self, kept: Mapping[str, Any]) -> None:
        """Sample, recall and draw thinking as the session did that was opened; its model and cache are in its state.

        Raises ConfigError if the options are damaged.
        """
        engine, recall = self.loaded.conversation.engine, self.loaded.conversation.recall
        names = {field.name for field in fields(SamplingConfig)} & kept.keys()
        mode, think = kept.get("recall", recall.mode), kept.get("think", self.think)
        replace(self.loaded.settings, recall=RecallConfig(mode), think=think)  # checks both
        if names:
            sampling = dict(parse_setting(f"{name} {kept[name]}") for name in names - {"stop"})
            if "stop" in names:
                sampling["stop"] = tuple(map(str, kept["stop"]))
            engine.set_sampling(replace(engine.sampling, **sampling))
        recall.mode, self.think = mode, think
        taken = names | ({"recall", "think"} & kept.keys())
        self.sources = {**self.sources, **{name: (kept[name], "session") for name in taken}}

    def kept_options(self) -> dict[str, Any]:
        """The options that a session keeps: those that are not the defaults, the model and the policy."""
        kept = dict[str, Any]()
        for name in self.config.kept_options & self.sources.keys():
            value, source = self.sources[name]
            if value is None or (source == "default" and name not in ("model", "policy")):
                continue
            is_path = isinstance(value, Path) or (name == "model" and Path(value).expanduser().exists())
            kept[name] = str(Path(value).expanduser().absolute()) if is_path else value
        return kept

    def change(self, model: str | None = None, **cache: Any) -> None:
        """Continue with another model, or with another cache: its transcript is fed again. All or nothing. `cache` has
        fields of `CacheConfig`.

        Raises:
            H2OStreamError: that is impossible, or was stopped. The conversation goes on as before.
        """
        old, loaded = self.loaded.conversation, self.loaded
        if "window" in cache:  # in place of what chose the window before
            cache = {**cache, "heavy_ratio": None, "recent_ratio": None, "cache_size": None, "auto_window": 0}
        settings = self._settings(model, cache)
        self.history.suspend()
        try:
            if model is None:
                old.engine.close()
            new = self._open(settings)
            try:
                if not self.feed(self.history.continue_in(new.conversation, header(new))):
                    raise H2OStreamError("the transcript was not fed completely; the conversation goes on as before")
            except BaseException:
                new.conversation.engine.close()
                raise
        except BaseException:
            if model is None:
                old.engine.reopen()
                self.history.resume()
            raise
        old.engine.close()
        loaded.conversation, loaded.model, loaded.settings = new.conversation, new.model, settings
        changed = cache if model is None else {"model": model}
        options = {name: value for name, value in changed.items() if name in self.sources}
        self.keep_options(f"/{next(iter(changed))}", **options)
        self.record_change()

    def record_change(self) -> None:
        """Write a record of what the conversation goes on with."""
        self.jsonl.write({
            "type": "change", "turn": self.loaded.conversation.metadata.turns, **self.loaded.describe(),
        })  # fmt: skip

    def _settings(self, model: str | None, cache: Mapping[str, Any]) -> Settings:
        """The settings of the conversation as it is now, with another model or cache."""
        settings, conversation = self.loaded.settings, self.loaded.conversation
        return replace(
            settings,
            model=settings.model if model is None else replace(settings.model, model=model),
            cache=replace(settings.cache, **cache),
            sampling=replace(conversation.engine.sampling, seed=conversation.engine.sampler.seed),
            system=conversation.system,
            recall=replace(settings.recall, mode=conversation.recall.mode),
        )

    def _open(self, settings: Settings) -> LoadedConversation:
        old = self.loaded
        with show_loading(settings.model.model, self.terminal) as progress:
            model = old.model
            if settings.model != old.settings.model or not serves(model, settings.cache):
                model = load_model(settings.model, settings.cache, settings.engine, self.terminal.note, progress)
            new = converse(model, settings, old.interrupts, progress)
        new.conversation.engine.sampler.rng_state = old.conversation.engine.sampler.rng_state
        new.conversation.recall.notify = self.terminal.note
        return new

    def _confirm(self, fact: str, question: str) -> bool:
        if not self.terminal.interactive:
            return False
        self.terminal.note(fact)
        try:
            return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
        except EOFError:
            return False
