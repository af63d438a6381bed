"""Loads a model and opens a conversation on it, with notices for the user and the run's first record."""

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
from h2o_stream.session.records import Records, run_record
from h2o_stream.ui.interrupts import Interrupts
from h2o_stream.ui.loading import shown_loading
from h2o_stream.ui.terminal import Terminal


@dataclass(frozen=True)
class Started:
    """A conversation that is ready.

    Attributes:
        conversation: with an empty cache.
        interrupts: to be entered where Ctrl-C should end a turn instead of the program.
        name: of the model.
        title: model, policy and window, for people.
    """

    conversation: Conversation
    interrupts: Interrupts
    name: str
    title: str


def prepare(settings: Settings, notify: Callable[[str], None], progress: ProgressCallback) -> Started:
    """Load a model and open a conversation on it, in any thread; needs no terminal. Arguments as for `load`."""
    loaded = load(settings.model, settings.cache, notify, progress)
    interrupts = Interrupts()
    engine = Engine(
        loaded.model,
        loaded.tokenizer,
        settings.cache,
        settings.sampling,
        settings.at_context,
        interrupts,
        settings.engine,
        progress,
    )
    plan = engine.cache.plan
    window = f" · window {plan.window} · {plan.positions}" if plan.window else ""
    title = f"{loaded.name} · {plan.policy}{window}"
    return Started(Conversation(engine, settings.system, loaded.stops), interrupts, loaded.name, title)


@contextmanager
def started(
    command: str, settings: Settings, terminal: Terminal, records: Records, ready: Started | None = None
) -> Iterator[Started]:
    """Open a conversation as `settings` says; leaving the block gives the model back.

    Args:
        command: its name, for the records.
        settings: of the conversation.
        terminal: where notes go.
        records: gets the run's first record.
        ready: what `prepare` made, if it did already.
    """
    if ready is None:
        with shown_loading(settings.model.model, terminal) as progress:
            ready = prepare(settings, terminal.note, progress)
    engine = ready.conversation.engine
    with engine:
        plan = engine.cache.plan
        records.write(
            run_record(
                command,
                model=ready.name,
                policy=plan.policy,
                window=plan.window or None,
                cache=asdict(plan),
                dtype=str(engine.model.dtype).removeprefix("torch."),
                device=str(home_of(engine.model)),
                sampling=asdict(settings.sampling),
                seed=engine.sampler.seed,
            )
        )
        terminal.detail(f"steps: {engine.cache.engine_note}")
        yield ready
