"""``h2o-chat``: chat with a model for as long as you like."""

from __future__ import annotations

import select
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from h2o_stream.base.options import Option, text_or_file
from h2o_stream.base.texts import piped_text
from h2o_stream.cli import listings, run
from h2o_stream.cli.groups import Group, completing
from h2o_stream.cli.options import CONTEXT, OUTPUT, OutputOptions, convert, list_prompts, settings_group, sources_of
from h2o_stream.config import BENCH, CHAT_RECALL, ChatConfig, Settings
from h2o_stream.errors import ConfigError, DataError, file_errors

if TYPE_CHECKING:
    from h2o_stream.session.jsonl import JsonlWriter
    from h2o_stream.ui.terminal import Terminal

app = run.app("H2O")

_PATIENCE_S = 2.0
"""Seconds without anything from a pipe after which the user is told what is waited for."""


@dataclass(frozen=True)
class ChatOptions(ChatConfig):
    """`ChatConfig`, and what only the command line knows."""

    question: Annotated[
        list[str] | None,
        typer.Argument(help="Answer this and exit, as --prompt does.", show_default=False),
    ] = None
    prompt_file: Path | None = None
    continued: bool = False
    private: bool = False
    api_key: str | None = None
    search: str | None = None
    rename: tuple[str, str] | None = None
    remove: str | None = None
    export: Path | None = None
    list_prompts: bool = False
    sessions: bool = False
    models: bool = False
    forget: str | None = None

    def checked(self) -> ChatOptions:
        """These options with the prompt read, and with the session that is meant.

        Raises:
            ConfigError: the prompt is empty, or was given twice; options contradict each other.
            DataError: its file cannot be read, or standard input is not text; there is no session to continue.
        """
        text = self.prompt
        if self.question and (text is not None or self.prompt_file is not None):
            raise ConfigError(f"{' '.join(self.question)!r} and --prompt were both given; leave one of them out")
        if self.question:
            text = " ".join(self.question)
        prompt = text_or_file(text, "--prompt", self.prompt_file, "--prompt-file")
        if text == "-":
            prompt = piped_text(sys.stdin.buffer, "standard input")
        if prompt is not None and not prompt.strip():
            raise ConfigError("the prompt is empty; --prompt and --prompt-file need something to answer")
        if self.private and (self.continued or self.session):
            raise ConfigError("--private keeps nothing, but --session and --continue do; leave one of them out")
        session = self.meant_session(ask=prompt is None and sys.stdin.isatty() and sys.stdout.isatty())
        if session is None and self.export is not None:
            raise ConfigError(f"--export {self.export} needs the --session whose transcript is meant")
        return replace(self, prompt=prompt, session=session, history=self.history and not self.private)

    def meant_session(self, ask: bool) -> str | None:
        """The session of these options: the last one, or that of a name, or of a similar one if the user agrees.

        Raises:
            ConfigError: it was given twice, or cannot be a name.
            DataError: there is none to continue.
        """
        if self.continued and self.session is not None:
            raise ConfigError("--continue is the last session, --session another one; leave one of them out")
        if not self.continued and self.session is None:
            return None
        from h2o_stream.session.folders import check_name, session_names, similar_session

        if self.session is None:
            if not (names := session_names()):
                raise DataError("there is no conversation to continue yet")
            return names[0]
        check_name(self.session)
        similar = None if not ask or self.session in session_names() else similar_session(self.session)
        question = f"There is no session {self.session}; did you mean {similar}?"
        return similar if similar and typer.confirm(question, default=True, err=True) else self.session


def _listing(help: str, show: Callable[[bool], None]) -> Option:
    """An option that prints a list in place of a chat."""
    return Option(help, panel="Output", is_eager=True, callback=show)


CHAT = Group(
    ChatOptions,
    "Conversation",
    question=None,
    prompt=Option("Answer this and exit; - reads all of stdin.", "-p", "--prompt"),
    prompt_file=Option("Answer a file and exit; or a named one, see --list-prompts."),
    server=Option("Chat with a running h2o-serve, as http://127.0.0.1:8000, in place of a model here.", metavar="URL"),
    api_key=Option("The key that the --server wants."),
    single_turn=Option("Exit after the first reply."),
    session=Option(
        "Save the conversation under this name; resume it if it exists.",
        panel="Session",
        autocompletion=completing(listings.session_names),
    ),
    continued=Option("Continue the last conversation.", "-c", "--continue", panel="Session"),
    private=Option("Keep nothing of this chat: --no-history, and no --session.", panel="Session"),
    sessions=Option("List the sessions and exit.", panel="Session", is_eager=True, callback=listings.list_sessions),
    search=Option("Show where words were said, in all sessions, and exit.", panel="Session", metavar="WORDS"),
    rename=Option(
        "Give a session another name and exit.",
        panel="Session",
        metavar="OLD NEW",
        is_eager=True,
        callback=listings.rename,
    ),
    remove=Option(
        "Remove a session and exit.",
        panel="Session",
        is_eager=True,
        callback=listings.remove,
        autocompletion=completing(listings.session_names),
    ),
    retell=Option("Replay a session's transcript if its state does not fit.", panel="Session"),
    export=Option("Write the transcript of --session: FILE.md or FILE.json.", panel="Session"),
    record=Option("Record the terminal in asciinema's format.", panel="Session"),
    plain=Option("Print replies as plain text, not as Markdown.", panel="Output"),
    vim=Option("Use vi key bindings.", panel="Output"),
    history=Option("Keep what is typed, and every chat.", "--history/--no-history", panel="Session"),
    list_prompts=_listing("List the named prompts and exit.", list_prompts),
    models=_listing("List the models on this machine and exit.", listings.list_models),
    forget=Option(
        "Remove what h2o_stream keeps of a model and exit; see --models.",
        panel="Output",
        is_eager=True,
        callback=listings.forget,
        autocompletion=completing(listings.kept_names),
    ),
)


