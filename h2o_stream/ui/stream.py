"""Asks questions in one conversation and shows it: live in a terminal, as plain text elsewhere."""

from __future__ import annotations

from h2o_stream.config import Settings
from h2o_stream.engine.events import Finish
from h2o_stream.session.cliff import Cliff
from h2o_stream.session.jsonl import JsonlWriter
from h2o_stream.session.messages import text_of
from h2o_stream.session.questions import Replay, set_temperature
from h2o_stream.session.report import RunReport
from h2o_stream.session.turn import Turn
from h2o_stream.ui.screen import open_view
from h2o_stream.ui.start import open_conversation
from h2o_stream.ui.tables import print_report
from h2o_stream.ui.terminal import Terminal


def stream_questions(settings: Settings, replay: Replay, terminal: Terminal, jsonl: JsonlWriter) -> Finish | None:
    """Ask every turn of every question in one conversation.

    Returns:
        Why the last turn ended; None if there was none.
    """
    report, finish = RunReport(), None
    with open_conversation("h2o-stream", settings, terminal, jsonl) as loaded:
        questions = replay.questions
        questions.check(loaded.conversation.metadata.template)
        some = f"{replay.turns:,} of " if replay.turns and replay.turns < questions.turns else ""
        terminal.note(f"{loaded.header} · {some}{questions.turns:,} turns of {questions.source}", style="dim")
        view = open_view(terminal, loaded.title, loaded.conversation.engine.context, settings.think, report)
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
