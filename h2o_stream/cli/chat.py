"""``h2o-chat``: talk with a model for as long as you like."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from h2o_stream.cli import run
from h2o_stream.cli.options import ConversationOptions, OutputOptions, one_of, option, takes
from h2o_stream.errors import ConfigError
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

    def chosen(self) -> str | None:
        """What is to be answered at once, or None.

        Raises:
            ConfigError: it is empty, or was given twice.
            DataError: its file cannot be read.
        """
        prompt = one_of(self.prompt, "--prompt", self.prompt_file, "--prompt-file")
        if self.prompt == "-":
            prompt = sys.stdin.buffer.read().decode("utf-8", "replace")
        if prompt is not None and not prompt.strip():
            raise ConfigError("the prompt is empty; --prompt and --prompt-file need something to answer")
        return prompt


@app.command()
@takes(PromptOptions, ConversationOptions, OutputOptions)
def chat(prompts: PromptOptions, talk: ConversationOptions, output: OutputOptions) -> None:
    """Talk with a model for as long as you like, in constant memory.

    Without a terminal each line of standard input is a message, and the end of input ends the chat.
    """
    with run.reporting("h2o-chat", output.debug):
        settings, prompt = talk.settings(), prompts.chosen()
        with Records(output.jsonl) as records:
            with run.loading(settings.model, output) as terminal:
                from h2o_stream.ui.chat import run_chat
            run.leave(run_chat(settings, prompt, prompts.single_turn, terminal, records))


def main() -> None:
    """Entry point."""
    app()
