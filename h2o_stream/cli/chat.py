"""``h2o-chat``: talk with a model for as long as you like."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from h2o_stream.cli import run
from h2o_stream.cli.options import (
    CacheOptions,
    ModelOptions,
    OutputOptions,
    PolicyOptions,
    SamplingOptions,
    SystemOptions,
    option,
    takes,
)
from h2o_stream.session.records import Records

app = run.app()


@dataclass(frozen=True)
class PromptOptions:
    """What is said first."""

    prompt: Annotated[
        str | None,
        option("Conversation", "-p", "--prompt", help="Answer this and leave; - reads all of stdin."),
    ] = None
    prompt_file: Annotated[
        Path | None,
        option("Conversation", "--prompt-file", help="Answer a file and leave; or a named one in prompts/."),
    ] = None
    single_turn: Annotated[bool, option("Conversation", "--single-turn", help="Leave after the first reply.")] = False


@app.command()
@takes(PromptOptions, ModelOptions, PolicyOptions, CacheOptions, SamplingOptions, SystemOptions, OutputOptions)
def chat(
    prompts: PromptOptions,
    model: ModelOptions,
    policy: PolicyOptions,
    cache: CacheOptions,
    sampling: SamplingOptions,
    talk: SystemOptions,
    output: OutputOptions,
) -> None:
    """Talk with a model for as long as you like, in constant memory.

    Without a terminal each line of standard input is a message, and the end of input ends the chat.
    """
    with run.reporting("h2o-chat", output.debug):
        settings = run.settings(model, policy, cache, sampling, talk)
        prompt = run.prompt(prompts.prompt, prompts.prompt_file)
        with Records(output.jsonl) as records:
            with run.loading(settings.model, output) as terminal:
                from h2o_stream.ui.chat import run_chat
            run.leave(run_chat(settings, prompt, prompts.single_turn, terminal, records))


def main() -> None:
    """Entry point."""
    app()
