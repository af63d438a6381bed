"""What every command shares: a quiet start, and errors as one line with the right exit code."""

from __future__ import annotations

import os
import sys
import threading
import tomllib
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from h2o_stream.errors import ConfigError, H2OStreamError
from h2o_stream.memory import limit_kernel_caches
from h2o_stream.processes import Processes
from h2o_stream.resources import NoHomeError, config_file
from h2o_stream.startup import LOADER, gc_paused, quieten_libraries
from h2o_stream.stdio import discard_output, handle_termination, prepare_stdio

if TYPE_CHECKING:
    from h2o_stream.cli.options import OutputOptions
    from h2o_stream.config import ModelConfig
    from h2o_stream.engine.events import Finish
    from h2o_stream.ui.terminal import Terminal

FAILED, WRONG_USAGE, INTERRUPTED, SIGNALLED = 1, 2, 130, 128
"""Exit codes; to the last one the number of the signal is added."""

_COMMANDS = ("h2o-chat", "h2o-stream")
"""Commands that read the user's file."""


def app(prefix: str | None = None) -> typer.Typer:
    """A typer application in the style of this project.

    Args:
        prefix: environment variables that begin so stand for options.
    """
    settings = {"help_option_names": ["-h", "--help"], "auto_envvar_prefix": prefix}
    return typer.Typer(pretty_exceptions_enable=False, context_settings=settings)


def main(command: str, app: typer.Typer) -> None:
    """Run a command; the options of some may also stand in the user's file."""
    prepare_stdio()
    handle_termination(lambda number: sys.exit(SIGNALLED + number))  # so that terminal and files are left as they were
    try:
        given = file_options(command, typer.main.get_command(app)) if command in _COMMANDS else {}
    except ConfigError as error:
        _complain(command, str(error))
        sys.exit(WRONG_USAGE)
    code: str | int | None = 0
    try:
        with reporting(command, debug=False):
            app(default_map=given)
    except typer.Exit as left:
        code = left.exit_code
    except SystemExit as left:
        code = left.code
    _leave_loader(code)
    sys.exit(code)


def _leave_loader(code: str | int | None) -> None:
    """End the process here if its loader was left in an import: that cannot be interrupted, nor waited for."""
    if any(thread.name == LOADER for thread in threading.enumerate()):
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else FAILED if code else 0)


def file_options(command: str, described: Any) -> dict[str, Any]:
    """The options of a command in the user's file: those at its top, and those in the table of the command's name.

    Raises:
        ConfigError: it cannot be read, or has a name that is no option.
    """
    try:
        path = config_file()
        told = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NoHomeError):
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    tables = {name: told.pop(name) for name in _COMMANDS if isinstance(told.get(name), dict)}
    names = {spelled.lstrip("-"): parameter.name for parameter in described.params for spelled in parameter.opts} | {
        parameter.name: parameter.name for parameter in described.params
    }
    given = told | tables.get(command, {})
    if unknown := [name for name in given if name not in names]:
        raise ConfigError(
            f"{path}: {unknown[0]} is no option of {command}; what only one command knows stands in its table, "
            f"{' or '.join(f'[{name}]' for name in _COMMANDS)}"
        )
    return {str(names[name]): value for name, value in given.items()}


@contextmanager
def reporting(command: str, debug: bool) -> Iterator[None]:
    """Turn exceptions into one line on stderr and an exit code; a traceback comes with --debug only."""
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        discard_output()
        raise typer.Exit(FAILED) from None
    except Exception as error:  # noqa: BLE001
        _complain(command, _reason(error, debug), traceback.format_exc() if debug else "")
        raise typer.Exit(WRONG_USAGE if isinstance(error, ConfigError) else FAILED) from None


def _reason(error: Exception, debug: bool) -> str:
    """What an error comes down to for a user."""
    hint = "" if debug else " (--debug shows where)"
    if isinstance(error, H2OStreamError):
        return str(error)
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # says pathlib
        return "this user has no home folder; set HOME"
    if isinstance(error, OSError) and error.strerror:  # a disk that is full, say
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}{hint}"
    return f"unexpected {type(error).__name__}: {str(error).partition(chr(10))[0]}{hint}"


def _complain(command: str, message: str, details: str = "") -> None:
    from h2o_stream.ui.terminal import one_line, printable

    with suppress(OSError):  # there is nobody to be told
        print(f"{printable(details)}{command}: {one_line(message)}", file=sys.stderr, flush=True)  # noqa: T201


def open_terminal(output: OutputOptions, bars: bool = False) -> Terminal:
    """Where output goes; the libraries, which must not be imported yet, are told to be quiet and small.

    Args:
        output: what is written where.
        bars: whether libraries draw bars of their own on a live terminal.
    """
    from h2o_stream.ui.terminal import Terminal

    terminal = Terminal(
        output.color, output.quiet, replies=output.jsonl != "-" and Processes().main, verbose=output.verbose
    )
    limit_kernel_caches()
    quieten_libraries(progress=bars and terminal.live and not output.quiet, warnings=output.verbose)
    return terminal


@contextmanager
def loading(model: ModelConfig, terminal: Terminal) -> Iterator[None]:
    """For the imports that bring torch and transformers: says what is going on and makes them quick."""
    terminal.note(f"Loading {model.model} ...", style="dim")
    with gc_paused():
        yield


def speaking(output: OutputOptions) -> OutputOptions:
    """What is written where; of several processes only the first one speaks."""
    return output if Processes().main else replace(output, quiet=True, jsonl=None)


def leave(finish: Finish | None) -> None:
    """End the command with the exit code that belongs to the last turn's end."""
    if finish == "interrupted":
        raise typer.Exit(INTERRUPTED)
    if finish == "oom":
        raise typer.Exit(FAILED)
