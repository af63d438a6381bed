"""Asks questions: in one conversation, live in a terminal or as plain text, or of several policies side by side."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from h2o_stream.config import CacheConfig, Settings
from h2o_stream.engine.events import Finish
from h2o_stream.session.cliff import Cliff
from h2o_stream.session.jsonl import JsonlWriter
from h2o_stream.session.messages import text_of
from h2o_stream.session.questions import Replay, set_temperature
from h2o_stream.session.report import RunReport
from h2o_stream.session.turn import Turn
from h2o_stream.ui.panes import Panes, Side
from h2o_stream.ui.screen import PlainView, Screen
from h2o_stream.ui.start import open_conversation
from h2o_stream.ui.tables import print_report
from h2o_stream.ui.terminal import Terminal


def stream_questions(settings: Settings, replay: Replay, terminal: Terminal, jsonl: JsonlWriter) -> Finish | None:
    """Ask every turn of every question in one conversation. Returns why the last turn ended, if there was one."""
    report, finish = RunReport(), None
    with open_conversation("h2o-stream", settings, terminal, jsonl) as loaded:
        questions = replay.questions
        questions.check(loaded.conversation.metadata.template)
        some = f"{replay.turns:,} of " if replay.turns and replay.turns < questions.turns else ""
        terminal.note(f"{loaded.header} · {some}{questions.turns:,} turns of {questions.source}", style="dim")
        view: Screen | PlainView = PlainView(terminal, settings.think)
        if terminal.live and not terminal.quiet:
            view = Screen(terminal, loaded.title, loaded.conversation.engine.context, settings.think, report)
        before = Cliff.of(loaded.conversation) if replay.cliff else None
        try:
            with view, loaded.interrupts, terminal.unechoed():
                if before is not None:
                    view.start_turn("before the context", before.title)
                    for progress in before.read(loaded.conversation):
                        report.add_event(progress)
                        view.add_event(progress)
                    report.end_turn()
                for title, question, prompt in replay.prompts():
                    view.start_turn(title, text_of(prompt))
                    set_temperature(loaded.conversation.engine, settings.sampling, question)
                    for event in loaded.conversation.say(prompt):
                        for observer in (report, view):
                            observer.add_event(event)
                    assert isinstance(event, Turn), "a turn always ends with a Turn"
                    turn = event
                    jsonl.write(turn.record(question.id))
                    finish = turn.finish
                    if finish in ("interrupted", "context", "oom"):
                        break
        finally:
            if report.turns:
                print_report(terminal, report, loaded.title, loaded.conversation.engine.context)
            jsonl.write(report.record())
    if finish in ("context", "oom"):
        terminal.error(turn.detail)
    return finish


def compare_policies(
    settings: Settings, policies: Sequence[str], replay: Replay, terminal: Terminal, jsonl: JsonlWriter
) -> Finish | None:
    """Ask all policies every turn, on the same cores, for the same time each. Returns why it ended early, or None."""
    seed = settings.sampling.seed if settings.sampling.seed is not None else secrets.randbits(32)
    with ExitStack() as stack:
        sides = [
            Side(policy, stack.enter_context(open_conversation("h2o-stream", chosen, terminal, jsonl)))
            for policy in policies
            for chosen in [_with_policy(settings, policy, seed)]
        ]
        conversation = sides[0].loaded.conversation
        replay.questions.check(conversation.metadata.template)
        before = Cliff.of(conversation) if replay.cliff else None
        panes = Panes(sides, terminal)
        interrupts = sides[0].loaded.interrupts
        for side in sides[1:]:
            side.loaded.conversation.engine.should_stop = interrupts
        stack.callback(_end, sides, panes, jsonl)
        stack.enter_context(panes)
        stack.enter_context(interrupts)
        stack.enter_context(terminal.unechoed())
        if before is not None:
            panes.start_turn("before the context", before.title)
            _run([side.read(before) for side in sides], panes)
            panes.end_reading()
        for title, question, prompt in replay.prompts():
            panes.start_turn(title, text_of(prompt))
            for side in sides:
                set_temperature(side.loaded.conversation.engine, settings.sampling, question)
            _run([side.say(prompt) for side in sides], panes)
            panes.end_turn()
            for side in sides:
                if side.turn is not None:
                    jsonl.write(side.turn.record(question.id) | {"policy": side.policy})
            if any(side.finish == "interrupted" for side in sides) or all(side.finish for side in sides):
                break
    return next((side.finish for side in sides if side.finish), None)


def _end(sides: Sequence[Side], panes: Panes, jsonl: JsonlWriter) -> None:
    """Write the reports and print the verdict, also of a replay that a signal ended."""
    for side in sides:
        jsonl.write(side.report.record() | {"policy": side.policy})
    panes.print_verdict()


def _run(replies: Sequence[Iterator[Any]], panes: Panes) -> None:
    """Take events until all have ended, always of the one that has had the least time: a faster one is seen to be."""
    taken_s = dict.fromkeys(replies, 0.0)
    while taken_s:
        reply = min(taken_s, key=taken_s.__getitem__)
        started = time.perf_counter()
        if next(reply, None) is None:
            del taken_s[reply]
        else:
            taken_s[reply] += time.perf_counter() - started
        panes.draw()


def _with_policy(settings: Settings, policy: str, seed: int) -> Settings:
    """The settings for a policy. A policy other than the configured one uses its own defaults and the same window."""
    cache = settings.cache if settings.cache.policy == policy else CacheConfig(policy, settings.cache.window)
    return replace(settings, cache=cache, sampling=replace(settings.sampling, seed=seed))
