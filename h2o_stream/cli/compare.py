"""``h2o-compare``: what each policy costs and gives, on equal input."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from h2o_stream.base.processes import Processes
from h2o_stream.base.registry import is_ours
from h2o_stream.cli import run
from h2o_stream.cli.groups import typer_option
from h2o_stream.cli.options import OUTPUT, VERSION, OutputOptions, group_of
from h2o_stream.compare.catalog import COMMANDS, COMPARISONS
from h2o_stream.compare.options import ComparisonOptions

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_NAME = "h2o-compare"

_OTHER_SPELLINGS = {"recall --locomo": "locomo --dialogues", "speed --task": "speculation --tasks"}
"""Comparisons that can also be called by an option of another one."""


class _Subcommands(TyperGroup):
    """Our subcommands, and the comparisons and commands of other packages."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(dict.fromkeys([*super().list_commands(ctx), *_entry_points()]))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        for spelling, other in _OTHER_SPELLINGS.items():
            (name, option), (other_name, other_option) = spelling.split(), other.split()
            replaced = [re.sub(f"^{option}(?==|$)", other_option, arg) for arg in args[1:]]
            if args[0] == name and replaced != args[1:]:
                args = [other_name, *replaced]
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is None and (entry := _entry_points().get(cmd_name)):
            return _PluginCommand(entry)
        return command


def _entry_points() -> dict[str, EntryPoint]:
    return COMMANDS.entry_points() | COMPARISONS.entry_points()


class _PluginCommand(TyperCommand):
    """The subcommand of another package, which is imported when its arguments are parsed."""

    def __init__(self, entry: EntryPoint) -> None:
        super().__init__(entry.name, help=_summary(entry))

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        with run.reporting(_NAME, debug=False):
            name, plugin = str(self.name), run.app(add_completion=False)
            if name in COMPARISONS:
                _add_comparison(plugin, name, COMPARISONS[name])
            else:
                _add_command(plugin, name, COMMANDS[name])
        return typer.main.get_command(plugin).make_context(info_name, args, parent, **extra)


def _summary(entry: EntryPoint) -> str:
    """What ``--help`` says of it: the summary of its package, or for our own its first sentence."""
    if is_ours(entry):
        return inspect.getdoc(entry.load()) or ""
    summary = entry.dist.metadata["Summary"] if entry.dist else None
    return summary or entry.value


app = run.app(cls=_Subcommands)


@app.callback()
def compare(version: Annotated[bool, typer_option("version", VERSION, "Output")] = False) -> None:
    """Compare cache policies with each other and with a full cache.

    Under "accelerate launch --no_python" or "torchrun --no-python" the processes share the work of a comparison.
    """


def _add_comparison(app: typer.Typer, name: str, options: type[ComparisonOptions]) -> None:
    @run.command(app, _NAME, group_of(options), OUTPUT, name=name, help=inspect.getdoc(options))
    def comparison(chosen: ComparisonOptions, output: OutputOptions) -> None:
        chosen.check()
        with run.outputs(output, bars=True) as (terminal, records):
            with run.loading(chosen.model, terminal):
                from h2o_stream.ui.comparison import run_comparison

                made = chosen.make()
            run_comparison(made, chosen.out, terminal, records, Processes(shares_model=chosen.model.tensor_parallel))


def _add_command(app: typer.Typer, name: str, options: Any) -> None:
    @run.command(app, _NAME, group_of(options), OUTPUT, name=name, help=inspect.getdoc(options))
    def command(chosen: Any, output: OutputOptions) -> None:
        with run.outputs(output, bars=True) as (terminal, records):
            chosen.run(terminal, records)


for _name in COMPARISONS.registered:
    _add_comparison(app, _name, COMPARISONS[_name])


def main() -> None:
    """Entry point."""
    run.main(_NAME, app)
