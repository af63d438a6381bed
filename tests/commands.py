"""Runs commands in this process and returns what they print."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import typer.main
import typer.testing

from h2o_stream.cli import chat, compare, serve, stream

vars(typer.testing)["_get_command"] = cache(typer.main.get_command)  # reading the signatures takes up to 40 ms
APPS = {"h2o-chat": chat.app, "h2o-stream": stream.app, "h2o-compare": compare.app, "h2o-serve": serve.app}


def invoke(command: str, *arguments: object, typed: str | None = None) -> Any:
    return typer.testing.CliRunner().invoke(APPS[command], [str(argument) for argument in arguments], input=typed)


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def piped(model: Path, lines: Sequence[str], *options: object) -> Any:
    """A chat that reads its messages from a pipe."""
    return invoke("h2o-chat", "-m", model, "-n", 8, "--temp", 0, *options, typed="".join(f"{line}\n" for line in lines))


def texts(jsonl: str) -> list[str]:
    return [record["text"] for record in records(jsonl) if record["type"] == "turn"]
