"""Tests of many small rows: one item for pytest, whose own work for an item takes longer than most of them."""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any


def in_turn(names: str, rows: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like `pytest.mark.parametrize` with the rows in one test, which ends at the first that fails and names it.

    Each row has a folder `tmp_path` of its own, and what it patches is undone. It may not skip.
    """
    listed, keys = list(rows), [name.strip() for name in names.split(",")]

    def decorated(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def run(*args: Any, **fixtures: Any) -> None:
            for number, row in enumerate(listed):
                values = dict(zip(keys, row if len(keys) > 1 else [row], strict=True))
                try:
                    _run_row(test, args, fixtures, number, values)
                except Exception as error:
                    error.add_note(f"in row {number}: {values}")
                    raise

        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        vars(run)["__signature__"] = signature.replace(parameters=left)
        return run

    return decorated


def _run_row(
    test: Callable[..., None], args: tuple[Any, ...], fixtures: dict[str, Any], number: int, values: dict[str, Any]
) -> None:
    if "tmp_path" in fixtures:
        fixtures = fixtures | {"tmp_path": fixtures["tmp_path"] / f"row{number}"}
        fixtures["tmp_path"].mkdir()
    if "monkeypatch" not in fixtures:
        return test(*args, **fixtures, **values)
    with fixtures["monkeypatch"].context() as patched:
        return test(*args, **fixtures | {"monkeypatch": patched}, **values)
