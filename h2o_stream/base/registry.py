"""Names that packages can add to: what the core registers, and what entry points name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from h2o_stream.errors import H2OStreamError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


class Registry(MutableMapping[str, T], Generic[T]):
    """A mapping from names to objects.

    An installed package adds a name by an entry point, which is imported when the name is first looked up. Iterating
    reads the metadata of the installed packages and imports nothing.

    Args:
        items: what the core registers; its names cannot be replaced by an entry point.
        convert: turns the object that an entry point names into an item; its exceptions are reported as the package's.
    """

    def __init__(self, group: str, items: Mapping[str, T], convert: Callable[[Any], T]) -> None:
        self.group = group
        self._items, self._convert = dict(items), convert

    @property
    def registered(self) -> list[str]:
        """Names whose items are here without an import."""
        return list(self._items)

    def entry_points(self) -> dict[str, EntryPoint]:
        """The entry points of installed packages, by name; none takes the place of ours."""
        from importlib.metadata import entry_points

        points = sorted(entry_points(group=self.group), key=is_ours)
        return {entry.name: entry for entry in points}

    def __getitem__(self, name: str) -> T:
        """Look up a name.

        Raises:
            KeyError: nobody registered it.
            H2OStreamError: the package that registered it cannot be used.
        """
        if name not in self._items:
            self._items[name] = self._load(self.entry_points()[name])
        return self._items[name]

    def _load(self, entry: EntryPoint) -> T:
        try:
            return self._convert(entry.load())
        except Exception as error:
            package = entry.dist.name if entry.dist else "an unknown package"
            raise H2OStreamError(
                f"{entry.name} of {package} ({self.group}: {entry.value}) cannot be used: "
                f"{type(error).__name__}: {error}"
            ) from error

    def __setitem__(self, name: str, item: T) -> None:
        self._items[name] = item

    def __delitem__(self, name: str) -> None:
        del self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._items, *self.entry_points()]))

    def __len__(self) -> int:
        return len(list(iter(self)))


def is_ours(entry: EntryPoint) -> bool:
    """Whether this distribution has an entry point."""
    return entry.dist is not None and entry.dist.name == "h2o-stream"


def resolve(reference: str) -> Any:
    """Import what a reference like ``package.module:name`` names."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)