SETTINGS = settings_group(CHAT_RECALL)

KEPT_OPTIONS = frozenset(parameter.name for parameter in SETTINGS.parameters()) - {"system", "system_file", "seed"}
"""Options that a session keeps. The system prompt and the random generator are in its states."""


@run.command(app, "h2o-chat", CHAT, SETTINGS, OUTPUT, CONTEXT)
def chat(chat: ChatOptions, settings: Settings, output: OutputOptions, context: typer.Context) -> None:
    """Chat with a model for as long as you like, in constant memory.

    With a question it is answered, and the command ends.

    Without a terminal each line of standard input is a message, and the end of input ends the chat; with --prompt, all
    of it is a text that the prompt asks about.
    """
    if chat.search is not None:
        listings.search(" ".join((chat.search, *(chat.question or ()))))
        return
    chat = chat.checked()
    settings, sources = _resumed(chat.session, settings, context)
    chat = replace(chat, kept_options=KEPT_OPTIONS)
    if chat.export is not None and chat.session is not None:
        _export(chat.session, chat.export, thinking=settings.think == "show")
        return
    if settings.model.tensor_parallel and (chat.prompt is None or chat.session or chat.record):
        raise ConfigError("--tensor-parallel answers --prompt and --prompt-file, without --session and --record")
    if settings.sampling.temperature == BENCH:
        raise ConfigError(f"--temp {BENCH} is by the category of a question; h2o-stream has them, h2o-chat does not")
    with run.outputs(output, chat.record) as (terminal, records):
        if chat.prompt is not None and not settings.model.tensor_parallel:
            chat = replace(chat, piped=_piped(terminal.note))
        if chat.server is not None:
            run.leave("interrupted" if _chat_with(chat.server, chat, settings, sources, terminal, records) else None)
            return
        if terminal.interactive and terminal.live and chat.prompt is None and output.jsonl != "-":
            from h2o_stream.ui.loading_chat import LoadingChat

            with LoadingChat(settings, chat, terminal, records, sources) as early:
                finish = early.run()
        else:
            with run.loading(settings.model, terminal):
                from h2o_stream.ui.chat import open_chat
            with open_chat(settings, chat, terminal, records, sources) as ready:
                finish = ready.run()
        run.leave(finish)


def _resumed(
    session: str | None, settings: Settings, context: typer.Context
) -> tuple[Settings, dict[str, tuple[Any, str]]]:
    """The settings that a session was left with, unless flags say otherwise; and where each option comes from."""
    sources = sources_of(context)
    if session is None:
        return settings, sources
    from h2o_stream.session.folders import read_settings

    for name, value in read_settings(session).items():
        if value is not None and name in KEPT_OPTIONS and sources[name][1] != "flag":
            sources[name] = convert(context, name, value, f"session {session}"), "session"
    return SETTINGS.build({name: value for name, (value, _) in sources.items()}), sources


def _chat_with(
    url: str,
    chat: ChatOptions,
    settings: Settings,
    sources: dict[str, tuple[Any, str]],
    terminal: Terminal,
    records: JsonlWriter,
) -> bool:
    """Chat with a server. Returns whether Ctrl-C ended it. What is given here goes before the server's own options."""
    from h2o_stream.session.server import Server
    from h2o_stream.ui.server_chat import ServerChat

    values = {**asdict(settings.sampling), "window": settings.cache.window, "policy": settings.cache.policy}
    chosen = {name for name, (_, source) in sources.items() if source not in ("default", "session")}
    model = settings.model.model if "model" in chosen else None
    options = {name: value for name, value in values.items() if name in chosen}
    with ServerChat(Server(url, chat.api_key, model), options, settings.system, chat, terminal, records) as ready:
        return ready.run()


def _piped(note: Callable[[str], None]) -> str:
    """What a pipe or a file gives to a question; nothing at a terminal."""
    if sys.stdin.isatty():
        return ""
    with suppress(OSError, ValueError):  # this system cannot wait for it
        if not select.select([sys.stdin.fileno()], [], [], _PATIENCE_S)[0]:
            note("waiting for the end of standard input; < /dev/null answers without it")
    with file_errors("standard input"):
        return piped_text(sys.stdin.buffer, "standard input")


def _export(session: str, path: Path, thinking: bool) -> None:
    from h2o_stream.session.folders import find_transcript
    from h2o_stream.session.transcript import export

    transcript = find_transcript(session)
    if transcript.header is None:
        raise ConfigError(f"session {session} is empty; there is nothing to export")
    export(path, transcript.header, transcript.entries, thinking)


def main() -> None:
    """Entry point."""
    run.main("h2o-chat", app)
