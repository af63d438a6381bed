"""``h2o-chat``: talk with a model for as long as you like."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from h2o_stream.cli import run
from h2o_stream.cli.options import (
    ConversationOptions,
    Invocation,
    OutputOptions,
    one_of,
    one_of_these,
    option,
    shown_and_left,
    takes,
)
from h2o_stream.config import ChatConfig, ModelConfig
from h2o_stream.errors import ConfigError
from h2o_stream.session.jsonl import JsonlWriter

if TYPE_CHECKING:
    from h2o_stream.ui.terminal import Terminal

app = run.app("H2O")

_ENDLESS = 10_000
"""Columns of a page that is no terminal."""


def _list_prompts(wanted: bool) -> None:
    from h2o_stream.resources import named_prompts

    if wanted:
        for name, text in named_prompts().items():
            typer.echo(f"{name:<14} {text.splitlines()[0][:100]}")
        raise typer.Exit


def _session_names() -> list[str]:
    from h2o_stream.session.sessions import saved_sessions

    return [name for name, _ in saved_sessions()]


def _list_sessions(wanted: bool) -> None:
    if wanted:
        from h2o_stream.ui.tables import sessions_table
        from h2o_stream.ui.terminal import Terminal

        Terminal().stdout_console.print(sessions_table())
        raise typer.Exit


def _list_models(wanted: bool) -> None:
    if wanted:
        from h2o_stream.models.kept import embedded_models, kept_bytes, kept_folders
        from h2o_stream.models.stores import stored_models
        from h2o_stream.resources import cache_folder
        from h2o_stream.ui.format import format_bytes
        from h2o_stream.ui.tables import models_table
        from h2o_stream.ui.terminal import Terminal

        with run.reporting("h2o-chat", debug=False):
            terminal = Terminal()
            if not terminal.stdout_console.is_terminal:
                terminal.stdout_console.width = _ENDLESS  # a name a line, for scripts
            terminal.stdout_console.print(models_table([*embedded_models(), *stored_models()], kept_folders()))
            terminal.note(f"h2o_stream keeps {format_bytes(kept_bytes())} in {cache_folder()}", style="dim")
        raise typer.Exit


def _kept_names() -> list[str]:
    from h2o_stream.models.kept import kept_folders

    return [folder.names[0] for folder in kept_folders()]


def _forget(name: str | None) -> None:
    if name is not None:
        from h2o_stream.models.kept import forget
        from h2o_stream.ui.format import format_bytes
        from h2o_stream.ui.terminal import Terminal

        with run.reporting("h2o-chat", debug=False):
            terminal, gone = Terminal(), forget(name)
            for folder in gone:
                terminal.note(f"removed {folder.path} ({folder.content}), {format_bytes(folder.nbytes)}")
        raise typer.Exit


@dataclass(frozen=True)
class ChatOptions:
    """How the chat is held."""

    prompt: Annotated[
        str | None,
        option("Conversation", "-p", "--prompt", help="Answer this and leave; - reads all of stdin."),
    ] = None
    prompt_file: Annotated[
        Path | None,
        option("Conversation", "--prompt-file", help="Answer a file and leave; or a named one, see --list-prompts."),
    ] = None
    single_turn: Annotated[bool, option("Conversation", "--single-turn", help="Leave after the first reply.")] = False
    session: Annotated[
        str | None,
        option(
            "Session",
            "--session",
            help="Save the conversation under this name; go on with it if there is one.",
            autocompletion=one_of_these(_session_names),
        ),
    ] = None
    retell: Annotated[
        bool,
        option("Session", "--retell", help="Feed a session's transcript again where its state does not fit."),
    ] = False
    export: Annotated[
        Path | None, option("Session", "--export", help="Write the transcript of --session: FILE.md or FILE.json.")
    ] = None
    record: Annotated[
        Path | None, option("Session", "--record", help="Write what happens, for h2o-stream --replay FILE.")
    ] = None
    plain: Annotated[bool, option("Output", "--plain", help="Replies as they come, not drawn as Markdown.")] = False
    vim: Annotated[bool, option("Output", "--vim", help="Edit with vi's keys.")] = False
    list_prompts: Annotated[
        bool, shown_and_left("--list-prompts", _list_prompts, help="List the named prompts and leave.")
    ] = False
    sessions: Annotated[bool, shown_and_left("--sessions", _list_sessions, help="List the sessions and leave.")] = False
    models: Annotated[
        bool, shown_and_left("--models", _list_models, help="List the models on this machine and leave.")
    ] = False
    forget: Annotated[
        str | None,
        option(
            "Output",
            "--forget",
            help="Remove what h2o_stream keeps of a model and leave; see --models.",
            is_eager=True,
            callback=_forget,
            autocompletion=one_of_these(_kept_names),
        ),
    ] = None

    def config(self) -> ChatConfig:
        """The checked settings behind the options.

        Raises:
            ConfigError: the prompt is empty, or was given twice.
            DataError: its file cannot be read.
        """
        prompt = one_of(self.prompt, "--prompt", self.prompt_file, "--prompt-file")
        if self.prompt == "-":
            prompt = sys.stdin.buffer.read().decode("utf-8", "replace")
        if prompt is not None and not prompt.strip():
            raise ConfigError("the prompt is empty; --prompt and --prompt-file need something to answer")
        if self.export is not None and self.session is None:
            raise ConfigError(f"--export {self.export} needs the --session whose transcript is meant")
        return ChatConfig(prompt, self.single_turn, self.session, self.retell, self.plain, self.vim, self.record)


@app.command()
@takes(ChatOptions, ConversationOptions, OutputOptions, Invocation)
def chat(chat: ChatOptions, talk: ConversationOptions, output: OutputOptions, invocation: Invocation) -> None:
    """Talk with a model for as long as you like, in constant memory.

    Without a terminal each line of standard input is a message, and the end of input ends the chat.
    """
    with run.reporting("h2o-chat", output.debug):
        settings, config = talk.settings(), chat.config()
        if chat.export is not None and chat.session is not None:
            _export(chat.session, chat.export)
            return
        if settings.model.tensor_parallel and (config.prompt is None or config.session or config.record):
            raise ConfigError("--tensor-parallel answers --prompt and --prompt-file, without --session and --record")
        output = run.speaking(output)
        with JsonlWriter(output.jsonl) as records:
            terminal = run.open_terminal(output)
            if _can_start_early(settings.model, config, output, terminal):
                from h2o_stream.ui.loading_chat import LoadingChat

                with LoadingChat(settings, config, terminal, records, invocation.sources()) as early:
                    finish = early.run()
            else:
                with run.loading(settings.model, terminal):
                    from h2o_stream.ui.chat import run_chat
                finish = run_chat(settings, config, terminal, records, invocation.sources())
            run.leave(finish)


def _can_start_early(model: ModelConfig, chat: ChatConfig, output: OutputOptions, terminal: Terminal) -> bool:
    """Whether somebody can type while the model loads; DeepSpeed wants the main thread."""
    return terminal.interactive and terminal.live and chat.prompt is None and output.jsonl != "-" and not model.zero


def _export(session: str, path: Path) -> None:
    from h2o_stream.session.export import export
    from h2o_stream.session.sessions import find_transcript

    transcript = find_transcript(session)
    if transcript.header is None:
        raise ConfigError(f"session {session} is empty; there is nothing to export")
    export(path, transcript.header, transcript.entries)


def main() -> None:
    """Entry point."""
    run.main("h2o-chat", app)
