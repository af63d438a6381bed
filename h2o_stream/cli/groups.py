"""Groups of options: what turns the fields of a config into options of a command, and their values into the config.

An option takes its type and its default from the field, so that neither is declared twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Generic, TypeVar, get_type_hints

import typer
from typer.models import ArgumentInfo

from h2o_stream.base.options import Option

T = TypeVar("T")


class Group(Generic[T]):
    """Options of a command, and what is made of their values.

    Args:
        make: called with the values by name; types and defaults of the options are those of its parameters.
        panel: heading in ``--help`` of the options that have none of their own.
        like: a dataclass with the types and defaults of the options that `make` takes as ``**values``.
        options: options in the order of ``--help``; a group's value is what it makes. None passes typer's context.
    """

    def __init__(
        self,
        make: Callable[..., T],
        panel: str = "Comparison",
        like: type | None = None,
        **options: Option | Group[Any] | ArgumentInfo | None,
    ) -> None:
        self.make, self.panel, self.options = make, panel, options
        self._declared: dict[str, tuple[Any, Any]] = {}
        for source in (like, make) if like else (make,):
            hints = get_type_hints(source, include_extras=True)
            signature = inspect.signature(source).parameters.items()
            self._declared |= {name: (hints[name], parameter.default) for name, parameter in signature if name in hints}

    def parameters(self) -> Iterator[inspect.Parameter]:
        """The parameters of a function that typer makes a command of."""
        for name, option in self.options.items():
            if isinstance(option, Group):
                yield from option.parameters()
                continue
            kind, default = self._declared[name]
            if isinstance(option, Option):
                if option.parse:
                    kind, default = str, default if default is inspect.Parameter.empty else ",".join(map(str, default))
                kind = Annotated[kind, typer_option(name, option, self.panel)]
            yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)

    def build(self, values: Mapping[str, Any]) -> T:
        """Make the object from the values of a command's parameters; raises ConfigError if one is wrong."""
        return self.make(**{name: self._value(name, option, values) for name, option in self.options.items()})

    def _value(self, name: str, option: Any, values: Mapping[str, Any]) -> Any:
        if isinstance(option, Group):
            return option.build(values)
        if isinstance(option, Option) and option.parse:
            return option.parse(values[name], _flags(name, option)[0])
        return values[name]


def _flags(name: str, option: Option) -> tuple[str, ...]:
    return option.flags or (f"--{name.replace('_', '-')}",)


def typer_option(name: str, option: Option, panel: str) -> Any:
    """An option as typer declares it."""
    settings: dict[str, Any] = {"rich_help_panel": option.panel or panel, "show_envvar": False, "case_sensitive": False}
    settings |= option.more
    return typer.Option(*_flags(name, option), help=option.help, **settings)


def completing(words: Iterable[str] | Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Complete the value of an option in a shell, from words or from a function that finds them."""

    def complete(incomplete: str) -> list[str]:
        candidates = words() if callable(words) else words
        return [word for word in candidates if word.startswith(incomplete) and word.isprintable()]

    return complete
