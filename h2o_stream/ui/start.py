"""Loads a model and opens a conversation on it, with notes for the user and the run's first record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from typing import Any

from rich.text import Text

from h2o_stream.config import Settings
from h2o_stream.engine.engine import Engine
from h2o_stream.errors import H2OStreamError
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.progress import ProgressCallback
from h2o_stream.runtime.checking import BackgroundCheck
from h2o_stream.runtime.loading import load_model
from h2o_stream.session.conversation import Conversation
from h2o_stream.session.jsonl import JsonlWriter
from h2o_stream.session.run_record import run_record
from h2o_stream.session.turn import Turn
from h2o_stream.ui.format import format_bytes, sampling_line, sampling_values
from h2o_stream.ui.interrupts import Interrupts
from h2o_stream.ui.loading import show_loading
from h2o_stream.ui.terminal import Terminal, one_line

_NOTICED_BYTES = 2**20
"""From this many on, bytes that a turn has read from disk are worth a line."""

_FORGOTTEN_BYTES = 2**30
"""Up to so many bytes that all turns have read from disk may be other files than the weights."""

_UNNOTICED_S = 0.3
"""A check that ends within this time is waited for without a word."""

_REDRAWN_S = 0.5
"""How often the stage of a check that is waited for is drawn."""


@dataclass
class LoadedConversation:
    """A conversation on a loaded model, which the chat may replace by another one."""

    conversation: Conversation
    interrupts: Interrupts
    model: LoadedModel
    settings: Settings
    _disk_bytes: int = field(default=0, init=False)

    def note_disk(self, turn: Turn, terminal: Terminal) -> None:
        """Say how much a turn has read from disk, and once that the weights do not stay in memory if they do not."""
        if turn.disk_bytes >= _NOTICED_BYTES:
            terminal.detail(f"{format_bytes(turn.disk_bytes)} were read from disk meanwhile")
        before, size = self._disk_bytes, self.model.file_bytes
        self._disk_bytes += turn.disk_bytes
        only_weights = size and self.settings.cache.memory == "off"  # a memory on disk is read, too
        if only_weights and before <= max(size, _FORGOTTEN_BYTES) < self._disk_bytes:
            terminal.note(
                f"the weights of {self.name} do not stay in memory: parts of its {format_bytes(size)} are read from "
                "disk again and again, which makes replies slow; more free memory or a smaller --model is faster"
            )

    def begin_check(self) -> None:
        """Compare the model with transformers' in the background, if it is used for the first time."""
        if self.model.check is not None:
            self.model.check.begin()

    def check(self) -> None:
        """Raises H2OStreamError if the model is known by now to be read wrongly; see `runtime.checking`."""
        check = self.model.check
        if check is not None and check.complaint:
            raise H2OStreamError(check.complaint)

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.model.name

    @property
    def title(self) -> str:
        """Model, policy and window, for display."""
        plan, counts = self.conversation.engine.cache.plan, self.conversation.engine.counts
        ratios = self.settings.cache.ratios_text
        given = f"{ratios} of the first prompt" if ratios else counts.window_note
        given += " (auto)" * (self.settings.cache.auto_window > 0)
        window = f" · window {given} · {plan.positions}" if plan.window else ""
        return f"{self.name} · {plan.policy}{window}"

    def describe(self) -> dict[str, Any]:
        """Model, cache and sampling for a record."""
        engine, config = self.conversation.engine, self.settings.cache
        plan = engine.cache.plan
        return {
            "model": self.name,
            "policy": plan.policy,
            "window": None if config.by_ratio else plan.window or None,
            "cache": asdict(config if config.by_ratio else plan),
            "dtype": engine.served.dtype,
            "device": engine.served.device,
            "sampling": asdict(engine.sampling) | sampling_values(engine),
            "sampling_sources": engine.sampler.sources,
        }

    @property
    def header(self) -> str:
        """The title, and how tokens are sampled."""
        return f"{self.title} · {sampling_line(self.conversation.engine)}"


