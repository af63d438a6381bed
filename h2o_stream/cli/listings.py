"""What ``h2o-chat`` lists, finds, renames and removes in place of a chat: sessions and models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from h2o_stream.cli import run

if TYPE_CHECKING:
    from h2o_stream.ui.terminal import Terminal

_UNWRAPPED_WIDTH = 10_000
"""Columns of output that is not a terminal: one line for each row."""


def _terminal() -> Terminal:
    """A terminal for a table: if its standard output is none, each row is a line."""
    from h2o_stream.ui.terminal import Terminal

    terminal = Terminal()
    if not terminal.stdout_console.is_terminal:
        terminal.stdout_console.width = _UNWRAPPED_WIDTH
    return terminal


def session_names() -> list[str]:
    """For completion in a shell: the names of all sessions."""
    from h2o_stream.session.folders import session_names

    return session_names()


def list_sessions(enabled: bool) -> None:
    """``--sessions``."""
    if enabled:
        from h2o_stream.ui.sessions import show_sessions

        terminal = _terminal()
        show_sessions(terminal, terminal.stdout_console)
        raise typer.Exit


def rename(names: tuple[str, str] | None) -> None:
    """``--rename OLD NEW``."""
    if names is not None:
        from h2o_stream.session.folders import rename_session

        with run.reporting("h2o-chat", debug=False):
            rename_session(*names)
        raise typer.Exit


def remove(name: str | None) -> None:
    """``--remove NAME``."""
    if name is not None:
        from h2o_stream.session.folders import remove_session

        with run.reporting("h2o-chat", debug=False):
            remove_session(name)
        raise typer.Exit


def list_models(enabled: bool) -> None:
    """``--models``."""
    if enabled:
        from h2o_stream.base.memory import format_bytes
        from h2o_stream.base.resources import cache_folder
        from h2o_stream.models.other_tools import StoredModel, stored_models
        from h2o_stream.models.packed_cache import cached_bytes, cached_folders, embedded_models
        from h2o_stream.models.recommended import recommended
        from h2o_stream.ui.tables import models_table

        with run.reporting("h2o-chat", debug=False):
            terminal = _terminal()
            here = [*embedded_models(), *stored_models()]
            others = [
                StoredModel(x.name, x.nbytes, f"to download; about {x.tokens_per_s:.2g} tokens/s here")
                for x in recommended()
                if x.name not in {model.name for model in here}
            ]
            terminal.stdout_console.print(models_table([*here, *others], cached_folders()))
            terminal.note(f"h2o_stream keeps {format_bytes(cached_bytes())} in {cache_folder()}", style="dim")
        raise typer.Exit


def kept_names() -> list[str]:
    """For completion in a shell: the models of which something is kept."""
    from h2o_stream.models.packed_cache import cached_folders

    return [folder.names[0] for folder in cached_folders()]


def forget(name: str | None) -> None:
    """``--forget MODEL``."""
    if name is not None:
        from h2o_stream.base.memory import format_bytes
        from h2o_stream.models.packed_cache import forget
        from h2o_stream.ui.terminal import Terminal

        with run.reporting("h2o-chat", debug=False):
            terminal = Terminal()
            for folder in forget(name):
                terminal.note(f"removed {folder.path} ({folder.content}), {format_bytes(folder.nbytes)}")
        raise typer.Exit


def search(words: str) -> None:
    """``--search WORDS``."""
    from h2o_stream.ui.sessions import show_matches

    show_matches(_terminal().stdout_console, words)
