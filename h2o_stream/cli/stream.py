"""``h2o-stream``: replay questions through one endless conversation and watch the cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from h2o_stream.cli import run
from h2o_stream.cli.options import ConversationOptions, OutputOptions, option, takes
from h2o_stream.session.questions import load_questions
from h2o_stream.session.records import Records

app = run.app("H2O")


@dataclass(frozen=True)
class ReplayOptions:
    """What is replayed."""

    questions: Annotated[
        Path | None,
        option("Replay", "--questions", help="JSONL of question_id, category, turns. (default: MT-Bench)"),
    ] = None
    turns: Annotated[int | None, option("Replay", "--turns", help="Stop after so many turns.", min=1)] = None
    loop: Annotated[bool, option("Replay", "--loop", help="Start over at the end, for ever or up to --turns.")] = False


@app.command()
@takes(ReplayOptions, ConversationOptions, OutputOptions)
def stream(replay: ReplayOptions, talk: ConversationOptions, output: OutputOptions) -> None:
    """Replay MT-Bench, or questions of your own, through one endless conversation."""
    with run.reporting("h2o-stream", output.debug):
        settings = talk.settings()
        questions = load_questions(replay.questions)
        with Records(output.jsonl) as records:
            with run.loading(settings.model, output) as terminal:
                from h2o_stream.ui.replay import replay_questions
            run.leave(replay_questions(settings, questions, replay.turns, replay.loop, terminal, records))


def main() -> None:
    """Entry point."""
    run.main("h2o-stream", app)