def load_conversation(
    settings: Settings, notify: Callable[[str], None], progress: ProgressCallback
) -> LoadedConversation:
    """Load a model and open a conversation on it, in any thread and without a terminal. Arguments: see `load_model`."""
    model = load_model(settings.model, settings.cache, settings.engine, notify, progress)
    return converse(model, settings, Interrupts(model.check), progress)


def converse(
    model: LoadedModel, settings: Settings, interrupts: Interrupts, progress: ProgressCallback
) -> LoadedConversation:
    """Open a conversation on a model that nothing else uses, and that can be served with these settings."""
    engine = Engine(
        model.model,
        model.tokenizer,
        settings.cache,
        settings.sampling,
        settings.at_context,
        interrupts,
        settings.engine,
        progress,
        model.sampling,
    )
    thinking = False if settings.think == "off" else None
    system = model.system if settings.system is None else settings.system
    try:
        conversation = Conversation(engine, system, model.stops, settings.recall, thinking, settings.tools)
        conversation.follow(settings.json_schema)
    except BaseException:
        engine.close()
        raise
    return LoadedConversation(conversation, interrupts, model, settings)


def finish_check(loaded: LoadedConversation, terminal: Terminal) -> None:
    """Wait until a model that was used for the first time has been compared, unless the user is in a hurry.

    Raises:
        H2OStreamError: it was read wrongly.
    """
    check = loaded.model.check
    if check is None or (loaded.interrupts.requested and not check.complaint):
        return
    try:
        if not check.wait(_UNNOTICED_S):
            _wait(check, loaded.name, terminal)
    except KeyboardInterrupt:
        terminal.note("not checked; the next start does it", style="dim")
        return
    loaded.check()
    if check.failure:
        terminal.note(f"{loaded.name} could not be checked against transformers: {check.failure}", style="dim")
    if check.doubt:
        terminal.detail(f"{loaded.name} and transformers' model differ: {check.doubt}")


def _wait(check: BackgroundCheck, name: str, terminal: Terminal) -> None:
    """Wait for a check, with a line that says so; on a live terminal it says what the check does now, too."""
    line = f"checking {one_line(PurePath(name).name or name)} against transformers, only this time (Ctrl-C skips)"
    if terminal.quiet or not terminal.live:
        terminal.note(f"{line} ...", "dim")
        check.wait()
        return
    begun = time.monotonic()
    with terminal.console.status(Text(line)) as status:
        while not check.wait(_REDRAWN_S):
            status.update(Text(f"{line}: {check.stage}, {time.monotonic() - begun:.0f} s", overflow="ellipsis"))


@contextmanager
def open_conversation(
    command: str, settings: Settings, terminal: Terminal, jsonl: JsonlWriter, loaded: LoadedConversation | None = None
) -> Iterator[LoadedConversation]:
    """Open a conversation. Leaving the block restores the model. The run record of `command` is written first."""
    if loaded is None:
        with show_loading(settings.model.model, terminal) as progress:
            loaded = load_conversation(settings, terminal.note, progress)
    loaded.conversation.recall.notify = terminal.note
    template = loaded.conversation.metadata.template
    if settings.think == "off" and template.markers and not template.thinking_switch:
        terminal.note("the model's chat template has no switch for thinking; it is folded")
    try:
        seed = loaded.conversation.engine.sampler.seed
        jsonl.write(run_record(command, **loaded.describe(), recall=settings.recall.mode, seed=seed))
        terminal.detail(f"steps: {loaded.conversation.engine.cache.engine_note}")
        if loaded.model.why_transformers:
            terminal.detail(f"loaded by torch and transformers: {loaded.model.why_transformers}")
        if loaded.model.check is not None:
            terminal.detail("compared with transformers' model meanwhile, for the first time")
        yield loaded
        finish_check(loaded, terminal)
    finally:
        loaded.conversation.engine.close()
        if loaded.model.check is not None:
            loaded.model.check.stop()
