"""Loads a model and opens a conversation on it, with notes for the user and the run's first record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from h2o_stream.base.memory import format_bytes
from h2o_stream.base.progress import ProgressCallback
from h2o_stream.config import Settings
from h2o_stream.engine.engine import Engine
from h2o_stream.loading.loading import load_model
from h2o_stream.models.loaded import LoadedModel
from h2o_stream.session.conversation import Conversation
from h2o_stream.session.jsonl import JsonlWriter
from h2o_stream.session.run_record import run_record
from h2o_stream.session.turn import Turn
from h2o_stream.ui.format import sampling_line, sampling_values
from h2o_stream.ui.interrupts import Interrupts
from h2o_stream.ui.loading import show_loading
from h2o_stream.ui.terminal import Terminal

_NOTICED_BYTES = 2**20
"""From this many on, bytes that a turn has read from disk are worth a line."""

_FORGOTTEN_BYTES = 2**30
"""Up to so many bytes that all turns have read from disk may be other files than the weights."""


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
        if size and before <= max(size, _FORGOTTEN_BYTES) < self._disk_bytes:
            terminal.note(
                f"the weights of {self.name} do not stay in memory: parts of its {format_bytes(size)} are read from "
                "disk again and again, which makes replies slow; more free memory or a smaller --model is faster"
            )

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.model.name

    @property
    def title(self) -> str:
        """Model, policy and window, for display."""
        plan, counts = self.conversation.engine.cache.plan, self.conversation.engine.counts
        ratios = self.settings.cache.ratios_text
        window_text = f"{ratios} of the first prompt" if ratios else counts.window_note
        bits = f", {plan.kv_bits} bits" if plan.kv_bits < 16 else ""
        window_text += f" (auto{bits})" if self.settings.cache.auto_window else ""
        window = f" · window {window_text} · {plan.positions}" if plan.window else ""
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
    return converse(model, settings, Interrupts(), progress)


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
        settings.speculate,
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
        yield loaded
    finally:
        loaded.conversation.engine.close()
