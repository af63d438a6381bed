"""Replays questions through a conversation and shows it: live in a terminal, plain elsewhere."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from h2o_stream.config import Settings
from h2o_stream.engine.events import Finish
from h2o_stream.session.conversation import Conversation
from h2o_stream.session.questions import QuestionSet
from h2o_stream.session.recording import Recorder
from h2o_stream.session.records import Records
from h2o_stream.session.report import RunReport
from h2o_stream.session.turn import Turn
from h2o_stream.ui.plain import PlainView
from h2o_stream.ui.screen import Screen
from h2o_stream.ui.start import started
from h2o_stream.ui.tables import print_report
from h2o_stream.ui.terminal import Terminal


def replay_questions(
    settings: Settings,
    questions: QuestionSet,
    turns: int | None,
    loop: bool,
    record: Path | None,
    terminal: Terminal,
    records: Records,
) -> Finish | None:
    """Say every turn of every question, one after the other, in one conversation.

    Args:
        settings: of the conversation.
        questions: what is said.
        turns: end after so many turns; None is all of them.
        loop: start over after the last question.
        record: a file that gets what happens; None for none.
        terminal: where it is shown.
        records: gets a record for the run, each turn and the summary.

    Returns:
        Why the last turn ended; None if there was none.
    """
    report, finish = RunReport(), None
    with (
        started("h2o-stream", settings, terminal, records) as ready,
        Recorder(record, ready.title) as recorder,
    ):
        terminal.note(f"{ready.title} · {questions.turns} turns of {questions.source}", style="dim")
        view: Screen | PlainView = PlainView(terminal)
        if terminal.live and not terminal.quiet:
            view = Screen(terminal, ready.title, ready.conversation.engine.context)
        try:
            with view, ready.interrupts:
                total = str(turns or ("∞" if loop else questions.turns))
                for number, (question, text) in enumerate(islice(questions.replay(loop), turns), 1):
                    title = f"turn {number}/{total} · {question.category} #{question.id}"
                    view.asked(title, text)
                    recorder.asked(title, text)
                    turn = _turn(ready.conversation, text, view, recorder, report)
                    records.write(turn.record(question.id))
                    finish = turn.finish
                    if finish in ("interrupted", "context", "oom"):
                        break
        finally:
            if report.turns:
                print_report(terminal, report, ready.title)
            records.write(report.record())
    if finish in ("context", "oom"):
        terminal.error(turn.detail)
    return finish


def _turn(
    conversation: Conversation, text: str, view: Screen | PlainView, recorder: Recorder, report: RunReport
) -> Turn:
    for event in conversation.say(text):
        report.observe(event)
        view.event(event)
        recorder.event(event)
        if isinstance(event, Turn):
            return event
    raise AssertionError("a turn always ends with a Turn")
