"""``h2o-stream``: replay questions through one endless conversation, and watch the cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from h2o_stream.base.options import Option, text_or_file
from h2o_stream.cli import run
from h2o_stream.cli.options import OUTPUT, OutputOptions, group_of, list_prompts, settings_group
from h2o_stream.config import POLICIES, RecallConfig, Settings
from h2o_stream.errors import ConfigError, DataError
from h2o_stream.session.questions import Question, QuestionSet, Replay, load_questions

app = run.app("H2O")


@dataclass(frozen=True)
class ReplayOptions:
    """What is replayed."""

    questions: Annotated[Path | None, Option("JSONL of question_id, category, turns. (default: MT-Bench)")] = None
    prompt_file: Annotated[Path | None, Option("Answer a file instead, or a named one, see --list-prompts.")] = None
    turns: Annotated[int | None, Option("Stop after this many turns.", min=1)] = None
    loop: Annotated[bool, Option("Start over at the end, forever or up to --turns.", "--loop")] = False
    compare: Annotated[str | None, Option("Policies side by side, such as full,h2o.")] = None
    cliff: Annotated[bool, Option("Read text up to just before the model's context first.", "--cliff")] = False
    record: Annotated[
        Path | None,
        Option("Record the terminal in asciinema's format; as FILE.svg, its last screen.", panel="Recording"),
    ] = None
    replay: Annotated[
        Path | None, Option("Play a recording at its original pace, without a model.", panel="Recording")
    ] = None
    pace: Annotated[float, Option("Speed of --replay, as a multiple of the original pace.", panel="Recording")] = 1.0

    list_prompts: Annotated[
        bool,
        Option(
            "List the named prompts and exit.", "--list-prompts", is_eager=True, callback=list_prompts, panel="Output"
        ),
    ] = False

    def load_questions(self) -> QuestionSet:
        """The questions, or the one prompt.

        Raises:
            ConfigError: both were given.
            DataError: a file cannot be read, or has nothing in it.
        """
        if self.prompt_file is None:
            return load_questions(self.questions)
        if self.questions is not None:
            raise ConfigError("--questions and --prompt-file were both given; leave one of them out")
        prompt = text_or_file(None, "", self.prompt_file, "--prompt-file")
        if not prompt:
            raise DataError(f"--prompt-file {self.prompt_file}: there is nothing in it")
        return QuestionSet((Question(self.prompt_file.stem, "prompt", (prompt,)),), str(self.prompt_file))

    def policies(self) -> list[str]:
        """The policies that are compared, if any; raises ConfigError if these are fewer than two."""
        policies = [
            name if name in POLICIES else name.lower()
            for name in (self.compare or "").replace(" ", "").split(",")
            if name
        ]
        if self.compare is not None and (len(policies) < 2 or any(policy not in POLICIES for policy in policies)):
            raise ConfigError(f"compare is {self.compare!r}; --compare takes two or more of {', '.join(POLICIES)}")
        if not 0 < self.pace < float("inf"):
            raise ConfigError(f"pace is {self.pace}; --pace must be above 0")
        return policies


@run.command(app, "h2o-stream", group_of(ReplayOptions, "Replay"), settings_group(RecallConfig.mode), OUTPUT)
def stream(replay: ReplayOptions, settings: Settings, output: OutputOptions) -> None:
    """Replay MT-Bench, or questions of your own, through one endless conversation."""
    policies = replay.policies()
    if replay.replay is not None:
        from h2o_stream.ui.recording import play
        from h2o_stream.ui.terminal import Terminal

        play(replay.replay, replay.pace, Terminal(output.color, output.quiet))
        return
    questions = replay.load_questions()
    if settings.model.tensor_parallel and (replay.record or policies):
        raise ConfigError("--tensor-parallel goes without --record and --compare; leave them out")
    settings = replace(settings, tools=questions.tools)
    with run.outputs(output, replay.record) as (terminal, records):
        with run.loading(settings.model, terminal):
            from h2o_stream.ui.stream import compare_policies, stream_questions
        asked = Replay(questions, replay.turns, replay.loop, replay.cliff)
        if policies:
            finish = compare_policies(settings, policies, asked, terminal, records)
        else:
            finish = stream_questions(settings, asked, terminal, records)
        run.leave(finish)


def main() -> None:
    """Entry point."""
    run.main("h2o-stream", app)
