"""What every command shares: a quiet start, and errors as one line with the right exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from h2o_stream.errors import ConfigError, H2OStreamError
from h2o_stream.startup import collector_paused, quieten_libraries

if TYPE_CHECKING:
    from h2o_stream.cli.options import OutputOptions
    from h2o_stream.config import ModelConfig
    from h2o_stream.engine.events import Finish
    from h2o_stream.ui.terminal import Terminal

FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130


def app() -> typer.Typer:
    """A typer application in the style of this project."""
    return typer.Typer(pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]})


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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(FAILED) from None
    except Exception as error:  # noqa: BLE001
        if debug:
            traceback.print_exc()
        message = str(error)
        if not isinstance(error, H2OStreamError):
            hint = "" if debug else " (--debug shows where)"
            message = f"unexpected {type(error).__name__}: {message.partition(chr(10))[0]}{hint}"
        from h2o_stream.ui.terminal import printable

        print(f"{command}: {printable(' '.join(message.split()))}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(WRONG_USAGE if isinstance(error, ConfigError) else FAILED) from None


@contextmanager
def loading(model: ModelConfig, output: OutputOptions) -> Iterator[Terminal]:
    """For the imports that bring torch and transformers: says what is going on and makes them quick and quiet."""
    from h2o_stream.ui.terminal import Terminal

    terminal = Terminal(output.color, output.quiet, replies=output.jsonl != "-")
    quieten_libraries(progress=terminal.live and not output.quiet, warnings=output.verbose)
    terminal.note(f"Loading {model.model} ...", style="dim")
    with collector_paused():
        yield terminal


def leave(finish: Finish | None) -> None:
    """End the command with the exit code that belongs to the last turn's end."""
    if finish == "interrupted":
        raise typer.Exit(INTERRUPTED)
    if finish == "oom":
        raise typer.Exit(FAILED)
