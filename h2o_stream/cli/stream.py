"""``h2o-stream``: replay questions through one endless conversation and watch the cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from h2o_stream.cli import run
from h2o_stream.cli.options import ConversationOptions, OutputOptions, one_of, option, takes
from h2o_stream.config import POLICIES
from h2o_stream.errors import ConfigError, DataError
from h2o_stream.session.jsonl import JsonlWriter
from h2o_stream.session.questions import Question, QuestionSet, load_questions

app = run.app("H2O")


@dataclass(frozen=True)
class ReplayOptions:
    """What is replayed."""

    questions: Annotated[
        Path | None,
        option("Replay", "--questions", help="JSONL of question_id, category, turns. (default: MT-Bench)"),
    ] = None
    prompt_file: Annotated[
        Path | None,
        option("Replay", "--prompt-file", help="Answer a file instead, or a named one of h2o-chat --list-prompts."),
    ] = None
    turns: Annotated[int | None, option("Replay", "--turns", help="Stop after so many turns.", min=1)] = None
    loop: Annotated[bool, option("Replay", "--loop", help="Start over at the end, for ever or up to --turns.")] = False
    compare: Annotated[
        str | None, option("Replay", "--compare", help="Two policies side by side, such as full,h2o.")
    ] = None
    record: Annotated[Path | None, option("Recording", "--record", help="Write what happens, to show it again.")] = None
    replay: Annotated[
        Path | None, option("Recording", "--replay", help="Show what --record wrote, at its own pace, without a model.")
    ] = None
    pace: Annotated[float, option("Recording", "--pace", help="How many times as fast --replay shows it.")] = 1.0

    def asked(self) -> QuestionSet:
        """The questions, or the one prompt.

        Raises:
            ConfigError: both were given.
            DataError: a file cannot be read, or has nothing in it.
        """
        if self.prompt_file is None:
            return load_questions(self.questions)
        if self.questions is not None:
            raise ConfigError("--questions and --prompt-file were both given; leave one of them out")
        prompt = one_of(None, "", self.prompt_file, "--prompt-file")
        if not prompt:
            raise DataError(f"--prompt-file {self.prompt_file}: there is nothing in it")
        return QuestionSet((Question(self.prompt_file.stem, "prompt", (prompt,)),), str(self.prompt_file))

    def policies(self) -> list[str]:
        """What is compared.

        Raises:
            ConfigError: it is not two policies, or they cannot be recorded.
        """
        policies = [name.strip() for name in (self.compare or "").split(",") if name.strip()]
        if self.compare is not None and (len(policies) != 2 or not set(policies) <= set(POLICIES)):
            raise ConfigError(f"compare is {self.compare!r}; --compare takes two of {', '.join(POLICIES)}")
        if policies and self.record:
            raise ConfigError("--compare cannot be recorded; leave out --record")
        if not 0 < self.pace < float("inf"):
            raise ConfigError(f"pace is {self.pace}; --pace must be above 0")
        return policies


@app.command()
@takes(ReplayOptions, ConversationOptions, OutputOptions)
def stream(replay: ReplayOptions, talk: ConversationOptions, output: OutputOptions) -> None:
    """Replay MT-Bench, or questions of your own, through one endless conversation."""
    with run.reporting("h2o-stream", output.debug):
        settings, policies = talk.settings(), replay.policies()
        if replay.replay is not None:
            from h2o_stream.ui.playback import play
            from h2o_stream.ui.terminal import Terminal

            play(replay.replay, replay.pace, Terminal(output.color, output.quiet))
            return
        questions = replay.asked()
        if settings.model.tensor_parallel and (replay.record or policies):
            raise ConfigError("--tensor-parallel goes without --record and --compare; leave them out")
        output = run.speaking(output)
        with JsonlWriter(output.jsonl) as records:
            terminal = run.open_terminal(output)
            with run.loading(settings.model, terminal):
                from h2o_stream.ui.panes import compare_policies
                from h2o_stream.ui.stream import stream_questions
            if policies:
                finish = compare_policies(settings, policies, questions, replay.turns, replay.loop, terminal, records)
            else:
                finish = stream_questions(
                    settings, questions, replay.turns, replay.loop, replay.record, terminal, records
                )
            run.leave(finish)


def main() -> None:
    """Entry point."""
    run.main("h2o-stream", app)
