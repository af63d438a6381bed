"""What the chat loop and its commands share: the conversation, the terminal and the statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from h2o_stream.config import ChatConfig, Settings, ThinkMode
from h2o_stream.engine.events import Finished, PrefillProgress
from h2o_stream.errors import H2OStreamError
from h2o_stream.runtime.loading import load_model, serves
from h2o_stream.session.history import ConversationHistory, ResumeError
from h2o_stream.session.jsonl import JsonlWriter
from h2o_stream.session.report import RunReport
from h2o_stream.session.transcript import Header
from h2o_stream.ui.loading import show_loading
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

    def feed(self, events: Iterator[PrefillProgress | Finished]) -> bool:
        """Show the progress of feeding without a reply, which Ctrl-C ends. Returns whether it was completed.

        Raises:
            KeyboardInterrupt: the program is to end, or Ctrl-C was pressed where nobody can type another message.
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
        if interrupts.terminated or (interrupts.requested and not self.terminal.interactive):
            raise KeyboardInterrupt
        return complete

    def open_session(self, name: str | None = None) -> None:
        """Resume the session of this name, which exists, or that of the configuration, which may be new.

        If its state cannot be loaded, its transcript may be fed again.

        Raises:
            H2OStreamError: it cannot be opened, or its state cannot be loaded and its transcript is not to be fed.
        """
        create, name = name is None, name or self.config.session
        if name is None:
            return
        try:
            existed = self.history.open(name, create)
        except ResumeError as error:
            question = "Feed its transcript to this model again? The cache will differ from what it was."
            if not self.config.retell and not self._confirm(f"{error}.", question):
                raise ResumeError(f"{error}; --retell feeds its transcript again") from error
            if not self.feed(self.history.replay(name)):
                raise H2OStreamError(f"session {name} was not fed completely and is unchanged") from error
            existed = True
        entries = self.history.entries
        if entries:
            last = " ".join(entries[-1].prompt.split())
            self.terminal.note(f"session {name} resumed after turn {entries[-1].turn}: {last[:60]}", style="dim")
        elif not existed:
            self.terminal.note(f"session {name} started", style="dim")

    def change(self, model: str | None = None, **cache: Any) -> None:
        """Continue with another model, or with another cache: its transcript is fed again. All or nothing. `cache` has
        fields of `CacheConfig`.

        Raises:
            H2OStreamError: that is impossible, or was stopped. The conversation goes on as before.
        """
        old, loaded = self.loaded.conversation, self.loaded
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
        except BaseException as error:
            if model is None:
                old.engine.reopen()
                self.history.resume()
            if isinstance(error, KeyboardInterrupt) and self.terminal.interactive and not loaded.interrupts.terminated:
                raise H2OStreamError("stopped; the conversation goes on as before") from error
            raise
        old.engine.close()
        if loaded.model.check is not None and loaded.model is not new.model:
            loaded.model.check.stop()
        loaded.conversation, loaded.model, loaded.settings = new.conversation, new.model, settings
        loaded.interrupts.check = new.model.check
        changed = cache if model is None else {"model": model}
        self.sources = {**self.sources, **{name: (value, f"/{name}") for name, value in changed.items()}}
        self.jsonl.write({"type": "change", "turn": new.conversation.metadata.turns, **new.describe()})

    def _settings(self, model: str | None, cache: Mapping[str, Any]) -> Settings:
        """The settings of the conversation as it is now, with another model or cache."""
        settings, conversation = self.loaded.settings, self.loaded.conversation
        if "window" in cache:  # in place of what chose the window before
            cache = {"heavy_ratio": None, "recent_ratio": None, "cache_size": None, "auto_window": 0, **cache}
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
