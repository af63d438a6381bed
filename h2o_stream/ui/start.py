"""Loads a model and opens a conversation on it, with notes for the user and the run's first record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from h2o_stream.cache.support import home_of
from h2o_stream.config import Settings
from h2o_stream.engine.engine import Engine
from h2o_stream.models.load import load
from h2o_stream.progress import ProgressCallback
from h2o_stream.session.conversation import Conversation
from h2o_stream.session.jsonl import JsonlWriter
from h2o_stream.session.run_record import run_record
from h2o_stream.ui.interrupts import Interrupts
from h2o_stream.ui.loading import show_loading
from h2o_stream.ui.terminal import Terminal


@dataclass(frozen=True)
class LoadedConversation:
    """A conversation on a loaded model.

    Attributes:
        conversation: with an empty cache.
        interrupts: a context manager in which Ctrl-C ends a turn instead of the program.
        name: of the model.
        title: model, policy and window, for display.
    """

    conversation: Conversation
    interrupts: Interrupts
    name: str
    title: str


def load_conversation(
    settings: Settings, notify: Callable[[str], None], progress: ProgressCallback
) -> LoadedConversation:
    """Load a model and open a conversation on it. Works in any thread and without a terminal. Arguments: see `load`."""
    model = load(settings.model, settings.cache, notify, progress)
    interrupts = Interrupts()
    engine = Engine(
        model.model,
        model.tokenizer,
        settings.cache,
        settings.sampling,
        settings.at_context,
        interrupts,
        settings.engine,
        progress,
    )
    plan = engine.cache.plan
    window = f" · window {plan.window} · {plan.positions}" if plan.window else ""
    title = f"{model.name} · {plan.policy}{window}"
    thinking = False if settings.think == "off" else None
    conversation = Conversation(engine, settings.system, model.stops, settings.recall, thinking, settings.tools)
    return LoadedConversation(conversation, interrupts, model.name, title)


@contextmanager
def open_conversation(
    command: str, settings: Settings, terminal: Terminal, jsonl: JsonlWriter, loaded: LoadedConversation | None = None
) -> Iterator[LoadedConversation]:
    """Open a conversation. Leaving the block restores the model.

    Args:
        command: for the run record.
        settings: of the conversation.
        terminal: where notes go.
        jsonl: receives the run record.
        loaded: the result of `load_conversation`, if it was called already.
    """
    if loaded is None:
        with show_loading(settings.model.model, terminal) as progress:
            loaded = load_conversation(settings, terminal.note, progress)
    engine = loaded.conversation.engine
    loaded.conversation.recall.notify = terminal.note
    template = loaded.conversation.metadata.template
    if settings.think == "off" and template.markers and not template.thinking_switch:
        terminal.note("the model's chat template has no switch for thinking; it is folded")
    with engine:
        plan = engine.cache.plan
        jsonl.write(
            run_record(
                command,
                model=loaded.name,
                policy=plan.policy,
                window=plan.window or None,
                cache=asdict(plan),
                dtype=str(engine.model.dtype).removeprefix("torch."),
                device=str(home_of(engine.model)),
                sampling=asdict(settings.sampling),
                recall=settings.recall.mode,
                seed=engine.sampler.seed,
            )
        )
        terminal.detail(f"steps: {engine.cache.engine_note}")
        yield loaded
