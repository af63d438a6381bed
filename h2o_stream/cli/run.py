"""What all commands share: a quiet start, and errors as one line with the right exit code."""

from __future__ import annotations

import inspect
import os
import shutil
import stat
import subprocess
import sys
import textwrap
import threading
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import typer
from typer.core import TyperCommand

from h2o_stream.base.memory import limit_kernel_caches
from h2o_stream.base.processes import Processes
from h2o_stream.base.resources import NoHomeError, config_file
from h2o_stream.base.startup import LOADER, importing, quieten_libraries
from h2o_stream.base.stdio import discard_output, handle_termination, prepare_stdio
from h2o_stream.cli.conversion import convert_plainly
from h2o_stream.cli.seeds import hint, with_dashes
from h2o_stream.errors import ConfigError, H2OStreamError, install_command
from h2o_stream.session.jsonl import JsonlWriter

if TYPE_CHECKING:
    from h2o_stream.cli.groups import Group
    from h2o_stream.cli.options import OutputOptions
    from h2o_stream.config import ModelConfig
    from h2o_stream.engine.events import Finish
    from h2o_stream.ui.terminal import Terminal

FAILED, WRONG_USAGE, INTERRUPTED, SIGNALLED = 1, 2, 130, 128
"""Exit codes; the number of the signal is added to the last one."""

INSTALLED_LATER = ("torch", "transformers", "accelerate", "matplotlib")
"""Packages without which `make chat` begins."""

_SET_UP = Path(__file__).parents[2] / "set_up.py"
"""The script of a checkout that installs packages into its .venv."""

_REPEATED = "H2O_REPEATED"
"""Environment variable of a command that runs again because torch was not installed."""

_MAX_CONFIG = 1 << 20
"""Letters of the user's file of settings that are read; a device has no end."""

_COMMANDS = ("h2o-chat", "h2o-stream")
"""Commands that read the user's file of settings."""


def app(prefix: str | None = None, **settings: Any) -> typer.Typer:
    """A typer application in the style of this project. `prefix` begins the environment variables that set options."""
    context = {"help_option_names": ["-h", "--help"], "auto_envvar_prefix": prefix}
    return typer.Typer(pretty_exceptions_enable=False, context_settings=context, **settings)


class _Command(TyperCommand):
    annotations: ClassVar[Mapping[str, Any]]
    """Annotations of the parameters of the function that is the command, by name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take underscores for dashes, and say what to use in place of other projects' options."""
        ctx.token_normalize_func = with_dashes
        for parameter in self.get_params(ctx):
            convert_plainly(parameter, self.annotations.get(parameter.name))
        if advice := hint(args, (name for parameter in self.params for name in parameter.opts)):
            with reporting(ctx.find_root().info_name or "", debug=False):
                raise ConfigError(advice)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """List the policies, those of other packages too, which only ``--help`` looks for, and fill its lines."""
        from h2o_stream.config import POLICIES

        for parameter in self.params:
            if parameter.name == "policy" and not parameter.help:  # type: ignore[attr-defined]
                parameter.help = f"{', '.join(POLICIES)}."  # type: ignore[attr-defined]
        paragraphs = inspect.cleandoc(self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        super().format_help(ctx, formatter)


def command(app: typer.Typer, program: str, *groups: Group[Any], **settings: Any) -> Callable[..., Any]:
    """Make a function a command; it is called with what each group makes of its options, in that order. One of the
    groups is `options.OUTPUT`. Every error becomes one line, see `reporting`.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            with reporting(program, values["debug"]):
                function(*(group.build(values) for group in groups))

        parameters = [parameter for group in groups for parameter in group.parameters()]
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}

        class Command(_Command):
            annotations = run.__annotations__

        app.command(cls=Command, **settings)(run)
        return function

    return decorate


def main(command: str, app: typer.Typer) -> None:
    """Run a command, with the defaults of the user's file for the commands that read it."""
    prepare_stdio()
    handle_termination(lambda number: sys.exit(SIGNALLED + number))  # restores terminal and files
    try:
        defaults = file_options(command, typer.main.get_command(app)) if command in _COMMANDS else {}
    except ConfigError as error:
        _complain(command, str(error))
        sys.exit(WRONG_USAGE)
    code: str | int | None = 0
    try:
        with reporting(command, debug=False):
            app(default_map=defaults)
    except typer.Exit as left:
        code = left.exit_code
    except SystemExit as left:
        code = left.code
    try:
        sys.stdout.flush()
    except OSError:  # Python would try again at exit, and exit with 120
        discard_output()
    _leave_loader(code)
    sys.exit(code)


def _leave_loader(code: str | int | None) -> None:
    """End the process if its loader thread is still importing: that can neither be interrupted nor waited for."""
    if any(thread.name == LOADER for thread in threading.enumerate()):
        end_process(code)


def end_process(code: str | int | None) -> NoReturn:
    """End the process, whatever its threads do."""
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
        with (path := config_file()).open(encoding="utf-8-sig") as file:
            settings = tomllib.loads(file.read(_MAX_CONFIG))
    except (FileNotFoundError, NotADirectoryError, NoHomeError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    tables = {name: settings.pop(name) for name in _COMMANDS if isinstance(settings.get(name), dict)}
    names = {spelled.lstrip("-"): parameter.name for parameter in described.params for spelled in parameter.opts} | {
        parameter.name: parameter.name for parameter in described.params
    }
    settings |= tables.get(command, {})
    if unknown := [name for name in settings if name not in names]:
        raise ConfigError(
            f"{path}: {unknown[0]} is no option of {command}; what only one command knows stands in its table, "
            f"{' or '.join(f'[{name}]' for name in _COMMANDS)}"
        )
    return {str(names[name]): value for name, value in settings.items()}


@contextmanager
def reporting(command: str, debug: bool) -> Iterator[None]:
    """Turn exceptions into one line on stderr and an exit code. Only --debug prints the traceback."""
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
        if isinstance(error, ModuleNotFoundError) and error.name in INSTALLED_LATER:
            _install_and_repeat(command, error)
        _complain(command, _reason(error, debug), traceback.format_exc() if debug else "")
        raise typer.Exit(WRONG_USAGE if isinstance(error, ConfigError) else FAILED) from None


def _install_and_repeat(command: str, error: ModuleNotFoundError) -> None:
    """In a checkout's .venv, install torch and the rest and run the command again, unless it has read from a pipe or a
    file.
    """
    with suppress(OSError):
        if _sets_up() and stat.S_ISCHR(os.fstat(0).st_mode) and _REPEATED not in os.environ:
            _complain(command, f"{_missing(error)}: it is installed now")
            if subprocess.run([sys.executable, _SET_UP, "all"], check=False).returncode == 0:
                os.environ[_REPEATED] = "1"
                os.execv(sys.executable, sys.orig_argv)


def _sets_up() -> bool:
    return _SET_UP.exists() and Path(sys.prefix) == _SET_UP.parent / ".venv"


def _missing(error: ModuleNotFoundError) -> str:
    reason = f" ({error.__context__})" if error.__context__ else ""  # why the model is not read without it
    return f"{error.name} is needed{reason} but not installed yet"


def _reason(error: Exception, debug: bool) -> str:
    hint = "" if debug else " (--debug shows where)"
    if isinstance(error, H2OStreamError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name in INSTALLED_LATER:
        return f"{_missing(error)}; run {'make setup' if _sets_up() else install_command(error.name)}"
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # says pathlib
        return "this user has no home folder; set HOME"
    if isinstance(error, OSError) and error.strerror:  # a disk that is full, say
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}{hint}"
    return f"unexpected {type(error).__name__}: {str(error).partition(chr(10))[0]}{hint}"


def _complain(command: str, message: str, details: str = "") -> None:
    from h2o_stream.ui.terminal import one_line, printable

    line = f"{command}: {one_line(message)}"
    with suppress(OSError):  # nobody reads it any more
        if sys.stderr.isatty():  # elsewhere it stays one line
            width = max(shutil.get_terminal_size().columns, 20)
            line = textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
        print(f"{printable(details)}{line}", file=sys.stderr, flush=True)  # noqa: T201


@contextmanager
def loading(model: ModelConfig, terminal: Terminal) -> Iterator[None]:
    """Wraps the imports of torch and transformers: says that the model is loading; see `importing` and, for errors,
    `find_before_imports` and `explain_bus_errors`.
    """
    from h2o_stream.base.mapped_files import explain_bus_errors
    from h2o_stream.models.find import find_before_imports
    from h2o_stream.ui.terminal import one_line

    terminal.note(f"Loading {model.model} ...", style="dim")
    program, name = Path(sys.argv[0]).name, one_line(model.model)
    explain_bus_errors(f"{program}: a file of {name} was cut short while it was in use, or its disk fails\n")
    with importing():
        find_before_imports(model.model, model.offline)
        yield


@contextmanager
def outputs(
    output: OutputOptions, record: Path | None = None, bars: bool = False
) -> Iterator[tuple[Terminal, JsonlWriter]]:
    """A command's terminal, recorded if wanted, and its records; of several processes only the first one prints.

    Makes the libraries, which must not be imported yet, quiet and their caches small. They may draw `bars` on a live
    terminal.
    """
    from h2o_stream.ui.recording import recording
    from h2o_stream.ui.terminal import Terminal

    main = Processes().main
    if not main:
        output = replace(output, quiet=True, jsonl=None)
    with JsonlWriter(output.jsonl) as records:
        terminal = Terminal(output.color, output.quiet, replies=output.jsonl != "-" and main, verbose=output.verbose)
        limit_kernel_caches()
        quieten_libraries(progress=bars and terminal.live and not output.quiet)
        with recording(record, terminal):
            yield terminal, records


def leave(finish: Finish | None) -> None:
    """End the command with the exit code of the last turn's end."""
    if finish == "interrupted":
        raise typer.Exit(INTERRUPTED)
    if finish == "oom":
        raise typer.Exit(FAILED)
